"""Files of SQLite that several processes of one user share, with a version of what is in them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal


def open_database(
    path: Path | None,
    schema: Iterable[str],
    version: int,
    *,
    timeout_s: float,
    synchronous: Literal["OFF", "FULL"],
    **options: Any,
) -> sqlite3.Connection:
    """Open a file, for its user alone, and make the tables if it is empty.  Transactions are the caller's.

    Args:
        path: ``None``: in memory.
        version: SQLite's ``user_version``.
        timeout_s: longest wait for another process that writes.
        synchronous: whether a transaction that has ended is on the disk.

    Raises:
        OSError: the file cannot be made.
        sqlite3.Error: it cannot be read, or has another version.
    """
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection: sqlite3.Connection = sqlite3.connect(
        path or ":memory:", timeout=timeout_s, isolation_level=None, **options
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        if _version(connection) == 0:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if _version(connection) == 0 and not connection.execute("SELECT * FROM sqlite_schema").fetchone():
                    for statement in schema:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {version}")
        check_version(connection, version)
    except BaseException:
        connection.close()
        raise
    return connection


def check_version(connection: sqlite3.Connection, version: int) -> None:
    """Raise sqlite3.DatabaseError unless the file has this version."""
    if (version_there := _version(connection)) != version:
        raise sqlite3.DatabaseError(
            f"its format version is {version_there}, and this version of uma-trio reads {version}"
        )


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
