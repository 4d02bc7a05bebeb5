"""What principals keep on this machine: files and batches.

The bytes of a file are in a file of their own, and all that is known about files and batches in one of SQLite.  Several
gateways may share the folder.  All methods block, and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from uma_trio.files import sync_folder
from uma_trio.gateway.database import open_database

VERSION: Final = 1
"""SQLite's ``user_version``."""
SCHEMA: Final = (
    """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER NOT NULL, content BLOB NOT NULL
) STRICT
""",
    """
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, socket TEXT NOT NULL,
    input TEXT NOT NULL, is_open INTEGER NOT NULL, expires_at INTEGER NOT NULL, content BLOB NOT NULL
) STRICT
""",
    "CREATE INDEX files_of ON files (owner, number)",
    "CREATE INDEX batches_of ON batches (owner, number)",
)
LOCK_TIMEOUT_S: Final = 10.0
"""Longest wait for another process that writes."""
ABANDONED_S: Final = 86_400.0
"""An upload that nobody has written to for this time has ended with its process."""

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "in_progress", "completed", "expired", "cancelling", "cancelled"]
"""The states of a batch: one that is ``validating`` waits for its first row."""
OPEN: Final = ("validating", "in_progress", "cancelling")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a file."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int
    url: str | None = None
    """Path of the requests in a file of purpose ``batch``."""
    rows: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a batch.  Times are Unix seconds."""

    id: str
    owner: str
    is_local: bool = True
    """Without a tenant, whether its client was on this machine."""
    socket: str
    """Where the daemon that answers it listens."""
    url: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    """This file and the one before exist for others when the batch has ended, and if they have rows."""
    completion_window: str
    metadata: Mapping[str, str] | None = None
    total: int
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    status: Status = "validating"
    created_at: int
    expires_at: int
    kept_s: int
    """How long its files are kept after it has ended."""
    times: Mapping[str, int] = {}
    """When it got a status, such as ``completed_at``."""

    def with_status(self, status: Status, **more: Any) -> Batch:
        """The batch with another status from now on."""
        times = {**self.times, f"{status}_at": int(time.time())}
        return msgspec.structs.replace(self, status=status, times=times, **more)


class Full(Exception):
    """A principal keeps as much as it may.  The message says what to do."""


def new_id(kind: str) -> str:
    """A new name with 128 random bits."""
    return f"{kind}{secrets.token_hex(16)}"


T = TypeVar("T", StoredFile, Batch)
_FILE: Final = msgspec.json.Decoder(StoredFile)
_BATCH: Final = msgspec.json.Decoder(Batch)


class Store:
    """Files and batches.

    Nothing is created before something is stored.

    Args:
        max_bytes: of all files of a principal.
        max_files: files that a principal may have, and likewise batches.

    Raises:
        OSError, sqlite3.Error: the folder cannot be used.  Any method raises these.
    """

    def __init__(self, folder: Path, *, max_bytes: int, max_files: int) -> None:
        self._folder = folder
        self._max_bytes, self._max_files = max_bytes, max_files
        self._lock = threading.Lock()
        self._opened: sqlite3.Connection | None = None

    # -- files --

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are.  The id must be one of ours."""
        return self._folder / "content" / file_id

    def upload_path(self, file_id: str) -> Path:
        """Where the bytes of a file arrive; the folder is made."""
        self._make_folders()
        return self._folder / "uploads" / file_id

    def check_room(self, owner: str, more_bytes: int = 0) -> None:
        """
        Raises:
            Full: a principal may not have another file, or not so many bytes more.
        """
        if self._exists():
            with self._transaction() as connection:
                self._check_room(connection, owner, more_bytes)
        elif more_bytes > self._max_bytes:
            raise self._too_many_bytes()

    def add_file(self, file: StoredFile) -> None:
        """Keep what was uploaded, which is on the disk already.

        Raises:
            Full: its principal has no room for it.
        """
        with self._transaction() as connection:
            self._check_room(connection, file.owner, file.bytes)
            os.replace(self.upload_path(file.id), self.path(file.id))
            sync_folder(self.path(file.id).parent)
            _insert_file(connection, file)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """A file of a principal; ``None`` if it has none with this id."""
        return self._one("files", _FILE, owner, file_id)

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """Files of a principal, and whether there are more.

        Args:
            after: id of the file before the first one.
        """
        where = "" if purpose is None else " AND purpose = ?"
        given = () if purpose is None else (purpose,)
        return self._page("files", _FILE, owner, where, given, after, limit, newest_first)

    def delete_file(self, owner: str, file_id: str) -> Literal["deleted", "missing", "in use"]:
        """Delete a file of a principal, unless a batch reads it."""
        if not self._exists():
            return "missing"
        with self._transaction() as connection:
            row = connection.execute("SELECT id FROM files WHERE owner = ? AND id = ?", (owner, file_id)).fetchone()
            if row is None:
                return "missing"
            if connection.execute("SELECT id FROM batches WHERE input = ? AND is_open", (file_id,)).fetchone():
                return "in use"
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)
        return "deleted"

    # -- batches --

    def add_batch(self, batch: Batch) -> None:
        """Keep a batch.

        Raises:
            Full: its principal has as many as it may.
        """
        with self._transaction() as connection:
            (n,) = connection.execute("SELECT count(*) FROM batches WHERE owner = ?", (batch.owner,)).fetchone()
            if n >= self._max_files:
                raise Full(f"you have {n:,} batches (max_files); they are forgotten when their files expire")
            connection.execute(
                "INSERT INTO batches (id, owner, socket, input, is_open, expires_at, content) VALUES (?, ?, ?, ?, 1, ?, ?)",
                (
                    *(batch.id, batch.owner, batch.socket, batch.input_file_id),
                    *(batch.expires_at + batch.kept_s, msgspec.json.encode(batch)),
                ),
            )

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """A batch of a principal; ``None`` if it has none with this id."""
        return self._one("batches", _BATCH, owner, batch_id)

    def batches(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Batches of a principal, the newest first, and whether there are more; see ``files``."""
        return self._page("batches", _BATCH, owner, "", (), after, limit, True)

    def open_batches(self, socket: str) -> list[Batch]:
        """Batches that the daemon at ``socket`` has to answer, the oldest first."""
        if not self._exists():
            return []
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT content FROM batches WHERE socket = ? AND is_open ORDER BY number", (socket,)
            ).fetchall()
        return [_BATCH.decode(content) for (content,) in rows]

    def change(self, batch_id: str, change: Callable[[Batch], Batch], files: Sequence[StoredFile] = ()) -> Batch:
        """Replace what is known about a batch by ``change`` of it, and add files with results, both or nothing.

        Raises:
            LookupError: it is there no more.
        """
        with self._transaction() as connection:
            row = connection.execute("SELECT content FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None:
                raise LookupError(batch_id)
            batch = change(_BATCH.decode(row[0]))
            connection.execute(
                "UPDATE batches SET is_open = ?, content = ? WHERE id = ?",
                (batch.status in OPEN, msgspec.json.encode(batch), batch_id),
            )
            for file in files:
                _insert_file(connection, file)
        return batch

    # -- time --

    def expire(self, now: float) -> None:
        """Delete what has expired: files that no batch reads, batches that have ended, uploads whose process has ended."""
        if not self._exists():
            return
        with self._transaction() as connection:
            gone = connection.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN (SELECT input FROM batches WHERE is_open) RETURNING id",
                (now,),
            ).fetchall()
            connection.execute("DELETE FROM batches WHERE expires_at <= ? AND NOT is_open", (now,))
        for (file_id,) in gone:
            self.path(file_id).unlink(missing_ok=True)
        for left in (self._folder / "uploads").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if left.stat().st_mtime < now - ABANDONED_S:
                    left.unlink()

    # -- SQLite --

    def _one(self, table: str, decoder: msgspec.json.Decoder[T], owner: str, item_id: str) -> T | None:
        if not self._exists():
            return None
        with self._transaction() as connection:
            row = connection.execute(
                f"SELECT content FROM {table} WHERE owner = ? AND id = ?",
                (owner, item_id),
            ).fetchone()
        return None if row is None else decoder.decode(row[0])

    def _page(
        self,
        table: str,
        decoder: msgspec.json.Decoder[T],
        owner: str,
        where: str,
        given: Sequence[str],
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> tuple[list[T], bool]:
        if not self._exists():
            return [], False
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        if after is not None:
            where += f" AND number {beyond} (SELECT number FROM {table} WHERE owner = ? AND id = ?)"
            given = (*given, owner, after)
        with self._transaction() as connection:
            rows = connection.execute(
                f"SELECT content FROM {table} WHERE owner = ?{where} ORDER BY number {order} LIMIT ?",
                (owner, *given, limit + 1),
            ).fetchall()
        return [decoder.decode(content) for (content,) in rows[:limit]], len(rows) > limit

    def _check_room(self, connection: sqlite3.Connection, owner: str, more_bytes: int) -> None:
        n, n_bytes = connection.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        if n >= self._max_files:
            raise Full(f"you have {n:,} files, as many as you may (max_files); delete some")
        if n_bytes + more_bytes > self._max_bytes:
            raise self._too_many_bytes()

    def _too_many_bytes(self) -> Full:
        return Full(f"your files may have {self._max_bytes:,} bytes together (max_files_mb); delete some")

    def _exists(self) -> bool:
        return self._opened is not None or self._database.exists()

    @property
    def _database(self) -> Path:
        return self._folder / "files.sqlite"

    def _make_folders(self) -> None:
        for folder in (self._folder, self._folder / "content", self._folder / "uploads"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._opened is None:
                self._make_folders()
                self._opened = open_database(
                    self._database,
                    SCHEMA,
                    VERSION,
                    timeout_s=LOCK_TIMEOUT_S,
                    synchronous="FULL",  # an answer to a client says that it is on the disk
                    check_same_thread=False,
                )
            self._opened.execute("BEGIN IMMEDIATE")
            with self._opened:
                yield self._opened


def _insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO files (id, owner, purpose, bytes, expires_at, content) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, file.owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
    )
