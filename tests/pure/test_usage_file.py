"""The file of quotas: one that is damaged, or of another version, is set aside with one sentence."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from uma_trio.gateway.usage import UsageFile, read_usage


def executed(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return change


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (executed("PRAGMA user_version = 7"), "its format version is 7, and this version of uma-trio reads 1"),
        (executed("ALTER TABLE usage ADD COLUMN more TEXT", "PRAGMA user_version = 2"), "its format version is 2"),
        (executed("PRAGMA user_version = 0"), "its format version is 0"),
        (lambda path: path.write_bytes(b"no database" * 1000), "file is not a database"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), ""),
    ],
    ids=["later", "later, with other columns", "no version", "garbage", "torn"],
)
def test_it_is_set_aside(
    tmp_path: Path, harm: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.sqlite"
    before = UsageFile(path)
    before.add("alice", "2026-11", 40)
    before.close()
    assert read_usage(path) == {("alice", "2026-11"): 40}
    harm(path)
    assert read_usage(path) == {}

    usage = UsageFile(path)
    assert usage.tokens("alice", "2026-11") == 0
    usage.add("alice", "2026-11", 2)
    usage.close()
    assert read_usage(path) == {("alice", "2026-11"): 2}
    assert (tmp_path / "usage.sqlite.damaged").exists()
    [record] = caplog.records
    assert reason in record.message
    assert "so quotas begin anew; it is now called usage.sqlite.damaged" in record.message


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    first, second = (UsageFile(tmp_path / "usage.sqlite") for _ in range(2))
    first.add("alice", "2026-11", 1)
    second.add("alice", "2026-11", 1)
    first.close()
    second.close()
    assert read_usage(tmp_path / "usage.sqlite") == {("alice", "2026-11"): 2}
