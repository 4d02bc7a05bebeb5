"""The perf log's writer: the event loop hands records over, a thread of its own writes them.

A record costs the loop an append.  Encoding takes some microseconds more, with the GIL held; so the thread
does a few records at a time and sleeps in between, or tokens would wait for it.  Whatever happens to the file
happens to the log alone: one warning, and the daemon goes on.

Source: docs/PERF_LOG.md.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from uma_trio.config import Config
from uma_trio.engine.inspect import LibraryProblem, library_directory, read_stamp
from uma_trio.engine.records import ModelFacts
from uma_trio.telemetry.perf_format import MAGIC, encode, encode_header
from uma_trio.telemetry.perf_records import Header, RequestRecord, TickRecord, Trailer

log = structlog.get_logger("uma_trio.daemon")

FLUSH_S: Final = 0.5
GULP: Final = 16
"""Records that are encoded at once: a tenth of a millisecond."""

BREATH_S: Final = 0.0005
"""Sleep after each gulp.  Merely letting go of the GIL is not enough: the thread would have it back before the
loop's thread is awake."""

MOST_WAITING: Final = 16_384
"""Records in memory; more are dropped.  At a hundred ticks a second a disk may stand still for two minutes."""

CLOSE_S: Final = 5.0

MIB: Final = 1 << 20


class PerfLogError(Exception):
    """The file cannot be written; says why."""


class PerfLog:
    """Writes one run.  A ``PerfSink``: ``tick`` and ``request`` never wait and never fail.

    Args:
        path: of a perf log to be continued, or of a new file, which only its owner may read.
        header: opens the run; its ``clock_s`` is what moments count from.
        max_bytes: at half of them the file is moved to ``path``.1.

    Raises:
        PerfLogError: the file cannot be written, is another daemon's, or is no perf log.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int) -> None:
        self._path = path
        self._origin_s = header.clock_s
        self._header = encode_header(header)
        self._part_bytes = max_bytes // 2
        self._waiting: deque[TickRecord | RequestRecord] = deque()
        self._refused = 0
        """By the loop's thread, and"""
        self._lost = 0
        """by the writing one: no counter has two writers."""
        self._taking = True
        self._closing = threading.Event()
        self._file = _File.open(path)
        try:
            if self._file.size + len(self._header) > self._part_bytes and self._file.size:
                self._begin_anew()
            else:
                self._file.write(self._header)
        except (OSError, PerfLogError) as error:
            self._file.close()
            raise PerfLogError(_reason(error)) from None
        self._thread = threading.Thread(target=self._run, name="uma-trio perf log", daemon=True)
        self._thread.start()

    # -- the loop's side ------------------------------------------------------------------------

    def tick(self, record: TickRecord) -> None:
        """Hand a tick over; it must not change any more."""
        self._take(record)

    def request(self, record: RequestRecord) -> None:
        """Hand a request over that has ended; it must not change any more."""
        self._take(record)

    def _take(self, record: TickRecord | RequestRecord) -> None:
        if self._taking and len(self._waiting) < MOST_WAITING:
            self._waiting.append(record)
        else:
            self._refused += 1

    @property
    def dropped(self) -> int:
        """Records that were not written and will not be."""
        return self._refused + self._lost

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits and close the file.  A disk that stands still is given ``timeout_s``."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the perf log is left unfinished: its disk does not answer", path=str(self._path))

    # -- the writing thread's side --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.wait(FLUSH_S):
                self._write_waiting()
            self._taking = False
            self._write_waiting()
            self._file.write(encode(Trailer(dropped=self.dropped), self._origin_s))
        except (OSError, PerfLogError) as error:
            log.warning("the perf log ends here; the daemon goes on", path=str(self._path), reason=_reason(error))
        except Exception:  # a defect of ours: who measures must not harm what is measured
            log.exception("the perf log failed; the daemon goes on", path=str(self._path))
        finally:
            self._taking = False
            self._lost += len(self._waiting)
            self._waiting.clear()
            self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting:
            n = min(GULP, len(self._waiting))
            data = b"".join([encode(self._waiting[i], self._origin_s) for i in range(n)])
            if self._file.size + len(data) > self._part_bytes and self._file.size > len(self._header):
                self._begin_anew()
            self._file.write(data)
            for _ in range(n):
                self._waiting.popleft()
            self._closing.wait(BREATH_S)

    def _begin_anew(self) -> None:
        """Move the file out of the way, and open a new one with the same header."""
        if not self._file.regular:
            return
        os.replace(self._path, f"{self._path}.1")
        full, self._file = self._file, _File.open(self._path)
        full.close()
        self._file.write(self._header)


@attrs.define
class _File:
    """An open one that is ours alone."""

    descriptor: int
    size: int
    regular: bool
    """Neither a pipe nor a device: can be moved, and cut back."""

    @classmethod
    def open(cls, path: Path) -> _File:
        """Open ``path`` to add to it.

        Raises:
            PerfLogError: it cannot be opened, is another daemon's, or holds something else.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise PerfLogError(_reason(error)) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            regular = stat.S_ISREG(found.st_mode)
            if regular and found.st_size and os.pread(descriptor, len(MAGIC), 0) != MAGIC:
                raise PerfLogError("it holds something that is no perf log, and is left as it is")
            return cls(descriptor, found.st_size, regular)
        except BlockingIOError:
            os.close(descriptor)
            raise PerfLogError("another daemon writes to it") from None
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, data: bytes) -> None:
        """All of ``data``, or nothing: a full disk leaves no half of a record."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.descriptor, left) :]
        except OSError:
            if self.regular:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        os.close(self.descriptor)


def _reason(error: OSError | PerfLogError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


@contextlib.contextmanager
def perf_log(config: Config, facts: ModelFacts) -> Iterator[PerfLog | None]:
    """The log that ``config.operations`` asks for, closed at the end; ``None`` if it asks for none.

    One that cannot be written is a warning: nobody is to go without the daemon for it.
    """
    path = config.operations.perf_log
    if path is None:
        yield None
        return
    try:
        opened = PerfLog(path, run_header(config, facts), max_bytes=config.operations.perf_log_mb * MIB)
    except PerfLogError as error:
        log.warning("there will be no perf log; the daemon goes on", path=str(path), reason=str(error))
        yield None
        return
    with contextlib.closing(opened):
        yield opened


def run_header(config: Config, facts: ModelFacts) -> Header:
    """What a run is made with that begins now, on trio's clock."""
    try:
        llama_cpp = read_stamp(library_directory(config.model.llama_dir)).pin
    except LibraryProblem:
        llama_cpp = None
    return Header(
        uma_trio=importlib.metadata.version("uma-trio"),
        llama_cpp=llama_cpp,
        started=datetime.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        clock_s=trio.current_time(),
        model=facts.name,
        description=facts.description,
        size_bytes=facts.size_bytes,
        n_ctx=facts.n_ctx,
        n_seq_max=facts.n_seq_max,
        n_batch=facts.n_batch,
        scheduling=attrs.asdict(config.scheduling),
    )
