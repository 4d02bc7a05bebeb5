"""The tokens of quotas on disk: restarts, kills, damage, disks that cannot be written."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from uma_trio.gateway.usage import KEPT_PERIODS, UsageFile, read_usage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "usage.sqlite"


def test_tokens_are_counted_by_tenant_and_period_and_survive_a_restart(path: Path) -> None:
    usage = UsageFile(path)
    usage.add("a", "2026-01", 10)
    usage.add("a", "2026-01", -3)
    usage.add("b", "2026-01", 5)
    usage.add("a", "2026-02", 1)
    usage.close()
    again = UsageFile(path)
    assert [again.tokens(*key) for key in (("a", "2026-01"), ("b", "2026-01"), ("a", "2026-02"), ("c", "2026-01"))] == [
        7, 5, 1, 0,
    ]  # fmt: skip
    again.close()
    assert path.stat().st_mode & 0o777 == 0o600


CHILD = """
import sys
from pathlib import Path
from uma_trio.gateway.usage import UsageFile
usage = UsageFile(Path(sys.argv[1]))
while True:
    usage.add("a", "2026-01", 1)
    print(usage.tokens("a", "2026-01"), flush=True)
"""


def test_what_was_counted_before_a_kill_is_there_after_it(path: Path) -> None:
    counted = 0
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(50):
            counted = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:
            counted = int(line) if line.endswith("\n") else counted
        child.wait()
        child.stdout.close()
        usage = UsageFile(path)
        found = usage.tokens("a", "2026-01")
        usage.close()
        assert counted <= found <= counted + 1  # the kill came between the write and the report
        counted = found


def test_several_processes_share_the_file(path: Path) -> None:
    one, other = UsageFile(path), UsageFile(path)
    for _ in range(10):
        one.add("a", "2026-01", 1)
        other.add("a", "2026-01", 1)
    assert other.tokens("a", "2026-01") == 20
    assert one.tokens("a", "2026-01") == 19  # as of its last write
    one.close()
    other.close()


def test_a_report_reads_while_a_gateway_writes(path: Path) -> None:
    assert read_usage(path) == {}
    usage = UsageFile(path)
    usage.add("a", "2026-01", 10)
    assert read_usage(path) == {("a", "2026-01"): 10}
    usage.close()


@pytest.mark.parametrize(
    "content", [b"no database at all, and long enough to be one " * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_damaged_file_is_renamed(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    usage = UsageFile(path)
    usage.add("a", "2026-01", 10)
    usage.close()
    assert read_usage(path) == {("a", "2026-01"): 10}
    assert path.with_name("usage.sqlite.damaged").read_bytes() == content
    assert "quotas begin anew" in caplog.text


def test_a_folder_that_cannot_be_made_leaves_counting_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    usage = UsageFile(tmp_path / "state" / "usage.sqlite")
    usage.add("a", "2026-01", 10)
    assert usage.tokens("a", "2026-01") == 10
    usage.close()
    assert "cannot write" in caplog.text


def test_what_could_not_be_written_is_written_later(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = UsageFile(path)
    usage.add("a", "2026-01", 1)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    usage.add("a", "2026-01", 10)
    assert usage.tokens("a", "2026-01") == 11
    assert "cannot write" in caplog.text
    blocker.execute("ROLLBACK")
    blocker.close()
    usage.add("b", "2026-01", 1)
    usage.close()
    assert read_usage(path) == {("a", "2026-01"): 11, ("b", "2026-01"): 1}


def test_old_periods_are_deleted(path: Path) -> None:
    usage = UsageFile(path)
    for number in range(2 * KEPT_PERIODS):
        usage.add("a", f"{2000 + number}-01", 1)
    usage.close()
    assert len(read_usage(path)) == KEPT_PERIODS
    assert ("a", f"{2000 + 2 * KEPT_PERIODS - 1}-01") in read_usage(path)
