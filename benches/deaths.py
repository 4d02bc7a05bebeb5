"""Kill and stop each process of the daemon next to honest streams: how soon does every door answer again?

The daemon itself is killed as well, and started again at once, as a supervisor does.

python benches/deaths.py
python benches/deaths.py --rounds 5 --streams 3
python benches/deaths.py --kinds gateway,checker --signals stop
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import attrs
import click
import psutil
import trio
from command import Place, bench, carry_out, choices, places
from gateway_http import Gateway
from measure import warm_up
from report import cell, table
from rigs import Rig, ServerSettings, uma_trio_flags, uma_trio_rig

from uma_trio.aici.controllers import shipped
from uma_trio.client import ClientError, ServerError, Token, open_client
from uma_trio.demo.load import Daemon

KINDS: Final = ("gateway", "template worker", "checker", "runtime", "compiler", "engine", "daemon")
SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
COMMANDS: Final = {
    "template worker": "template_worker.py",
    "checker": "uma_trio.grammar",
    "compiler": "runtime.compiler",
}
"""What the command lines of processes hold that no metric names."""
POLL_S: Final = 0.01
CLOSED_POLL_S: Final = 0.1
"""Before a door that refuses connections is tried again: while the daemon starts, more would take its time."""
LIMIT_S: Final = 60.0
"""A door that does not answer for longer is a failure."""
CALM_S: Final = 2.0
"""Between two signals."""
CHAT: Final = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
OLLAMA: Final = {"model": "embedded", "stream": False, "messages": CHAT["messages"], "options": {"num_predict": 2}}
PROGRAM: Final = "start(async () => { await $`It is `; await gen({ regex: /\\d\\d/ }) })"
LONG: Final = {"prompt": "Tell me a story about a fox named Ada", "max_tokens": 2000, "ignore_eos": True}

Door = Callable[[], Awaitable[None]]


@attrs.define
class HonestStream:
    """A client of the socket that streams long answers until ``scope`` is cancelled."""

    daemon: Daemon
    last_s: float = 0.0
    gap_s: float = 0.0
    """The largest gap between two tokens since it was reset."""
    lost: int = 0
    """Answers that ended with an error, though the daemon did not end."""
    may_break: bool = False
    """Whether the daemon ends now."""

    async def run(self) -> None:
        while True:
            try:
                async with open_client(self.daemon.path) as client:
                    async for event in client.generate(**LONG):
                        if isinstance(event, Token):
                            self._token()
            except (ClientError, OSError):
                self.lost += not self.may_break
                await trio.sleep(CLOSED_POLL_S)

    def gap_now_s(self) -> float:
        return max(self.gap_s, trio.current_time() - self.last_s)

    def _token(self) -> None:
        now = trio.current_time()
        self.gap_s = max(self.gap_s, now - (self.last_s or now))
        self.last_s = now


@attrs.frozen(kw_only=True)
class Recovery:
    """What followed one signal.  Times count from it."""

    kind: str
    signal: str
    doors_s: float
    """Until every door had answered."""
    slowest: str
    """The last of them."""
    gap_s: float
    """The largest gap of the honest streams meanwhile."""
    refused: Counter[str]
    """Answers of doors that were errors, by code."""


class Doors:
    """All ways to ask the daemon, each with a request that a process must answer anew."""

    def __init__(self, daemon: Daemon, url: str) -> None:
        self._daemon = daemon
        self._url = url
        self._numbers: Iterator[int] = itertools.count()
        self.all: dict[str, Door] = {
            "socket": self._socket,
            "OpenAI": lambda: self._http("/v1/chat/completions", CHAT),
            "Anthropic": lambda: self._http("/v1/messages", CHAT),
            "Ollama": lambda: self._http("/api/chat", OLLAMA),
            "metrics": lambda: self._http("/metrics", None),
            "constraint": self._constraint,
            "controller": self._controller,
        }

    async def upload(self) -> None:
        """Upload a module that no other one equals, so that it is compiled."""
        number = str(next(self._numbers)).encode()
        section = bytes([len(number) + 2, 1]) + b"n" + number  # a custom section
        async with open_client(self._daemon.path) as client:
            await client.upload_controller(shipped()["yesno"] + b"\0" + section)

    async def _socket(self) -> None:
        await self._generate(prompt="Hello", max_tokens=1)

    async def _constraint(self) -> None:
        await self._generate(prompt="1", max_tokens=2, constraint={"choice": [f"{next(self._numbers)}"]})

    async def _controller(self) -> None:
        await self._generate(controller="jsctrl", controller_arg=PROGRAM)

    async def _generate(self, **fields: Any) -> None:
        async with open_client(self._daemon.path) as client:
            await client.complete(**fields)

    async def _http(self, path: str, body: Any) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})

        def send() -> None:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                answer.read()

        await trio.to_thread.run_sync(send, abandon_on_cancel=True)


async def answered(door: Door, refused: Counter[str]) -> float:
    """Ask until the door answers; returns when it did."""
    while True:
        try:
            await door()
            return trio.current_time()
        except ServerError as error:
            refused[str(error.code)] += 1
        except urllib.error.HTTPError as error:
            refused[f"HTTP {error.code}"] += 1
        except (ClientError, OSError):
            refused["connection"] += 1
            await trio.sleep(CLOSED_POLL_S)
        await trio.sleep(POLL_S)


@attrs.define
class SupervisedDaemon:
    """The daemon's process, which is started again after its end, with the same arguments."""

    pid: int
    command: Sequence[str]

    @classmethod
    def of(cls, pid: int) -> SupervisedDaemon:
        return cls(pid, psutil.Process(pid).cmdline())

    async def start_again(self, nursery: trio.Nursery) -> None:
        start = partial(
            trio.run_process, self.command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.pid = (await nursery.start(start)).pid


async def find(kind: str, daemon: Daemon, pid: int) -> int | None:
    """The process of this kind."""
    if kind == "daemon":
        return pid
    if kind in COMMANDS:
        return next((process.pid for process in psutil.Process(pid).children(recursive=True) if COMMANDS[kind] in _line(process)), None)  # fmt: skip
    pid_of_kind = (await daemon.snapshot())[{"runtime": "controllers"}.get(kind, kind)]["pid"]
    return None if pid_of_kind is None else int(pid_of_kind)


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def strike(
    kind: str,
    name: str,
    supervised: SupervisedDaemon,
    doors: Doors,
    load: Sequence[HonestStream],
    processes: trio.Nursery,
) -> Recovery:
    """Send the signal ``name`` to the process, and wait until every door answers.

    Args:
        processes: for a daemon that is started again.
    """
    daemon, refused = doors._daemon, Counter[str]()
    asked = dict(doors.all)
    times: dict[str, float] = {}
    asking = set[str]()

    async def ask(name: str, door: Door) -> None:
        asking.add(name)
        times[name] = await answered(door, refused)
        asking.discard(name)  # an upload that was too quick to be struck is asked for again

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            while (pid := await find(kind, daemon, supervised.pid)) is None:
                if kind == "compiler" and not asking:
                    nursery.start_soon(ask, "upload", doors.upload)
                await trio.sleep(0.001)
            for stream in load:
                stream.gap_s, stream.may_break = 0.0, kind == "daemon"
            began = trio.current_time()
            os.kill(pid, SIGNALS[name])
            if kind == "daemon":
                await supervised.start_again(processes)
            for door_name, door in asked.items():
                nursery.start_soon(ask, door_name, door)
        while any(stream.last_s < began for stream in load):  # noqa: ASYNC110 - several tasks count
            await trio.sleep(POLL_S)
    for stream in load:
        stream.may_break = False
    slowest = max(times, key=times.__getitem__)
    gap_s = max(stream.gap_now_s() for stream in load)
    return Recovery(kind=kind, signal=name, doors_s=times[slowest] - began, slowest=slowest, gap_s=gap_s, refused=refused)  # fmt: skip


async def run(rig: Rig, n_streams: int, rounds: int, kinds: Sequence[str], names: Sequence[str]) -> list[Recovery]:
    """Strike each process with each signal in turn."""
    gateway = rig.transport
    assert isinstance(gateway, Gateway)
    doors = Doors(gateway.daemon, f"http://{gateway.host}:{gateway.port}")
    load = [HonestStream(gateway.daemon) for _ in range(n_streams)]
    assert rig.pid is not None
    supervised = SupervisedDaemon.of(rig.pid)
    recoveries = []
    async with trio.open_nursery() as nursery:
        for stream in load:
            nursery.start_soon(stream.run)
        for name, door in {**doors.all, "upload": doors.upload}.items():
            refused = Counter[str]()
            with trio.move_on_after(LIMIT_S) as limit:
                await answered(door, refused)
            if limit.cancelled_caught:
                raise click.ClickException(f"{name} does not answer: {dict(refused)}")
        for _, kind, name in itertools.product(range(rounds), kinds, names):
            if (kind, name) == ("daemon", "stop"):  # nobody watches it
                continue
            await trio.sleep(CALM_S)
            try:
                recoveries.append(await strike(kind, name, supervised, doors, load, nursery))
            except trio.TooSlowError:
                raise click.ClickException(f"a door does not answer {LIMIT_S:g} s after SIG{name.upper()} for the {kind}") from None  # fmt: skip
        nursery.cancel_scope.cancel()
    if lost := sum(stream.lost for stream in load):
        raise click.ClickException(f"{lost} answers of the honest streams were lost")
    return recoveries


def show(recoveries: Sequence[Recovery]) -> str:
    """A line for each process and signal."""
    lines = []
    for kind, name in dict.fromkeys((recovery.kind, recovery.signal) for recovery in recoveries):
        those = [recovery for recovery in recoveries if (recovery.kind, recovery.signal) == (kind, name)]
        doors, gaps = [recovery.doors_s for recovery in those], [recovery.gap_s for recovery in those]
        refused = sum((recovery.refused for recovery in those), Counter[str]())
        lines.append([
            f"{kind}, SIG{name.upper()}", str(len(those)), cell(statistics.median(doors), 2), cell(max(doors), 2),
            Counter(recovery.slowest for recovery in those).most_common(1)[0][0], cell(1e3 * statistics.median(gaps), 0),
            cell(1e3 * max(gaps), 0), ", ".join(f"{n} {code}" for code, n in sorted(refused.items())) or "-",
        ])  # fmt: skip
    header = ("process", "rounds", "all doors answer, p50 s", "max", "the last one", "largest gap of a stream, p50 ms", "max", "refused")  # fmt: skip
    return table(header, lines)


@bench()
@click.option("--rounds", type=click.IntRange(1), default=3, help="Signals of each kind to each process.")
@click.option("--streams", "n_streams", type=click.IntRange(1, 32), default=3, help="Honest streams.")
@click.option("--kinds", default=",".join(KINDS), help="Processes.")
@click.option("--signals", "names", default=",".join(SIGNALS), help="Signals: kill, stop.")
@places()
def main(n_streams: int, rounds: int, kinds: str, names: str, **options: Any) -> None:
    """Send SIGKILL and SIGSTOP to each process next to streams over the socket, and ask at every door until it answers.

    The daemon gets SIGKILL only, and is started again at once; it breaks the streams, which go on with it.

    Refused requests are sent again, and counted by their code. The largest gap is that between two tokens of one stream,
    from the signal until the last door has answered. Exit codes: 0 success, 1 a stream was lost or a door stays closed.
    """
    place = Place.of(options)
    place.show()
    wanted, signals = choices(kinds, "--kinds", KINDS), choices(names, "--signals", [*SIGNALS])
    parallel = n_streams + 8
    serving = ServerSettings(model=place.model, threads=place.threads, parallel=parallel, ctx=parallel * 4608)
    click.echo(f"server    {serving}\nload      {n_streams} streams, {rounds} rounds\n")

    async def work() -> list[Recovery]:
        async with uma_trio_rig(uma_trio_flags(serving), protocol="http") as rig:
            await warm_up(rig)
            return await run(rig, n_streams, rounds, wanted, signals)

    click.echo(show(carry_out(work)))
    sys.exit(0)


if __name__ == "__main__":
    main()
