"""Counts the tokens of tenants on disk, so that a quota holds over restarts and kills.

Each change is written before it counts, into the write-ahead log of SQLite.  Without waiting for the disk: what a process
has written survives its death, also by ``kill -9``.  A power failure may lose the last seconds.  Several processes may
share the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path
from typing import Final

from uma_trio.config import Config
from uma_trio.files import state_folder
from uma_trio.gateway.database import check_version, open_database

log = logging.getLogger("uma_trio.gateway")

VERSION: Final = 1
"""SQLite's ``user_version`` of the file.  A file of another version is set aside."""
SCHEMA: Final = """
CREATE TABLE usage (
    tenant TEXT NOT NULL, period TEXT NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (tenant, period)
) WITHOUT ROWID, STRICT
"""
ADD: Final = """
INSERT INTO usage VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens RETURNING tokens
"""
LOCK_TIMEOUT_S: Final = 0.5
"""Longest wait for another process that writes."""
KEPT_PERIODS: Final = 64
"""Periods of a tenant that are kept, for reports."""


def usage_path(config: Config) -> Path:
    """Return the path of the file: next to what else outlives the daemon."""
    return state_folder(config.sessions.state_dir) / "usage.sqlite"


class UsageFile:
    """The tokens of each tenant in each period.

    A file that is damaged or has another version is renamed and replaced by an empty one.  If it cannot be written, as on a full disk, counting goes on in
    memory, and the next change that can be written brings the file up to date.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = _open(path)
        self._known: dict[tuple[str, str], int] = {}
        """What the file said last, and what is not written yet."""
        self._pending: dict[tuple[str, str], int] = {}

    def tokens(self, tenant: str, period: str) -> int:
        """Return what was counted so far."""
        key = (tenant, period)
        if key not in self._known:
            self._known = {known_key: tokens for known_key, tokens in self._known.items() if known_key[0] != tenant}
            self._known[key] = self._read(key)
        return self._known[key]

    def add(self, tenant: str, period: str, tokens: int) -> None:
        """Count tokens; a negative number takes them back."""
        key = (tenant, period)
        self._known[key] = self.tokens(tenant, period) + tokens
        self._pending[key] = self._pending.get(key, 0) + tokens
        self._write()

    def forget(self) -> None:
        """Read what was counted again when it is needed next."""
        self._write()
        self._known = {}

    def close(self) -> None:
        """Close the file."""
        self._write()
        self._connection.close()

    def _read(self, key: tuple[str, str]) -> int:
        try:
            row = self._connection.execute("SELECT tokens FROM usage WHERE tenant = ? AND period = ?", key).fetchone()
        except sqlite3.Error as error:
            log.error("cannot read %s: %s", self._path, error)
            row = None
        return self._pending.get(key, 0) + (row[0] if row else 0)

    def _write(self) -> None:
        if not self._pending:
            return
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                for key, tokens in self._pending.items():
                    self._known[key] = self._connection.execute(ADD, (*key, tokens)).fetchone()[0]
                    self._connection.execute(
                        "DELETE FROM usage WHERE tenant = :tenant AND period NOT IN "
                        "(SELECT period FROM usage WHERE tenant = :tenant ORDER BY period DESC LIMIT :kept)",
                        {"tenant": key[0], "kept": KEPT_PERIODS},
                    )
        except sqlite3.Error as error:
            log.error("cannot write %s, so a restart would forget the last tokens of quotas: %s", self._path, error)
        else:
            self._pending.clear()


def read_usage(path: Path) -> dict[tuple[str, str], int]:
    """Return the tokens of each tenant and period, also while a gateway writes them; empty without a file."""
    if not path.exists():
        return {}
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=LOCK_TIMEOUT_S)) as connection:
            _check(connection)
            return {(tenant, period): tokens for tenant, period, tokens in connection.execute("SELECT * FROM usage")}
    except sqlite3.Error:  # damaged, of another version, or just being made
        return {}


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _connect(path)
    except (OSError, sqlite3.OperationalError) as error:  # no permission, a full disk, locked: the file may be good
        log.error("cannot write %s, so quotas begin anew with each start: %s", path, error)
        return _connect(None)
    except sqlite3.DatabaseError as error:
        log.error("%s cannot be used (%s), so quotas begin anew; it is now called %s.damaged", path, error, path.name)
        os.replace(path, path.with_name(f"{path.name}.damaged"))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _connect(path)


def _connect(path: Path | None) -> sqlite3.Connection:
    """Open the file; ``None`` is one in memory."""
    connection = open_database(path, [SCHEMA], VERSION, timeout_s=LOCK_TIMEOUT_S, synchronous="OFF")
    try:
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    check_version(connection, VERSION)
    if (
        verdict := connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    ) != "ok":  # SQLite reads a torn file as zeros
        raise sqlite3.DatabaseError(f"it is torn: {verdict.splitlines()[-1]}")
