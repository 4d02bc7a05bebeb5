"""The real daemon in a process of its own, and a plain blocking client for whatever one may send it.

    with real_daemon("--parallel", "8") as daemon:
        print(daemon.ask(prompt="hello", max_tokens=5).text)

Needs the built library; ``missing()`` says what is not there and what would build it.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import psutil

from llama_abi.library import DIRECTORY_VARIABLE
from llama_abi.stamp import DEFAULT_DIRECTORY
from uma_trio.client import Client, open_client
from uma_trio.models.loaded import EMBEDDED
from uma_trio.protocol.framing import FrameReader, frame
from uma_trio.protocol.messages import ServerEvent, to_fields
from uma_trio.protocol.payload import Encoding, decode, encode, encoding_of

ROOT = Path(__file__).parents[2]
START_S = 60.0
"""A start takes less than a second; on a machine that is busy with other things it takes longer."""

TRIAL_VARIABLE = "UMA_LAYOUT_TRIAL_S"
"""``tests/conftest.py`` says why it is set."""

Event = dict[str, Any]


def missing() -> str | None:
    """What a test with the real library and the embedded model lacks here, and what would build it."""
    place = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    if not (place / "stamp.json").exists():
        return f"there is no library in {place}: ./build_llama.sh --dev builds it"
    if not EMBEDDED.exists():
        return f"there is no embedded model at {EMBEDDED}"
    return None


@attrs.frozen
class Answer:
    """The events of one request."""

    events: list[Event]

    @classmethod
    def of(cls, events: Iterable[ServerEvent]) -> Answer:
        """From the events of ``uma_trio.client``."""
        return cls([to_fields(event) for event in events])

    @property
    def text(self) -> str:
        """Streamed or not."""
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
        """Of the error that ended it, if one did."""
        return self.last.get("code")


class Wire:
    """A blocking connection that sends anything, valid or not, and returns events as the plain fields on the wire."""

    def __init__(self, path: Path, *, encoding: str = "json", timeout_s: float = 30.0) -> None:
        self._encoding = Encoding(encoding)
        self._frames = FrameReader(max_frame_bytes=64 << 20)
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(os.fspath(path))  # blocking: waits where the listener's queue is full
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
        """The next event; ``None`` when the server has closed, also by a reset."""
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
        """For tests that run in trio."""
        return open_client(self.socket, **options)

    def ask(self, *, encoding: str = "json", **fields: Any) -> Answer:
        """One request on a connection of its own."""
        with self.wire(encoding=encoding) as wire:
            return wire.ask(**fields)

    def metrics(self) -> Event:
        with self.wire() as wire:
            return wire.metrics()

    def logs(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log_lines(self) -> list[Event]:
        """The log as JSON, which it is where nobody asked for anything else."""
        return [json.loads(line) for line in self.logs().splitlines()]

    def events_logged(self) -> list[str]:
        return [line["event"] for line in self.log_lines()]

    def n_fds(self) -> int:
        """Open file descriptors: the fewest within a moment, for a client that has just left is still there."""
        process, counts = psutil.Process(self.pid), []
        for _ in range(10):
            counts.append(process.num_fds())
            time.sleep(0.02)
        return int(min(counts))

    @property
    def rss(self) -> int:
        """Bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def wait_until(self, seen: Callable[[Event], Any], what: str, timeout_s: float = 30.0) -> Event:
        """The first snapshot of which ``seen`` holds."""
        until = time.monotonic() + timeout_s
        with self.wire() as wire:
            while not seen(snapshot := wire.metrics()):
                if time.monotonic() > until:
                    raise AssertionError(f"not within {timeout_s:g} s: {what}; {snapshot}")
                time.sleep(0.002)
        return snapshot

    def settled(self, timeout_s: float = 30.0) -> Event:
        """Wait until nobody is served and nothing is held for anybody: sessions, sequences, KV cells, outboxes.

        What ended requests left for others that begin alike stays.
        """

        def nothing_held(snapshot: Event) -> bool:
            kv = snapshot["kv"]
            held = (snapshot["running"], snapshot["queue_depth"], snapshot["send_queue_bytes"])
            return not any((*held, kv["sequences"], kv["cells_reserved"], kv["cells_used"])) and (
                snapshot["connections"] == 1  # who asks
            )

        return self.wait_until(nothing_held, "nothing is held", timeout_s)


@contextlib.contextmanager
def started(
    *flags: str,
    socket: Path,
    log_file: Path,
    environment: Mapping[str, str] | None = None,
    command: tuple[str, ...] = (sys.executable, "-m", "uma_trio", "serve"),
    **options: Any,
) -> Iterator[Daemon]:
    """A daemon that may not be ready yet; killed at the end if it still runs.

    What it remembers is beside its socket, where no other daemon has a folder in use.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
    clean |= {name: os.environ[name] for name in (DIRECTORY_VARIABLE, TRIAL_VARIABLE) if name in os.environ}
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [*command, "--socket", os.fspath(socket), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=clean | {"XDG_STATE_HOME": os.fspath(socket.parent / "state-home")} | dict(environment or {}),
            **options,
        )
    try:
        yield Daemon(process, socket, log_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_ready(daemon: Daemon) -> None:
    """Until it takes connections."""
    until = time.monotonic() + START_S
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), daemon.wire():
            return
        if daemon.process.poll() is not None or time.monotonic() > until:
            raise AssertionError(f"the daemon did not start ({daemon.process.poll()}):\n{daemon.logs()}")
        time.sleep(0.01)


@contextlib.contextmanager
def real_daemon(*flags: str, folder: Path | None = None, **options: Any) -> Iterator[Daemon]:
    """A daemon that is ready; ended with SIGTERM, and its exit code and log are looked at.

    Args:
        flags: of ``uma-trio serve``.
        folder: for socket and log; a short-lived one of its own if not given.
        options: of ``started``.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="uma-")))
        daemon = stack.enter_context(started(*flags, socket=folder / "uma.sock", log_file=folder / "log", **options))
        wait_ready(daemon)
        yield daemon
        if daemon.process.poll() is None:
            daemon.signal(signal.SIGTERM)
            try:
                code = daemon.wait(60)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it does not end:\n{daemon.logs()[-5000:]}") from None
            assert code == 0, daemon.logs()[-5000:]
        assert "Traceback" not in daemon.logs(), daemon.logs()[-5000:]


class Canary:
    """A stream that must stay what it is when it runs alone, again and again, while others misbehave.

    Entered, it runs in a thread of its own; left, it ends with the round it is in and complains about
    any that was not right.
    """

    def __init__(self, daemon: Daemon, **fields: Any) -> None:
        chat = [{"role": "user", "content": "Tell me a story about a fox."}]
        self._daemon = daemon
        self._fields = {"messages": chat, "max_tokens": 60, **fields}
        self._alone = daemon.ask(**self._fields).ids
        self._stop = threading.Event()
        self._wrong: list[object] = []
        self.rounds = 0
        self.slowest_s = 0.0
        """The longest of the rounds."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        assert len(self._alone) > 20

    def __enter__(self) -> Canary:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            with self._daemon.wire() as wire:
                while not self._stop.is_set() or not self.rounds:
                    began = time.monotonic()
                    answer = wire.ask(keep_alive=True, **self._fields)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    if answer.ids != self._alone:
                        self._wrong.append(answer)
                        return
                    self.rounds += 1
        except Exception as error:  # noqa: BLE001  (raised where the block ends)
            self._wrong.append(error)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the canary hangs"
        assert not self._wrong, f"the canary's stream was harmed: {self._wrong[0]}"
