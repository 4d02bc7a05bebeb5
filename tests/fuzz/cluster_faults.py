"""Disturbs one of several daemons that are peers, at random, and checks that no session is lost, forked or written twice.

    python -m tests.fuzz.cluster_faults                                   20 faults of one of two daemons, seed 0
    python -m tests.fuzz.cluster_faults --faults 200 --daemons 3 --seed 7

Clients continue sessions, two clients each, behind a balancer that sends a session to the same daemon while that is
healthy, and now and then to another one.  One after another, a daemon

    is killed, and started again
    stands still (SIGSTOP), and goes on
    drains (SIGTERM), and is started again
    is cut off from everybody, or from its peers alone: what is sent to it arrives later

After each fault, every session must be served again.  At the end,

    each session is at one daemon, once it was asked for: what a killed daemon was about to take is on its way until then
    every answer that a client has got is the turn of its session that it said it was, with the same text
    no request that was refused has left a turn
    every other request has ended in time: with an answer, an error with a code, or a broken connection

The exit code is 1 if something of this does not hold.  Ctrl-C ends a search after the fault of now.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import attrs
import httpx
import psutil

from tests.support.real_daemon import WAIT_S, Daemon, real_daemon

FAULTS: Final = ("kill", "stop", "drain", "cut", "cut from peers")
REQUEST_S: Final = 300.0
"""A request that takes longer hangs.  One that arrives while a daemon starts waits for the end of that."""
SERVED_S: Final = 300.0
"""How long after a fault every session must be served again."""
HEALTH_S: Final = 0.2
ASTRAY: Final = 0.15
"""Share of the requests that the balancer sends to some daemon."""
TURNS: Final = 20
"""After so many answers a client begins another session."""
UNKNOWN: Final = ("E_GATEWAY_NO_DAEMON", "E_GATEWAY_BROKEN", "E_RUNTIME_SHUTDOWN", "E_RUNTIME_INTERNAL")
"""Errors that leave open whether there is a turn."""


class Doors:
    """TCP proxies that can be shut: what is sent then arrives when they are open again."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self, target: int) -> Door:
        """A proxy in front of a port of this machine."""
        door, server = asyncio.run_coroutine_threadsafe(Door.begin(target), self._loop).result()
        self._servers.append(server)
        return door

    def set(self, door: Door, *, is_open: bool) -> None:
        """Open or shut a door."""
        self._loop.call_soon_threadsafe(door.passes.set if is_open else door.passes.clear)

    def close(self) -> None:
        """End all proxies."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for each in connections:
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next round of the loop


@attrs.define(eq=False)
class Door:
    """One proxy."""

    target: int
    passes: asyncio.Event = attrs.field(factory=asyncio.Event)
    port: int = 0

    @classmethod
    async def begin(cls, target: int) -> tuple[Door, asyncio.Server]:
        """Listen."""
        door = cls(target)
        door.passes.set()
        server = await asyncio.start_server(door._serve, "127.0.0.1", 0)
        door.port = server.sockets[0].getsockname()[1]
        return door, server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            await self.passes.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(back)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except (OSError, asyncio.CancelledError):
            for each in ends:
                each.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self.passes.wait()
                sink.write(data)
                await sink.drain()
        await self.passes.wait()
        with contextlib.suppress(OSError):
            sink.close()


@attrs.define(eq=False)
class Member:
    """A daemon with its two doors: for clients, and for peers."""

    port: int
    clients: Door
    peers: Door
    folder: Path
    flags: Sequence[str] = ()
    daemon: Daemon | None = None
    _stack: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.clients.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peers.port}"

    def holds(self, session: str) -> bool:
        """Whether this daemon may write a session."""
        assert self.daemon is not None
        with self.daemon.wire() as wire:
            wire.send(type="lease", action="ask", session_id=session)
            return bool((wire.receive() or {})["state"] == "held")

    def start(self) -> None:
        """Start the daemon again, with what is on its disk."""
        self.daemon = self._stack.enter_context(real_daemon(*self.flags, start_s=SERVED_S))

    def end(self) -> None:
        """Let it drain, and check its exit code and its log."""
        self._stack.close()

    def kill(self) -> None:
        """End it at once."""
        assert self.daemon is not None
        others = self.daemon.processes[1:]
        self.daemon.process.kill()
        self.daemon.process.wait()
        psutil.wait_procs(others, timeout=WAIT_S)  # the gateway has the port
        self.end()

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        assert self.daemon is not None
        for process in self.daemon.processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


@attrs.define
class Answered:
    """An answer that a client has got."""

    turn: int
    text: str


@attrs.define(eq=False)
class Talk:
    """One session, and what its clients know of it."""

    name: str
    answered: dict[int, Answered] = attrs.field(factory=dict)
    """By the number of the question."""
    refused: set[int] = attrs.field(factory=set)


@attrs.define(eq=False)
class Clients:
    """Two clients that continue one session after another."""

    name: str
    talks: list[Talk] = attrs.field(factory=list)
    answered_at: float = 0.0
    """When the request began that was answered last."""
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)

    @property
    def talk(self) -> Talk:
        if not self.talks or len(self.talks[-1].answered) >= TURNS:
            self.talks.append(Talk(f"{self.name}.{len(self.talks)}"))
        return self.talks[-1]

    def run(self, search: Search, rng: Random) -> None:
        """Ask until the end."""
        with httpx.Client(timeout=REQUEST_S) as http:
            while not search.ended.is_set():
                with search.lock:
                    talk, number = self.talk, next(self._numbers)
                    url = search.choose(talk.name, rng)
                self._ask(search, http, talk, number, url)
                time.sleep(rng.uniform(0, 0.1))

    def _ask(self, search: Search, http: httpx.Client, talk: Talk, number: int, url: str) -> None:
        body = {"session_id": talk.name, "messages": [{"role": "user", "content": f"Question {number}"}]}
        began = time.monotonic()
        try:
            answer = http.post(f"{url}/v1/generate", json={**body, "max_tokens": 8, "stream": False})
            found: dict[str, Any] = answer.json()
        except httpx.ReadTimeout:
            search.report(f"{talk.name}: question {number} hangs")
            return
        except (httpx.TransportError, ValueError) as error:
            search.outcomes[type(error).__name__] += 1
            return
        with search.lock:
            if answer.status_code == 200:
                search.outcomes["answered"] += 1
                talk.answered[number] = Answered(found["session"]["turns"], found["text"])
                self.answered_at = max(self.answered_at, began)
                return
            code = found.get("error", {}).get("code")
            search.outcomes[str(code)] += 1
            if code is None:
                search.report(f"{talk.name}: an error without a code: {answer.text[:200]}")
            elif code not in UNKNOWN:
                talk.refused.add(number)


@attrs.define(eq=False)
class Search:
    """Daemons, clients, and what was found."""

    rng: Random
    doors: Doors
    members: Sequence[Member]
    clients: Sequence[Clients]
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    ended: threading.Event = attrs.field(factory=threading.Event)
    healthy: set[str] = attrs.field(factory=set)
    outcomes: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    problems: list[str] = attrs.field(factory=list)
    last: str = ""

    def report(self, problem: str) -> None:
        """Note what should not be."""
        self.problems.append(f"after {self.faults.total()} faults, {self.last}: {problem}")
        print(self.problems[-1], flush=True)

    def choose(self, session: str, rng: Random) -> str:
        """The balancer: where a request of a session goes."""
        urls = [member.url for member in self.members]
        up = [url for url in urls if url in self.healthy] or urls
        return rng.choice(up) if rng.random() < ASTRAY else up[sum(session.encode()) % len(up)]

    def look(self, member: Member) -> None:
        """The balancer's look at the health of a daemon, until the end."""
        while not self.ended.is_set():
            try:
                is_healthy = httpx.get(f"{member.url}/health", timeout=1.0).status_code == 200
            except httpx.TransportError:
                is_healthy = False
            with self.lock:
                (self.healthy.add if is_healthy else self.healthy.discard)(member.url)
            time.sleep(HEALTH_S)

    def disturb(self) -> None:
        """Let one fault happen, and wait until everything is served again."""
        member, kind = self.rng.choice(self.members), self.rng.choice(FAULTS)
        self.last = f"{kind} of {self.members.index(member)}"
        time.sleep(min(3.0, self.rng.expovariate(1)))
        self._do(kind, member)
        self.faults[kind] += 1
        print(f"{self.faults.total()}: {self.last}", flush=True)
        healed = time.monotonic()
        while late := [each.name for each in self.clients if each.answered_at < healed]:
            if time.monotonic() > healed + SERVED_S:
                self.report(f"not served within {SERVED_S:.0f} s: {late}")
                return
            time.sleep(0.05)

    def _do(self, kind: str, member: Member) -> None:
        assert member.daemon is not None
        for_s = self.rng.uniform(0.5, 5)
        match kind:
            case "kill":
                member.kill()
                time.sleep(for_s / 2)
                member.start()
            case "drain":
                member.daemon.signal(signal.SIGTERM)
                if (code := member.daemon.wait()) != 0:
                    self.report(f"ended with {code} after SIGTERM: {member.daemon.logs()[-3000:]}")
                member.end()
                time.sleep(for_s / 4)
                member.start()
            case "stop":
                member.signal_all(signal.SIGSTOP)
                time.sleep(for_s)
                member.signal_all(signal.SIGCONT)
            case _:
                cut = [member.peers] if kind == "cut from peers" else [member.peers, member.clients]
                for door in cut:
                    self.doors.set(door, is_open=False)
                time.sleep(for_s)
                for door in cut:
                    self.doors.set(door, is_open=True)

    def compare(self) -> None:
        """Compare what the daemons have with what the clients know."""
        self.last = "at the end"
        talks = [talk for each in self.clients for talk in each.talks if talk.answered]
        with httpx.Client(timeout=REQUEST_S) as http:
            for talk in talks:
                answer = self._read(http, talk)
                if answer.status_code != 200:
                    self.report(f"{talk.name} cannot be read: {answer.text}")
                    continue
                self._compare(talk, answer.json()["messages"])
        for talk in talks:
            if (n := sum(member.holds(talk.name) for member in self.members)) != 1:
                self.report(f"{talk.name} is at {n} daemons")

    def _read(self, http: httpx.Client, talk: Talk) -> httpx.Response:
        """The session, at a daemon at random.  One that says "try again" is asked again, as clients do."""
        url, until = self.rng.choice(self.members).url, time.monotonic() + SERVED_S
        while True:
            answer = http.post(f"{url}/v1/session/read", json={"session_id": talk.name})
            if "retry-after" not in answer.headers or time.monotonic() > until:
                return answer
            self.outcomes["read again"] += 1
            time.sleep(1)

    def _compare(self, talk: Talk, messages: Sequence[dict[str, Any]]) -> None:
        pairs = [(user["content"], reply["content"]) for user, reply in zip(messages[::2], messages[1::2], strict=True)]
        questions = [question for question, _ in pairs]
        for number, answered in talk.answered.items():
            expected = (f"Question {number}", answered.text)
            if pairs[answered.turn - 1 : answered.turn] != [expected]:
                self.report(f"{talk.name}: turn {answered.turn} is not {expected}: {pairs}")
        for number in talk.refused:
            if f"Question {number}" in questions:
                self.report(f"{talk.name}: question {number} was refused and has a turn")
        if len(set(questions)) < len(questions):
            self.report(f"{talk.name} has a turn twice: {questions}")


def steady_port() -> int:
    """A port where nobody listens now, and that no connection gets as its own while its daemon is away."""
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", Random().randrange(20_000, 30_000)))
            return int(sock.getsockname()[1])


@contextlib.contextmanager
def searching(n_daemons: int, n_sessions: int, seed: int, folder: Path) -> Iterator[Search]:
    """A search whose daemons run, without clients yet."""
    key = folder / "peers.key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef" * 4)
    doors = Doors()
    ports = [steady_port() for _ in range(n_daemons)]
    members = [Member(port, doors.open(port), doors.open(port), folder / str(port)) for port in ports]
    try:
        for member in members:
            member.flags = (
                *("--http", str(member.port), "--state-dir", str(member.folder), "--threads", "1", "--parallel", "8"),
                *("--ctx", "16384", "--peers", ",".join([each.peer_url for each in members]), "--peers-key", str(key)),
                *("--peer-url", member.peer_url, "--drain-notice-s", "1"),
            )
            member.start()
        yield Search(Random(seed), doors, members, [Clients(f"talk-{n}") for n in range(n_sessions)])
        for member in members:
            member.end()
    finally:
        for member in members:
            if member.daemon is not None and member.daemon.process.poll() is None:
                member.daemon.process.kill()
        doors.close()


STOP: Final = threading.Event()
"""Set by Ctrl-C: the search ends after the fault of now."""


def search(
    n_faults: int, seed: int, folder: Path, *, n_daemons: int = 2, n_sessions: int = 4, stop: threading.Event = STOP
) -> Search:
    """Let ``n_faults`` faults happen; what was found is in ``problems``."""
    with searching(n_daemons, n_sessions, seed, folder) as found:
        threads = [threading.Thread(target=found.look, args=(member,), daemon=True) for member in found.members]
        for n, clients in enumerate(found.clients):
            for m in range(2):
                rng = Random(f"{seed} {n} {m}")
                threads.append(threading.Thread(target=clients.run, args=(found, rng), daemon=True))
        for thread in threads:
            thread.start()
        try:
            for _ in range(n_faults):
                if stop.is_set():
                    break
                found.disturb()
        finally:
            found.ended.set()
            for thread in threads:
                thread.join(REQUEST_S)
        found.compare()
    return found


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--daemons", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=4, help="At a time.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: STOP.set())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="c") as folder:
        found = search(given.faults, given.seed, Path(folder), n_daemons=given.daemons, n_sessions=given.sessions)
    sessions = sum(len(each.talks) for each in found.clients)
    print(f"{given.daemons} daemons, {dict(found.faults)}, {sessions} sessions, {time.monotonic() - began:.0f} s")
    print(f"outcomes {dict(found.outcomes)}\n{len(found.problems)} problems")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
