"""What to ask a server for, and what its answer means, when a part of the file is here already.

A server may answer a request for the rest with the rest, with the whole file, with something else, or with lies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)
_LENGTH: Final = re.compile(r"\d{1,18}")


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


def can_resume(expected: Expected) -> bool:
    """Whether the missing bytes can be appended: only with a hash or a strong ETag, so that a change is noticed."""
    return expected.has_hash or is_strong(expected.etag)


def request_headers(have: int, expected: Expected) -> dict[str, str]:
    """The headers of a request for what is missing.

    With a hash there is no ``If-Range``: the servers of one network have different ETags for the same file, and each
    difference would begin the download again.
    """
    headers = {"Accept-Encoding": "identity"}
    if have and can_resume(expected):
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
    etag = etag if is_strong(etag) else None
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


def is_strong(etag: str | None) -> bool:
    """Whether equal ETags mean equal bytes."""
    return etag is not None and len(etag) > 2 and etag[0] == etag[-1] == '"' and etag.isprintable() and len(etag) < 1000


def _content_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not _LENGTH.fullmatch(text.strip()):
        raise WrongAnswer("the server sends a Content-Length that is not a number")
    return int(text)
