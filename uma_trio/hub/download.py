"""Downloads one file, whatever the connection and the server do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import attrs
import trio

from uma_trio.hub.errors import HubError, Interrupted
from uma_trio.hub.http import Http
from uma_trio.hub.partial import PartialFile
from uma_trio.hub.ranges import Body, Expected, WrongAnswer, can_resume, read_answer, request_headers
from uma_trio.hub.retries import Delays, retrying

WRITE_BYTES: Final = 4 << 20
"""Bytes that are written and hashed at a time, in a thread."""
MAX_RESTARTS: Final = 3
"""How often the bytes that are here may turn out to be useless."""
USABLE: Final = frozenset({200, 206, 416})


class ProgressReporter(Protocol):
    """Shows the progress of a download.  Its methods return at once."""

    def progress(self, number: int, done: int, size: int | None) -> None:
        """``done`` bytes of the part ``number`` are here, of ``size``."""

    def message(self, text: str) -> None:
        """A line for people."""


@attrs.frozen(kw_only=True)
class FileToDownload:
    """A file to download."""

    name: str
    """For errors."""
    url: str
    size: int | None = None
    """Bytes."""
    sha256: str | None = None
    git_sha1: str | None = None
    etag: str | None = None
    """The ETag of the answer whose bytes are here."""

    @property
    def has_hash(self) -> bool:
        return self.sha256 is not None or self.git_sha1 is not None


@attrs.define
class ServerFileInfo:
    """What the server reports about the file."""

    size: int | None
    etag: str | None


class Download:
    """One file.

    Args:
        file: gets the bytes.  What it holds already is taken for the beginning of the file.
        number: of the part, for ``reporter``.
        on_learned: called when the server reports something new about the file, before any byte is written.
        refusal: makes the error for a status that does not come with a file.
    """

    def __init__(
        self,
        http: Http,
        wanted: FileToDownload,
        file: PartialFile,
        *,
        number: int,
        reporter: ProgressReporter,
        on_learned: Callable[[ServerFileInfo], Awaitable[None]],
        refusal: Callable[[int, Mapping[str, str]], HubError],
        delays: Delays,
    ) -> None:
        self._http, self._wanted, self._file = http, wanted, file
        self._number, self._reporter, self._on_learned = number, reporter, on_learned
        self._refusal, self._delays = refusal, delays
        self._learned = ServerFileInfo(wanted.size, wanted.etag)
        self._n_received = 0
        self._n_restarts = 0
        self._n_requests = 0

    async def run(self) -> None:
        """Download until the file is whole, verified and on disk.

        Raises:
            HubError: it cannot be downloaded, or is not what was promised; then nothing of it is left.
            OSError: the file cannot be written.
        """
        await trio.to_thread.run_sync(self._file.catch_up)
        self._report()
        while True:
            had, self._n_requests = self._file.size, 0
            await retrying(self._attempt, self._delays, lambda: self._n_received, self._reporter.message)
            await trio.to_thread.run_sync(self._file.sync)
            problem = self._mismatch()
            if problem is None:
                return
            await trio.to_thread.run_sync(self._file.restart)
            if not had and self._n_requests == 1:
                raise HubError(
                    f"{self._wanted.name} arrived damaged: {problem}", "try again later, or use another source"
                )
            self._reporter.message(f"{problem}; downloading it again from the beginning")

    async def _attempt(self) -> None:
        if self._file.size and not can_resume(self._expected):
            await self._restart()
        if self._expected.size is not None and self._file.size > self._expected.size:
            await self._start_over("more is here than the file has")
        expected, have = self._expected, self._file.size
        if expected.size is not None and have == expected.size:
            return
        self._n_requests += 1
        async with self._http.get(self._wanted.url, request_headers(have, expected)) as answer:
            if answer.status_code not in USABLE:
                raise self._refusal(answer.status_code, answer.headers)
            try:
                body = read_answer(answer.status_code, answer.headers, have, expected)
            except WrongAnswer as error:
                await self._start_over(str(error))
                raise Interrupted(str(error)) from None
            if body.start != have:
                await self._start_over("the server sends the whole file")
            await self._learn(body)
            await self._receive(answer.aiter_raw(), body)

    async def _receive(self, chunks: object, body: Body) -> None:
        """Append the body.  Whatever arrived before a cut is kept."""
        waiting: list[bytes] = []
        n_waiting = n = 0
        limit = body.length
        if limit is None and body.total is not None:
            limit = body.total - body.start

        async def write() -> None:
            nonlocal n_waiting
            data = b"".join(waiting)
            waiting.clear()
            n_waiting = 0
            await trio.to_thread.run_sync(self._file.append, data)
            self._n_received += len(data)
            self._report()

        try:
            async for chunk in chunks:  # type: ignore[attr-defined]
                n += len(chunk)
                if limit is not None and n > limit:
                    await self._restart()
                    waiting.clear()
                    raise HubError(
                        f"{self._wanted.name}: the server sends more than the {limit:,} bytes that it announced",
                        "use another source",
                    )
                waiting.append(chunk)
                n_waiting += len(chunk)
                if n_waiting >= WRITE_BYTES:
                    await write()
                else:
                    self._report(n_waiting)
        finally:
            if waiting:
                with trio.CancelScope(shield=True):
                    await write()
        if limit is not None and n < limit:
            raise Interrupted(f"the connection was cut after {n:,} of {limit:,} bytes")

    @property
    def _expected(self) -> Expected:
        return Expected(self._learned.size, self._learned.etag, self._wanted.has_hash)

    async def _learn(self, body: Body) -> None:
        learned = ServerFileInfo(body.total, body.etag)
        if learned != self._learned:
            self._learned = learned
            await self._on_learned(learned)
        self._report()

    async def _start_over(self, reason: str) -> None:
        """Drop what is here, if that has not happened too often."""
        if not self._file.size:
            return
        self._n_restarts += 1
        await self._restart()
        if self._n_restarts > MAX_RESTARTS:
            raise HubError(
                f"{self._wanted.name}: the server does not let a download go on ({reason})", "use another source"
            )
        self._reporter.message(f"{reason}; beginning again")

    async def _restart(self) -> None:
        await trio.to_thread.run_sync(self._file.restart)
        self._learned = ServerFileInfo(self._wanted.size, None)
        self._report()

    def _mismatch(self) -> str | None:
        """Why the whole file is not what was promised; ``None`` if it is."""
        wanted, file = self._wanted, self._file
        if wanted.size is not None and file.size != wanted.size:
            return f"it has {file.size:,} bytes, not {wanted.size:,}"
        if wanted.sha256 is not None and file.sha256 != wanted.sha256:
            return f"its SHA-256 is {file.sha256}, not {wanted.sha256}"
        if wanted.git_sha1 is not None and file.git_sha1 != wanted.git_sha1:
            return f"its hash in git is {file.git_sha1}, not {wanted.git_sha1}"
        return None

    def _report(self, n_waiting: int = 0) -> None:
        self._reporter.progress(self._number, self._file.size + n_waiting, self._learned.size)
