"""The rows of a batch: what a line of its input file contains, and what a line of its output file does."""

from __future__ import annotations

import secrets
from codecs import BOM_UTF8
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec
from msgspec import Meta

from uma_trio.gateway.answer import json_line

MAX_ROWS: Final = 50_000
"""Rows of a file, as in OpenAI's API."""
MAX_ENVELOPE_BYTES: Final = 4096
"""What a line may have besides the body of its request."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an input file.  Its body is checked when its turn comes."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


EXAMPLE: Final = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", '
    '"content": "Hello"}]}}'
)
"""A line of an input file."""

_ROW: Final = msgspec.json.Decoder(Row)


@attrs.frozen
class RowsError(Exception):
    """A file of rows cannot be used, because of one of its lines."""

    reason: str
    line: int | None = None
    """Its number, from 1; ``None`` if the whole file is meant."""
    field: str | None = None

    def __str__(self) -> str:
        return self.reason if self.line is None else f"line {self.line}: {self.reason}"


@attrs.frozen
class Contents:
    """What a file of rows was found to have."""

    url: str
    """The path of all requests."""
    rows: int


@attrs.frozen
class RowReader:
    """Reads files of rows.

    Args:
        urls: paths that requests may have.
        max_body_bytes: of one request.
        setting: where ``max_body_bytes`` comes from.
    """

    urls: Collection[str]
    max_body_bytes: int
    setting: str

    def read(self, path: Path) -> Generator[tuple[int, Row], None, None]:
        """The rows and the numbers of their lines, from 1; empty lines are left out.  Blocks while it reads.

        Raises:
            RowsError: a line is no row.
            OSError: the file cannot be read.
        """
        longest = self.max_body_bytes + MAX_ENVELOPE_BYTES
        number = 0
        with open(path, "rb") as file:
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise RowsError(f"a line has at most {longest:,} bytes here ({self.setting})", number)
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                if line.strip():
                    yield number, self._row(line, number)

    def check(self, path: Path) -> Contents:
        """Check that a file has rows for one endpoint, each with a ``custom_id`` of its own.  Blocks while it reads.

        Raises:
            RowsError: it has not.
            OSError: it cannot be read.
        """
        lines: dict[str, int] = {}
        url: str | None = None
        for number, row in self.read(path):
            url = url or row.url
            if row.url != url:
                raise RowsError(
                    f"url is {row.url}, and lines before it have {url}; make a file for each", number, "url"
                )
            if (first := lines.setdefault(row.custom_id, number)) != number:
                reason = f"custom_id {row.custom_id[:100]!r} is also that of line {first}; give each row its own"
                raise RowsError(reason, number, "custom_id")
            if len(lines) > MAX_ROWS:
                raise RowsError(f"a file has at most {MAX_ROWS:,} rows; make several batches", number)
        if url is None:
            raise RowsError("the file has no rows; put a request as a JSON object on each line")
        return Contents(url, len(lines))

    def _row(self, line: bytes, number: int) -> Row:
        try:
            row = _ROW.decode(line)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$.")
            field = place.rstrip("`") or None
            reason = f"{field}: {message}" if field else f"{message}; a line is such as {EXAMPLE}"
            raise RowsError(f"{reason[:1].lower()}{reason[1:]}", number, field) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RowsError(f"not valid JSON: {str(error).removeprefix('JSON is malformed: ')}", number) from None
        if row.url not in self.urls:
            paths = ", ".join(sorted(self.urls))
            raise RowsError(f"url is {row.url[:100]!r}; a batch can have {paths}", number, "url")
        if not bytes(row.body).startswith(b"{"):
            raise RowsError("body must be a JSON object", number, "body")
        if len(bytes(row.body)) > self.max_body_bytes:
            reason = f"a body has at most {self.max_body_bytes:,} bytes here ({self.setting})"
            raise RowsError(reason, number, "body")
        return row


@attrs.frozen
class RowResult:
    """What became of a row."""

    custom_id: str
    status: int
    body: msgspec.Raw
    """JSON."""
    request_id: str

    @property
    def is_error(self) -> bool:
        """Whether it belongs into the file of errors."""
        return self.status >= 400

    def line(self) -> bytes:
        """The line of a file of results."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return _line(self.custom_id, response=response)


def unanswered_row(custom_id: str, code: str, message: str) -> bytes:
    """The line in the file of errors for a row that was never sent."""
    return _line(custom_id, error={"code": code, "message": message})


def _line(custom_id: str, **fields: Any) -> bytes:
    head = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": None, "error": None}
    return json_line({**head, **fields})
