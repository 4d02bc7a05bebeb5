"""The writer of the perf log: an error of its file never stops the daemon, and what was written can be read."""

from __future__ import annotations

import contextlib
import gzip
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from msgspec.structs import replace

from tests.support.fake_engine import FakeEngine
from tests.support.perf_runs import HEADER
from tests.support.profile import amount
from tests.support.serving import settings
from uma_trio.daemon import perf_log as writer
from uma_trio.daemon.perf_log import PerfLog, PerfLogError, perf_log
from uma_trio.telemetry.perf_records import RequestRecord, Run, TickRecord, Trailer, decode

MIB = 1 << 20
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full, as Linux has it")


def tick(n: int) -> TickRecord:
    return TickRecord(start_s=float(n), decode_seq_ids=(0, 1, 2, 3), decode_ms=20.0, sample_ms=0.5)


def request(n: int, tokens: int = 3) -> RequestRecord:
    return RequestRecord(
        id=f"r{n}", arrived_s=0.0, finished_s=1.0, finish_reason="stop", inter_token_ms=[20.0] * tokens
    )


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush every 10 ms."""
    monkeypatch.setattr(writer, "FLUSH_INTERVAL_S", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "perf.jsonl"


@contextlib.contextmanager
def opened(path: Path, *, max_bytes: int = MIB, **changes: Any) -> Iterator[PerfLog]:
    with contextlib.closing(PerfLog(path, replace(HEADER, **changes), max_bytes=max_bytes)) as log:
        yield log


def read(*paths: Path) -> list[Run]:
    return decode(*[path.read_bytes() for path in paths])


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


def warnings(logged: list[Any]) -> list[Any]:
    return [entry for entry in logged if entry["log_level"] in ("warning", "error")]


# -- records -------------------------------------------------------------------------------------


def test_all_records_are_in_the_file(path: Path) -> None:
    with opened(path, clock_s=100.0) as log:
        for n in range(100):
            log.write(tick(100 + n))
        log.write(request(1))
    [run] = read(path)
    assert [found.start_s for found in run.ticks] == list(range(100))
    assert [found.id for found in run.requests] == ["r1"]
    assert run.trailer == Trailer(dropped_records=0)
    assert run.unreadable_lines == 0


def test_records_are_written_while_the_run_goes_on(path: Path) -> None:
    with opened(path) as log:
        log.write(tick(1))
        wait_until(lambda: len(read(path)[0].ticks) == 1)
        log.write(request(1))
        wait_until(lambda: len(read(path)[0].requests) == 1)
        assert read(path)[0].trailer is None


def test_only_the_owner_may_read_it(path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_second_run_is_appended(path: Path) -> None:
    for n in (1, 2):
        with opened(path, started=f"run {n}") as log:
            log.write(tick(n))
    assert [(run.header.started, run.ticks[0].start_s) for run in read(path)] == [("run 1", 1.0), ("run 2", 2.0)]


def test_a_run_after_a_torn_line(path: Path) -> None:
    with opened(path) as log:
        log.write(tick(1))
    path.write_bytes(path.read_bytes()[:-12])
    with opened(path, started="again") as log:
        log.write(tick(2))
    first, second = read(path)
    assert (len(first.ticks), first.trailer, first.unreadable_lines) == (1, None, 1)
    assert (len(second.ticks), second.unreadable_lines) == (1, 0)


def test_a_long_request_is_one_record(path: Path) -> None:
    with opened(path) as log:
        log.write(request(1, tokens=50_000))
    assert len(read(path)[0].requests[0].inter_token_ms) == 50_000


# -- rotation -----------------------------------------------------------------------------------------


def test_a_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "perf.jsonl.gz"
    for n in range(2):
        with opened(path, started=str(n)) as log:
            for at in range(200):
                log.write(tick(at))
                time.sleep(0.0002)
            wait_until(lambda: not log._queue)
            assert len(read(path)[-1].ticks) >= 32, "readable while it is written"
    first, second = read(path)
    assert (len(first.ticks), len(second.ticks)) == (200, 200)
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 404
    assert second.trailer == Trailer(dropped_records=0)
    with opened(path, max_bytes=path.stat().st_size, started="2"):
        pass
    assert len(read(path)) == 1
    assert len(read(path.with_name("perf.jsonl.gz.1"))) == 2


def test_rotation_at_half_of_the_limit(path: Path) -> None:
    older = path.with_name("perf.jsonl.1")
    with opened(path, max_bytes=100_000) as log:
        for n in range(3000):
            log.write(tick(n))
    sizes = [path.stat().st_size, older.stat().st_size]
    assert all(0 < size <= 50_000 for size in sizes)
    assert sizes[1] > 46_000
    [run] = read(older, path)
    numbers = [int(found.start_s) for found in run.ticks]
    assert numbers == list(range(numbers[0], 3000)), "the latest ones, without a gap"
    assert 0 < numbers[0] < 2500
    assert read(path)[0].header == HEADER
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(file.name for file in path.parent.iterdir()) == ["perf.jsonl", "perf.jsonl.1"]


def test_an_existing_large_file_is_rotated_at_once(path: Path) -> None:
    with opened(path) as log:
        for n in range(400):
            log.write(tick(n))
    with opened(path, max_bytes=20_000, started="again"):
        pass
    assert [run.header.started for run in read(path)] == ["again"]
    assert len(read(path.with_name("perf.jsonl.1"))[0].ticks) == 400


def test_a_record_larger_than_the_limit(path: Path) -> None:
    with opened(path, max_bytes=10_000) as log:
        for n in range(3):
            log.write(request(n, tokens=10_000))
            wait_until(lambda n=n: not log._queue)
    [run] = read(path.with_name("perf.jsonl.1"), path)
    assert [found.id for found in run.requests] == ["r1", "r2"]


# -- unusable files ------------------------------------------------------------------------------


def test_a_full_disk_ends_the_log_with_one_warning(path: Path) -> None:
    """A limit on the file size acts like a full disk: a partial write, then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with structlog.testing.capture_logs() as logged:
        log = PerfLog(path, HEADER, max_bytes=100 * MIB)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
            for n in range(500):
                log.write(tick(n))
            log._thread.join(60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        log.write(tick(500))
        log.close()
    [warning] = warnings(logged)
    assert (warning["event"], warning["reason"]) == ("the perf log ends here; the daemon continues", "File too large")
    assert warning["path"] == str(path)
    [run] = read(path)
    assert run.unreadable_lines == 0, "no torn line is left"
    assert 50 < len(run.ticks) < 150
    assert log.dropped == 501 - len(run.ticks)


@needs_full
def test_no_space_at_all() -> None:
    with pytest.raises(PerfLogError, match="No space left on device"):
        PerfLog(FULL, HEADER, max_bytes=MIB)


@needs_full
def test_no_space_later(path: Path) -> None:
    with structlog.testing.capture_logs() as logged, opened(path) as log:
        full = os.open(FULL, os.O_WRONLY)
        os.dup2(full, log._fd)
        os.close(full)
        log.write(tick(1))
        wait_until(lambda: log.dropped == 1)
        log.write(tick(2))
        log.write(request(3))
        assert log.dropped == 3
    [warning] = warnings(logged)
    assert warning["reason"] == "No space left on device"


def test_a_device_is_never_rotated() -> None:
    with structlog.testing.capture_logs() as logged, opened(Path("/dev/null"), max_bytes=2000) as log:
        for n in range(500):
            log.write(tick(n))
    assert log.dropped == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert not os.path.exists("/dev/null.1")
    assert warnings(logged) == []


@pytest.mark.parametrize("kind", ["folder", "no folder", "foreign", "short", "taken"])
def test_unusable_files_are_left_unchanged(path: Path, kind: str) -> None:
    content = {"foreign": b"GGUF and so on, and so on", "short": b'{"kind"'}.get(kind)
    with contextlib.ExitStack() as stack:
        if content is not None:
            path.write_bytes(content)
        elif kind == "folder":
            path.mkdir()
        elif kind == "taken":
            stack.enter_context(opened(path))
        target = path / "none" / "perf" if kind == "no folder" else path
        with pytest.raises(PerfLogError) as raised:
            PerfLog(target, HEADER, max_bytes=MIB)
    said = {
        "folder": "Is a directory",
        "no folder": "No such file or directory",
        "foreign": "the file exists and is not a perf log; it is left unchanged",
        "short": "the file exists and is not a perf log; it is left unchanged",
        "taken": "another process writes to the file",
    }
    assert str(raised.value) == said[kind]
    if content is not None:
        assert path.read_bytes() == content
    if kind == "taken":
        assert len(read(path)) == 1


def test_no_descriptor_is_left_open(path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/dev/fd"))

    before = count()
    with opened(path, max_bytes=5000) as log:
        for n in range(300):
            log.write(tick(n))
    path.write_bytes(b"something else")
    for target in (path, path.parent, *([FULL] if FULL.exists() else [])):
        with pytest.raises(PerfLogError):
            PerfLog(target, HEADER, max_bytes=MIB)
    assert count() == before


def test_a_bug_ends_only_the_log(path: Path) -> None:
    with structlog.testing.capture_logs() as logged, opened(path) as log:
        log.write(tick(1))
        wait_until(lambda: not log._queue)
        log.write(TickRecord(start_s=object()))  # type: ignore[arg-type]
        wait_until(lambda: log.dropped)
    [error] = warnings(logged)
    assert error["event"] == "the perf log failed; the daemon continues"
    assert len(read(path)[0].ticks) == 1


# -- slow disks, and closing -------------------------------------------------------------------------


class Stuck:
    """Blocks the writer's next write until ``go`` is set."""

    def __init__(self, log: PerfLog) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        self._write = log._write
        log._write = self._slowly  # type: ignore[method-assign]

    def _slowly(self, data: bytes) -> None:
        self.reached.set()
        assert self.go.wait(60)
        self._write(data)


def test_a_slow_disk_drops_records_and_counts_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_QUEUED", 100)
    with opened(path) as log:
        disk = Stuck(log)
        log.write(tick(0))
        assert disk.reached.wait(60)
        for n in range(1, 500):
            log.write(tick(n))
        assert log.dropped == 400
        disk.go.set()
    [run] = read(path)
    assert [int(found.start_s) for found in run.ticks] == list(range(100))
    assert run.trailer == Trailer(dropped_records=400)


def test_a_hanging_disk_does_not_block_close(path: Path) -> None:
    log = PerfLog(path, HEADER, max_bytes=MIB)
    disk = Stuck(log)
    log.write(tick(0))
    assert disk.reached.wait(60)
    with structlog.testing.capture_logs() as logged:
        log.close(timeout_s=0.01)
    assert [entry["event"] for entry in warnings(logged)] == ["the perf log is incomplete: its disk does not respond"]
    disk.go.set()
    log._thread.join(60)
    assert read(path)[0].trailer == Trailer(dropped_records=0)


def test_concurrent_close_while_records_are_written(path: Path) -> None:
    for _ in range(amount(quick=5, thorough=20)):
        log = PerfLog(path, HEADER, max_bytes=MIB)
        n_written = 0

        def hand_over(log: PerfLog = log) -> None:
            nonlocal n_written
            for n in range(2000):
                log.write(tick(n))
                n_written += 1

        threads = [threading.Thread(target=hand_over), *[threading.Thread(target=log.close) for _ in range(3)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        log.close()
        [run] = read(path)
        assert run.trailer is not None
        assert run.unreadable_lines == 0
        numbers = [int(found.start_s) for found in run.ticks]
        assert numbers == list(range(len(numbers))), "a prefix, nothing twice"
        assert n_written == 2000
        assert len(numbers) + log.dropped + len(log._queue) == 2000
        path.unlink()


# -- in the daemon -----------------------------------------------------------------------------------


async def test_the_daemon_opens_the_configured_file(path: Path) -> None:
    info = FakeEngine().info
    with perf_log(settings(), info, {}) as log:
        assert log is None
    with perf_log(settings(perf_log=path, perf_log_mb=2, target_itl_ms=77.0), info, {}) as log:
        assert log is not None
        log.write(tick(1))
    [run] = read(path)
    header = run.header
    assert (header.model, header.n_ctx, header.n_seq_max, header.n_batch) == (
        "fake",
        info.n_ctx,
        info.n_seq_max,
        info.n_batch,
    )
    assert header.scheduling["target_itl_ms"] == 77.0
    assert header.started[:2] == "20"
    assert run.trailer is not None


async def test_the_daemon_runs_without_a_log(path: Path) -> None:
    await trio.Path(path).write_bytes(b"not a perf log")
    with (
        structlog.testing.capture_logs() as logged,
        perf_log(settings(perf_log=path), FakeEngine().info, {}) as log,
    ):
        assert log is None
    [warning] = warnings(logged)
    assert warning["event"] == "there is no perf log; the daemon continues"
    assert warning["reason"].startswith("the file exists and is not a perf log")
    assert await trio.Path(path).read_bytes() == b"not a perf log"
