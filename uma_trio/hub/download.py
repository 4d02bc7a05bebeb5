"""Downloads one file, whatever the connection and the server do.

A server may answer a request for the rest of a file with the rest, with the whole file, with something else, or with lies:
``read_answer`` decides, and ``Download`` acts.

``huggingface_hub`` breaks promises of docs/MODELS.md.  Measured with 2.4.0, plain HTTP, and the faults of ``tests/hub``: a
download begins again after ``kill -9`` and after a full disk; a connection reset ends it and nothing is kept; a file with
a damaged byte is installed, because only its size is compared; a redirect from https to a private address is followed.
It also brings six packages (16 MB) and 140 ms of imports.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

import attrs
import trio

from uma_trio.hub.errors import HubError, Interrupted
from uma_trio.hub.http import Delays, Http, retrying
from uma_trio.hub.partial import PartialFile
from uma_trio.hub.variants import RemoteFile

WRITE_BYTES: Final = 4 << 20
"""Bytes that are written and hashed at a time, in a thread."""
MAX_RESTARTS: Final = 3
"""How often the bytes that are here may turn out to be useless."""
USABLE: Final = frozenset({200, 206, 416})
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)
_LENGTH: Final = re.compile(r"\d{1,18}")


class PullReporter(Protocol):
    """Shows the progress of a pull.  Its methods return at once."""

    def start(self, name: str, sizes: Sequence[int | None]) -> None:
        """The download of ``name`` begins, or that of another process is watched."""

    def progress(self, number: int, done: int, size: int | None) -> None:
        """``done`` bytes of the part ``number`` are here, of ``size``."""

    def message(self, text: str) -> None:
        """A line for people."""


# -- requests and answers ---------------------------------------------------------------------------


class WrongAnswer(Exception):
    """The server does not send what was asked for; the message says what it sends."""


@attrs.frozen
class Expected:
    """What is known of a file before the request."""

    size: int | None = None
    """Bytes."""
    etag: str | None = None
    """The ETag of an earlier answer, of which a part is here."""
    has_hash: bool = False
    """Whether the whole file can be verified in the end."""

    @property
    def can_resume(self) -> bool:
        """Whether missing bytes can be appended: only with a hash or a strong ETag, so that a change is noticed."""
        return self.has_hash or _is_strong(self.etag)


@attrs.frozen
class Body:
    """The bytes that an answer has."""

    start: int
    """Their position in the file: what is here already, or 0 if the server sends the whole file."""
    length: int | None
    """How many; ``None`` if the server does not say."""
    total: int | None
    """Size of the whole file, as far as known."""
    etag: str | None
    """A strong ETag, if there is one."""


def request_headers(have: int, expected: Expected) -> dict[str, str]:
    """The headers of a request for what is missing.

    With a hash there is no ``If-Range``: the servers of one network have different ETags for the same file, and each
    difference would begin the download again.
    """
    headers = {"Accept-Encoding": "identity"}
    if have and expected.can_resume:
        headers["Range"] = f"bytes={have}-"
        if not expected.has_hash and expected.etag is not None:
            headers["If-Range"] = expected.etag
    return headers


def read_answer(status: int, headers: Mapping[str, str], have: int, expected: Expected) -> Body:
    """Decide what the body of a successful answer is.

    Args:
        status: 200, 206 or 416.
        headers: names in lower case.
        have: bytes that were asked to be left out.

    Raises:
        WrongAnswer: it cannot be used.
    """
    if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise WrongAnswer(
            f"the server compressed the file ({headers['content-encoding'][:20]}), although the request forbids it"
        )
    etag = headers.get("etag")
    etag = etag if _is_strong(etag) else None
    length = _content_length(headers)
    if status == 416:
        if have and have == expected.size:
            return Body(have, 0, have, etag)
        raise WrongAnswer(f"the server has nothing from byte {have} on")
    if status == 206:
        return _partial(headers, length, have, expected, etag)
    if status != 200:
        raise WrongAnswer(f"the server answers with the status {status}")
    if length is not None and expected.size is not None and length != expected.size:
        raise WrongAnswer(f"the server announces {length:,} bytes for a file of {expected.size:,}")
    return Body(0, length, length if expected.size is None else expected.size, etag)


def _partial(headers: Mapping[str, str], length: int | None, have: int, expected: Expected, etag: str | None) -> Body:
    if not have:
        raise WrongAnswer("the server sends a part of the file, and was asked for all of it")
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
    if match is None:
        raise WrongAnswer("the server does not say which part of the file it sends")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    if first != have:
        raise WrongAnswer(f"the server sends bytes from {first:,} on, and was asked for those from {have:,} on")
    if expected.size is not None and total not in (None, expected.size):
        raise WrongAnswer(f"the server claims {total:,} bytes for a file of {expected.size:,}")
    total = expected.size if total is None else total
    if last < first or (total is not None and last >= total):
        raise WrongAnswer(f"the server claims bytes {first:,} to {last:,} of {total:,}" if total else "an empty range")
    if length is not None and length != last - first + 1:
        raise WrongAnswer(f"the server announces {length:,} bytes and claims to send {last - first + 1:,}")
    if not expected.has_hash and etag is not None and etag != expected.etag:
        raise WrongAnswer("the file has changed on the server")
    return Body(first, last - first + 1, total, etag)


def _is_strong(etag: str | None) -> bool:
    """Whether equal ETags mean equal bytes."""
    return etag is not None and len(etag) > 2 and etag[0] == etag[-1] == '"' and etag.isprintable() and len(etag) < 1000


def _content_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not _LENGTH.fullmatch(text.strip()):
        raise WrongAnswer("the server sends a Content-Length that is not a number")
    return int(text)


# -- the download -----------------------------------------------------------------------------------


@attrs.define(kw_only=True)
class Download:
    """One file."""

    http: Http
    wanted: RemoteFile
    file: PartialFile
    """Gets the bytes.  What it holds already is taken for the beginning of the file."""
    number: int
    """The part, for ``reporter``."""
    etag: str | None
    """The ETag of the answer whose bytes are here."""
    reporter: PullReporter
    on_learned: Callable[[int | None, str | None], Awaitable[None]]
    """Called with size and ETag when the server reports something new about the file, before any byte is written."""
    refusal: Callable[[int, Mapping[str, str]], HubError]
    """Makes the error for a status that does not come with a file."""
    delays: Delays
    _size: int | None = attrs.field(init=False)
    _n_received: int = attrs.field(init=False, default=0)
    _n_restarts: int = attrs.field(init=False, default=0)
    _n_requests: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._size = self.wanted.size

    async def run(self) -> None:
        """Download until the file is whole, verified and on disk.

        Raises:
            HubError: it cannot be downloaded, or is not what was promised; then nothing of it is left.
            OSError: the file cannot be written.
        """
        await trio.to_thread.run_sync(self.file.catch_up)
        self._report()
        while True:
            had, self._n_requests = self.file.size, 0
            await retrying(self._attempt, self.delays, lambda: self._n_received, self.reporter.message)
            await trio.to_thread.run_sync(self.file.sync)
            problem = self._mismatch()
            if problem is None:
                return
            await trio.to_thread.run_sync(self.file.restart)
            if not had and self._n_requests == 1:
                raise HubError(
                    f"{self.wanted.path} arrived damaged: {problem}", "try again later, or use another source"
                )
            self.reporter.message(f"{problem}; downloading it again from the beginning")

    async def _attempt(self) -> None:
        if self.file.size and not self._expected.can_resume:
            await self._restart()
        if self._size is not None and self.file.size > self._size:
            await self._start_over("more is here than the file has")
        expected, have = self._expected, self.file.size
        if have == expected.size:
            return
        self._n_requests += 1
        async with self.http.get(self.wanted.url, request_headers(have, expected)) as answer:
            if answer.status_code not in USABLE:
                raise self.refusal(answer.status_code, answer.headers)
            try:
                body = read_answer(answer.status_code, answer.headers, have, expected)
            except WrongAnswer as error:
                await self._start_over(str(error))
                raise Interrupted(str(error)) from None
            if body.start != have:
                await self._start_over("the server sends the whole file")
            if (body.total, body.etag) != (self._size, self.etag):
                self._size, self.etag = body.total, body.etag
                await self.on_learned(body.total, body.etag)
            self._report()
            await self._receive(answer.aiter_raw(), body)

    async def _receive(self, chunks: AsyncIterable[bytes], body: Body) -> None:
        """Append the body.  Whatever arrived before a cut is kept."""
        waiting = bytearray()
        n = 0
        limit = body.length
        if limit is None and body.total is not None:
            limit = body.total - body.start

        async def write() -> None:
            nonlocal waiting
            data, waiting = waiting, bytearray()
            await trio.to_thread.run_sync(self.file.append, data)
            self._n_received += len(data)
            self._report()

        try:
            async for chunk in chunks:
                n += len(chunk)
                if limit is not None and n > limit:
                    await self._restart()
                    waiting.clear()
                    raise HubError(
                        f"{self.wanted.path}: the server sends more than the {limit:,} bytes that it announced",
                        "use another source",
                    )
                waiting += chunk
                if len(waiting) >= WRITE_BYTES:
                    await write()
                else:
                    self._report(len(waiting))
        finally:
            if waiting:
                with trio.CancelScope(shield=True):
                    await write()
        if limit is not None and n < limit:
            raise Interrupted(f"the connection was cut after {n:,} of {limit:,} bytes")

    @property
    def _expected(self) -> Expected:
        return Expected(self._size, self.etag, bool(self.wanted.sha256 or self.wanted.git_sha1))

    async def _start_over(self, reason: str) -> None:
        """Drop what is here, if that has not happened too often."""
        if not self.file.size:
            return
        self._n_restarts += 1
        await self._restart()
        if self._n_restarts > MAX_RESTARTS:
            raise HubError(
                f"{self.wanted.path}: the server does not let a download go on ({reason})", "use another source"
            )
        self.reporter.message(f"{reason}; beginning again")

    async def _restart(self) -> None:
        await trio.to_thread.run_sync(self.file.restart)
        self._size, self.etag = self.wanted.size, None
        self._report()

    def _mismatch(self) -> str | None:
        """Why the whole file is not what was promised; ``None`` if it is."""
        wanted, file = self.wanted, self.file
        if wanted.size is not None and file.size != wanted.size:
            return f"it has {file.size:,} bytes, not {wanted.size:,}"
        if wanted.sha256 is not None and file.sha256 != wanted.sha256:
            return f"its SHA-256 is {file.sha256}, not {wanted.sha256}"
        if wanted.git_sha1 is not None and file.git_sha1 != wanted.git_sha1:
            return f"its hash in git is {file.git_sha1}, not {wanted.git_sha1}"
        return None

    def _report(self, n_waiting: int = 0) -> None:
        self.reporter.progress(self.number, self.file.size + n_waiting, self._size)
