"""The real daemon in a process of its own, and a blocking client that can send anything.

    with real_daemon("--parallel", "8") as daemon:
        print(daemon.ask(prompt="hello", max_tokens=5).text)

Needs the library; ``missing()`` says what is missing and how to build it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import psutil
import trio

from llama_abi.locations import DIRECTORY_VARIABLE, library_directory
from tests.support.forked import TITLE, UMA_TRIO, Forked, can_fork
from tests.support.run import SETTINGS_OF_DAEMONS
from uma_trio.client import Client, open_client
from uma_trio.models.packaged import EMBEDDED
from uma_trio.protocol.framing import FrameReader, frame
from uma_trio.protocol.messages import ServerEvent, to_fields
from uma_trio.protocol.payload import Encoding, decode, encode, encoding_of

ROOT = Path(__file__).parents[2]
POLL_S, MAX_POLL_S = 0.01, 0.05
"""Between two looks at the metrics: at first, and after some."""
LOG_POLL_S = 0.01
CANARY_PAUSE_S = 0.3
"""Between two rounds of a canary, which would take all of a core otherwise, also while its test waits."""
WAIT_S = 60.0
"""Longest wait for anything that happens at once on an idle machine."""
START_S = 120.0
"""Maximum duration of a start.  It takes about two seconds, and longer on a busy machine."""

DIES_WITH_PARENT = (
    *(sys.executable, "-ISc"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Command prefix for Linux: the kernel kills the program if this process dies, also after ``kill -9``."""

SERVE = (*UMA_TRIO, "serve")
CTX = ("--ctx", "8192")
"""KV cache of a daemon with the embedded model whose test does not choose one: 1,024 tokens for each of eight requests.  A
start fills all of it with zeros."""
LONG_CTX = ("--ctx", "32768")
"""That of a test whose requests have up to 4,096 tokens."""

Event = dict[str, Any]


def missing() -> str | None:
    """What a test with the real library and the embedded model lacks here, and how to get it; None if it can run."""
    place = library_directory()
    if not (place / "stamp.json").exists():
        return f"there is no library in {place}: ./build_llama.sh --dev builds it"
    if not EMBEDDED.exists():
        return f"there is no embedded model at {EMBEDDED}"
    return None


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@attrs.frozen
class Answer:
    """The events of one request."""

    events: list[Event]

    @classmethod
    def of(cls, events: Iterable[ServerEvent]) -> Answer:
        """Convert the events of ``uma_trio.client``."""
        return cls([to_fields(event) for event in events])

    @property
    def text(self) -> str:
        """The whole text, streamed or not."""
        streamed = "".join(event["text"] for event in self.events if event["event"] == "token")
        return streamed + (self.last.get("text") or "")

    @property
    def ids(self) -> list[int]:
        return [event["token_id"] for event in self.events if "token_id" in event]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def reason(self) -> str | None:
        return self.last.get("reason")

    @property
    def code(self) -> str | None:
        """Code of the error that ended the request, if one did."""
        return self.last.get("code")


class Wire:
    """A blocking connection.  Sends valid and invalid data; returns events as dictionaries."""

    def __init__(self, path: Path, *, encoding: str = "json", timeout_s: float = WAIT_S) -> None:
        self._encoding = Encoding(encoding)
        self._frames = FrameReader(max_frame_bytes=64 << 20)
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(os.fspath(path))  # blocks while the backlog of the listener is full
            self.sock.settimeout(timeout_s)
        except BaseException:
            self.sock.close()
            raise

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send_bytes(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send(self, **fields: Any) -> None:
        self.send_bytes(self.frame(**fields))

    def frame(self, **fields: Any) -> bytes:
        return frame(encode(fields, self._encoding))

    def receive(self) -> Event | None:
        """The next event; ``None`` if the server closed or reset the connection."""
        while (payload := self._frames.next_payload()) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            self._frames.receive_data(data)
            if not data:
                return None
        return decode(payload, encoding_of(payload))

    def rest(self) -> list[Event]:
        """All events until the server closes."""
        events = []
        while (event := self.receive()) is not None:
            events.append(event)
        return events

    def answer(self) -> Answer:
        """All events up to the end of one request."""
        events = []
        while (event := self.receive()) is not None:
            events.append(event)
            if event["event"] in ("eos", "error"):
                break
        return Answer(events)

    def ask(self, **fields: Any) -> Answer:
        self.send(**{"id": "r", **fields})
        return self.answer()

    def metrics(self) -> Event:
        self.send(type="metrics", keep_alive=True)
        event = self.receive()
        assert event is not None
        return event


@attrs.define
class Daemon:
    """A running ``uma-trio serve``."""

    process: subprocess.Popen[bytes]
    socket: Path
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def wire(self, **options: Any) -> Wire:
        return Wire(self.socket, **options)

    def client(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Client]:
        """A client for asynchronous tests."""
        return open_client(self.socket, **options)

    def ask(self, *, encoding: str = "json", **fields: Any) -> Answer:
        """One request on a connection of its own."""
        with self.wire(encoding=encoding) as wire:
            return wire.ask(**fields)

    def metrics(self) -> Event:
        with self.wire() as wire:
            return wire.metrics()

    def logs(self) -> str:
        """The log so far.  A thread of the daemon writes it, so the newest lines of a running daemon may be missing."""
        return self.log_file.read_text(errors="replace")

    def log_lines(self) -> list[Event]:
        """As ``logs``: the lines that are complete, which are JSON by default."""
        whole, _, _ = self.logs().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def events_logged(self) -> list[str]:
        """As ``log_lines``."""
        return [line["event"] for line in self.log_lines()]

    def logged(self, event: str, n: int = 1) -> list[Event]:
        """Wait until the log has ``n`` lines of this event; returns all of them."""

        def found() -> list[Event]:
            whole, _, _ = self.logs().rpartition("\n")
            lines = [json.loads(line) for line in whole.splitlines() if f'"{event}"' in line]
            return [line for line in lines if line["event"] == event]

        until = time.monotonic() + WAIT_S
        while len(lines := found()) < n:
            assert time.monotonic() < until, f"not logged: {event}\n{self.logs()}"
            time.sleep(LOG_POLL_S)
        return lines

    @property
    def processes(self) -> list[psutil.Process]:
        """The daemon and its children; the engine is one of them."""
        found = [daemon := psutil.Process(self.pid), *daemon.children(recursive=True)]
        return [each for each in found if not _forks(each)]

    def http_url(self) -> str:
        """Where the gateway listens; waits until the daemon serves."""
        self.logged("serving")
        url: str = next(line for line in self.log_lines() if line["event"] == "serving")["http"]
        return url

    def n_fds(self) -> int:
        """Open file descriptors of all processes."""
        return int(self._sum(psutil.Process.num_fds))

    def wait_fds(self, most: int) -> None:
        """Wait until closed connections and processes that end have left no more than ``most`` descriptors open."""
        until = time.monotonic() + WAIT_S
        while (n := self.n_fds()) > most:
            assert time.monotonic() < until, f"{n} descriptors are open, {most} before"
            time.sleep(LOG_POLL_S)

    def _sum(self, number: Callable[[psutil.Process], float]) -> float:
        """The sum over all processes that do not end meanwhile."""
        found = 0.0
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += number(process)
        return found

    @property
    def rss(self) -> int:
        """Resident memory of all processes in bytes."""
        return int(self._sum(lambda process: process.memory_info().rss))

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes in seconds."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the exit code."""
        return self.process.wait(timeout_s)

    def standby(self) -> psutil.Process:
        """The gateway that waits for its turn.  It starts some seconds after the models serve."""

        def find() -> psutil.Process | None:
            for process in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if process.cmdline()[:1] == ["uma-trio gateway: standby"]:
                        return process
            return None

        self.wait_until(lambda _: find() is not None, "a standby")
        found = find()
        assert found is not None
        return found

    def wait_until(self, condition: Callable[[Event], Any], description: str, timeout_s: float = WAIT_S) -> Event:
        """The first metrics snapshot that meets ``condition``.  A machine that was paused meanwhile is no failure."""
        waited_s, poll_s = 0.0, POLL_S
        with self.wire() as wire:
            while waited_s < timeout_s:
                if condition(snapshot := wire.metrics()):
                    return snapshot
                time.sleep(poll_s)
                waited_s, poll_s = waited_s + poll_s, min(1.1 * poll_s, MAX_POLL_S)
        raise AssertionError(f"not within {timeout_s:g} s: {description}; {snapshot}")

    def settled(self, timeout_s: float = WAIT_S) -> Event:
        """Wait until no request runs, no KV cell is reserved, and this is the only connection.

        Cached prefixes stay, and the connection over which a gateway asks for metrics.
        """

        def nothing_held(snapshot: Event) -> bool:
            kv = snapshot["kv"]
            held = (snapshot["running"], snapshot["queue_depth"], snapshot["send_queue_bytes"])
            most = 1 if snapshot.get("gateway") is None else 2
            return (
                not any((*held, kv["sequences"], kv["cells_reserved"], kv["cells_used"]))
                and snapshot["connections"] <= most
            )

        return self.wait_until(nothing_held, "nothing is held", timeout_s)


def _forks(process: psutil.Process) -> bool:
    """Whether it forks the children of a daemon, and is no part of it."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[:1] == [TITLE]
    return False


@contextlib.contextmanager
def started(
    *flags: str,
    socket: Path,
    log_file: Path,
    environment: Mapping[str, str] | None = None,
    command: tuple[str, ...] | None = None,
    **options: Any,
) -> Iterator[Daemon]:
    """A daemon that may not be ready yet; killed at the end if it still runs.

    Its folders for state and configuration are next to its socket, so no other daemon uses them.

    Args:
        flags: ``CTX`` is added if they choose neither a KV cache nor a model.
        environment: more variables.
        command: what starts it, in place of ``uma-trio serve``.
        options: for ``subprocess.Popen``.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
    clean |= {name: os.environ[name] for name in (DIRECTORY_VARIABLE, *SETTINGS_OF_DAEMONS) if name in os.environ}
    clean |= {
        "XDG_STATE_HOME": os.fspath(socket.parent / "state-home"),
        "XDG_CONFIG_HOME": os.fspath(socket.parent / "config-home"),
        **(environment or {}),
    }
    chosen = {"--ctx", "--model", "--config"} & {*flags}
    arguments = ["--socket", os.fspath(socket), *([] if chosen else CTX), *flags]
    forks = not command and can_fork(environment or {}, options)
    prefix = DIES_WITH_PARENT if sys.platform == "linux" and not forks else ()
    with log_file.open("ab") as log:
        process = (Forked if forks else subprocess.Popen)(
            [*prefix, *(command or SERVE), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=clean,
            **options,
        )
    try:
        yield Daemon(process, socket, log_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_ready(daemon: Daemon, start_s: float = START_S) -> None:
    """Wait until the daemon accepts connections."""
    until = time.monotonic() + start_s
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), daemon.wire():
            return
        if daemon.process.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"the daemon did not start ({daemon.process.poll()}):\n{daemon.logs()}")
        time.sleep(0.01)


@contextlib.contextmanager
def real_daemon(*flags: str, folder: Path | None = None, start_s: float = START_S, **options: Any) -> Iterator[Daemon]:
    """A daemon that is ready.  At the end it gets a SIGTERM, and exit code and log are checked.

    Args:
        flags: for ``uma-trio serve``, as for ``started``.
        folder: for socket and log; a temporary one if not given.
        start_s: maximum duration of the start.
        options: for ``started``.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="uma-")))
        daemon = stack.enter_context(started(*flags, socket=folder / "uma.sock", log_file=folder / "log", **options))
        wait_ready(daemon, start_s)
        yield daemon
        if daemon.process.poll() is None:
            daemon.signal(signal.SIGTERM)
            try:
                code = daemon.wait()
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it does not end after SIGTERM:\n{daemon.logs()[-5000:]}") from None
            assert code == 0, daemon.logs()[-5000:]
        assert "Traceback" not in daemon.logs(), daemon.logs()[-5000:]


class Canary:
    """Repeats one request while other clients misbehave; every answer must be the same as without them.

    A context manager: the requests run in a thread.  Leaving it waits for the running request, and raises if an answer
    was wrong.
    """

    FIELDS: ClassVar = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 60}
    """What the request has, unless others are given."""

    def __init__(self, daemon: Daemon, **fields: Any) -> None:
        self._daemon = daemon
        self._fields: dict[str, Any] = {**self.FIELDS, **fields}
        with self._asking() as ask:
            self._alone = ask()
        self._stop = threading.Event()
        self._wrong: list[object] = []
        self.rounds = 0
        self.slowest_s = 0.0
        """Duration of the slowest round."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        assert self._alone is not None
        assert len(self._alone) > 20

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Callable[[], Sequence[object] | None]]:
        """Open a connection for many requests.

        What it yields sends one, and returns the content of the answer; ``None`` if there was no room for it.
        """

        def ask() -> Sequence[object] | None:
            answer = wire.ask(keep_alive=True, **self._fields)
            return None if answer.code in ("E_LIMIT_QUEUE", "E_LIMIT_KV") else answer.ids

        with self._daemon.wire() as wire:
            yield ask

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            with self._asking() as ask:
                while not self._stop.is_set() or not self.rounds:
                    began = time.monotonic()
                    answer = ask()
                    if answer is None:
                        time.sleep(0.1)
                        continue
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    if answer != self._alone:
                        self._wrong.append(answer)
                        return
                    self.rounds += 1
                    self._stop.wait(CANARY_PAUSE_S)
        except Exception as error:  # noqa: BLE001  (raised at the end of the context)
            self._wrong.append(error)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * WAIT_S)
        assert not self._thread.is_alive(), "the canary hangs"
        assert not self._wrong, f"the canary's stream was harmed: {self._wrong[0]}"


def asked(daemon: Daemon, ask: Callable[[Client], Awaitable[Any]]) -> Any:
    """What ``ask(client)`` returns, with a client of ``daemon``."""

    async def main() -> Any:
        async with daemon.client() as client:
            return await ask(client)

    return trio.run(main)
