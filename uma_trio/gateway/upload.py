"""Receives a form with a file (``multipart/form-data``), and passes the file on while it arrives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.responses import Response

from uma_trio.gateway.body import Body, Refusal
from uma_trio.gateway.endpoint import Call, parse_fields
from uma_trio.gateway.errors import BODY_TOO_LARGE, TOO_MANY_FILES, HttpError, invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MEDIA_TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 16
MAX_FIELD_BYTES: Final = 4096
"""The largest part that is not the file."""
MAX_FORM_BYTES: Final = 128 * 1024
"""What a body may have besides the file."""
FILE: Final = "file"
"""Name of the part that is the file."""

T = TypeVar("T", bound=msgspec.Struct)


async def with_body(call: Call, answer: Callable[[Call, Body], Awaitable[Response]]) -> Response:
    """The answer to a request whose body ``answer`` reads in parts.  What is left of one that is refused is discarded."""
    try:
        return await answer(call, call.state.body)
    except HttpError as error:
        return Refusal(call.refuse(error), call.state.body)


class Arriving:
    """Counts files that arrive.

    Args:
        most: at a time, of one owner.
        what: what they are called.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._n: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, owner: str = "") -> Iterator[None]:
        """Another one arrives, until the end of the context.

        Raises:
            HttpError: too many do.
        """
        if self._n[owner] >= self._most:
            message = f"{self._most} {self._what} arrive already; try again soon"
            raise HttpError(TOO_MANY_FILES, message)
        self._n[owner] += 1
        try:
            yield
        finally:
            self._n[owner] -= 1
            if not self._n[owner]:
                del self._n[owner]


class Form:
    """A form that arrives.

    Args:
        write: called with the bytes of the file, one part after the other.
        max_bytes: of the file.
        setting: where ``max_bytes`` comes from.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[object]], max_bytes: int, setting: str) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._setting = setting
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """``None`` if there was no file."""
        self.n_bytes = 0
        """Size of the file."""
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]
        self._name = ""
        self._value = bytearray()
        self._n_parts = 0
        self._arrived: list[bytes] = []
        """Bytes of the file that are not written yet."""
        self._is_complete = False

    async def receive(self, parts: AsyncIterator[bytes], content_type: str) -> None:
        """Receive the whole form.

        Raises:
            HttpError: it is no form, it has no file, or it is too large.
        """
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header  # for those who upload files only

        media_type, options = parse_options_header(content_type)
        if media_type != MEDIA_TYPE.encode() or not options.get(b"boundary"):
            raise invalid(f"send the file as {MEDIA_TYPE}, with a boundary")
        try:
            parser = MultipartParser(options[b"boundary"], self._callbacks())
            async for part in parts:
                parser.write(part)
                if self._arrived:
                    data, self._arrived = b"".join(self._arrived), []
                    await self._write(data)
            parser.finalize()
        except FormParserError as error:
            raise invalid(f"the form is not valid: {str(error)[:200]}") from None
        if not self._is_complete:
            raise invalid("the form breaks off before its last boundary")
        if self.filename is None:
            raise invalid("the form has no part that is called file", parameter=FILE)

    def fields_as(self, cls: type[T]) -> tuple[T, list[str]]:
        """Its fields, and a warning for each that ``cls`` does not have.

        Raises:
            HttpError: a field is of the wrong type or out of bounds.
        """
        return parse_fields({**self.fields, FILE: self.filename}, cls, "field", strict=False)

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise invalid(f"a form has at most {MAX_PARTS} parts")
        self._headers = {}
        self._value = bytearray()

    def _add_to_header(self, which: int, data: bytes) -> None:
        self._header[which] += data  # the parser bounds headers

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE:
            if self.filename is not None:
                raise invalid("the form has two files; send one", parameter=FILE)
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _add(self, data: bytes) -> None:
        if self._name == FILE:
            self.n_bytes += len(data)
            if self.n_bytes > self._max_bytes:
                message = f"a file has at most {self._max_bytes:,} bytes here ({self._setting})"
                raise HttpError(BODY_TOO_LARGE, message, parameter=FILE)
            self._arrived.append(data)
        else:
            self._value += data
            if len(self._value) > MAX_FIELD_BYTES:
                raise invalid(f"a field of a form has at most {MAX_FIELD_BYTES:,} bytes", parameter=self._name[:100])

    def _end_part(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True
