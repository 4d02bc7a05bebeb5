"""Writes the perf log: the event loop queues records, and a thread encodes and writes them.

Encoding holds the GIL, so the thread encodes a few records at a time and sleeps in between. An error ends the log,
with one warning; it never ends the daemon. docs/PERF_LOG.md describes the file.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import gzip
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

import uma_trio
from uma_trio.config import MB, Config
from uma_trio.engine_link.installed import LibraryProblem, read_stamp
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.telemetry.perf_records import FIRST_BYTES, GZIP_MAGIC, Header, RequestRecord, TickRecord, Trailer, encode

log = structlog.get_logger("uma_trio.daemon")

FLUSH_INTERVAL_S: Final = 0.5
BATCH_RECORDS: Final = 32
"""Records that are encoded and written at once. Encoding them holds the GIL for about 0.1 ms."""

BATCH_PAUSE_S: Final = 0.0005
"""Pause after each batch. Releasing the GIL alone is not enough: this thread would take it again at once."""

MAX_QUEUED: Final = 16_384
"""Records in memory; further ones are dropped. At 100 ticks a second this bridges a disk stall of two minutes."""

CLOSE_TIMEOUT_S: Final = 5.0


class PerfLogError(Exception):
    """The file cannot be used. The message says why."""


class PerfLog:
    """Appends one run to a perf log. Implements ``PerfSink``.

    Args:
        path: an existing perf log, or a new file that only its owner may read. Gzipped if the name ends in ``.gz``.
        header: first line of the run; its ``clock_s`` becomes time 0.
        max_bytes: limit for all files. At half of it the file is renamed to ``path``.1 and a new one is begun.

    Raises:
        PerfLogError: the file cannot be written, another process writes it, or it holds something else.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int) -> None:
        self._path = path
        self._origin_s = header.clock_s
        self._header = self._compress(encode(header))
        self._max_file_bytes = max_bytes // 2
        self._queue: deque[TickRecord | RequestRecord] = deque()
        self._dropped_by_loop = 0  # two counters, because an increment is not atomic across threads
        self._dropped_by_writer = 0
        self._accepting = True
        self._closing = threading.Event()
        try:
            self._open()
            try:
                if self._size and self._is_full(len(self._header)):
                    self._rotate()
                else:
                    self._write(self._header)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise PerfLogError(error.strerror or str(error)) from None
        self._thread = threading.Thread(target=self._run, name="uma-trio perf log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of records that were not written and never will be."""
        return self._dropped_by_loop + self._dropped_by_writer

    def write(self, record: TickRecord | RequestRecord) -> None:
        """Queue a record, which the log owns from now on. Never blocks; drops the record if the queue is full."""
        if self._accepting and len(self._queue) < MAX_QUEUED:
            self._queue.append(record)
        else:
            self._dropped_by_loop += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is queued and close the file. Blocks for at most ``timeout_s``."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the perf log is incomplete: its disk does not respond", path=str(self._path))

    # -- the writer thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.wait(FLUSH_INTERVAL_S):
                self._flush()
            self._accepting = False
            self._flush()
            self._write(self._compress(encode(Trailer(dropped_records=self.dropped))))
        except (OSError, PerfLogError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            log.warning("the perf log ends here; the daemon continues", path=str(self._path), reason=reason)
        except Exception:  # a bug in the log must not stop the daemon
            log.exception("the perf log failed; the daemon continues", path=str(self._path))
        finally:
            self._accepting = False
            self._dropped_by_writer += len(self._queue)
            self._queue.clear()
            os.close(self._fd)

    def _flush(self) -> None:
        while self._queue:
            n = min(BATCH_RECORDS, len(self._queue))
            data = self._compress(b"".join([encode(self._queue[i], self._origin_s) for i in range(n)]))
            if self._size > len(self._header) and self._is_full(len(data)):
                self._rotate()
            self._write(data)
            for _ in range(n):
                self._queue.popleft()
            time.sleep(BATCH_PAUSE_S)

    def _compress(self, data: bytes) -> bytes:
        """A gzip member of its own for each write: the file can be read while it grows, and can be appended to."""
        return gzip.compress(data, compresslevel=1) if self._path.suffix == ".gz" else data

    def _is_full(self, n_bytes: int) -> bool:
        """Whether the file must be rotated before another ``n_bytes``."""
        return self._is_regular and self._size + n_bytes > self._max_file_bytes

    def _rotate(self) -> None:
        os.replace(self._path, f"{self._path}.1")
        full = self._fd
        self._open()
        os.close(full)
        self._write(self._header)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            if self._is_regular:  # the disk is full: leave no torn line
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def _open(self) -> None:
        """Open and lock the file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            self._is_regular = stat.S_ISREG(status.st_mode)  # a pipe or a device cannot be rotated
            self._size = status.st_size
            if self._is_regular and self._size:
                expected = GZIP_MAGIC if self._path.suffix == ".gz" else FIRST_BYTES
                if os.pread(fd, len(expected), 0) != expected:
                    raise PerfLogError("the file exists and is not a perf log; it is left unchanged")
                if expected == FIRST_BYTES and os.pread(fd, 1, self._size - 1) != b"\n":
                    self._size += os.write(fd, b"\n")  # a power cut tore the last line
        except BlockingIOError:
            os.close(fd)
            raise PerfLogError("another process writes to the file") from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd


@contextlib.contextmanager
def perf_log(config: Config, info: ModelInfo, identity: Mapping[str, str]) -> Iterator[PerfLog | None]:
    """Open the log that ``config.operations`` asks for, and close it at the end.

    Args:
        identity: what decides the tokens of all answers; see ``LoadedModel.identity``.

    Yields ``None`` if no log is configured, and also, after a warning, if the file cannot be used.
    """
    path, opened = config.operations.perf_log, None
    if path is not None:
        try:
            opened = PerfLog(path, run_header(config, info, identity), max_bytes=config.operations.perf_log_mb * MB)
        except PerfLogError as error:
            log.warning(
                "there is no perf log; the daemon continues", path=str(path), reason=str(error), flag="--perf-log"
            )
    try:
        yield opened
    finally:
        if opened is not None:
            opened.close()


def run_header(config: Config, info: ModelInfo, identity: Mapping[str, str]) -> Header:
    """Describe a run that begins now, on trio's clock."""
    try:
        llama_cpp = read_stamp(config.model.llama_dir).pin
    except LibraryProblem:
        llama_cpp = None
    return Header(
        uma_trio=uma_trio.__version__,
        llama_cpp=llama_cpp,
        started=datetime.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        clock_s=trio.current_time(),
        model=info.name,
        description=info.description,
        size_bytes=info.size_bytes,
        n_ctx=info.n_ctx,
        n_seq_max=info.n_seq_max,
        n_batch=info.n_batch,
        scheduling=attrs.asdict(config.scheduling),
        identity=dict(identity),
    )
