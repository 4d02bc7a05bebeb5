"""Codecs for the two ends of a connection: bytes to messages, events to bytes.

``ServerCodec`` and ``ClientCodec`` implement the framed protocol.  ``NewlineCodec`` is the server's end of the newline
protocol, for people at a terminal (``nc -U``).  Codecs do no I/O, and do not check whether a message is allowed in the
connection's current state.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, Literal, Protocol

from uma_trio.errors import BadRequest, FrameTooLarge, InvalidCbor, InvalidJson
from uma_trio.protocol import framing, messages, payload
from uma_trio.protocol.answers import TokenList, Transcript
from uma_trio.protocol.cbor_cost import CborCost
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.controllers import Backtrack, ControllerOutput, Controllers, Fork
from uma_trio.protocol.events import (
    Embeddings,
    Eos,
    Failure,
    Forecast,
    Inserted,
    LoadProgress,
    PrefillProgress,
    Reasoning,
    Token,
)
from uma_trio.protocol.field_errors import unknown_fields
from uma_trio.protocol.json_cost import SLICE_BYTES, JsonCost
from uma_trio.protocol.messages import ClientMessage, Event, ServerEvent
from uma_trio.protocol.payload import Encoding
from uma_trio.protocol.requests import Cancel, Generate, without_effect

ERROR_LINE: Final = b"error: "
"""How an error begins in the newline protocol."""

MAX_EVENT_BYTES: Final = 64 << 20
"""Largest frame that a client takes."""

IN_THE_MIDDLE: Final = (
    Token, Reasoning, Inserted, PrefillProgress, LoadProgress, Forecast, Fork, ControllerOutput, Backtrack
)  # fmt: skip
"""Events of a request that are not its last one.  A tuple, because it is asked for each token."""

Mode = Literal["auto", "json", "cbor", "newline"]


class Codec(Protocol):
    """Interface of the server's codecs."""

    @property
    def files(self) -> list[bytes]:
        """Files that came as descriptors, in their order.  Messages take those that they name."""

    @property
    def mid_message(self) -> bool:
        """Whether a message has arrived in part."""

    @property
    def next_bytes(self) -> int:
        """Size of the next message, if it has arrived and takes time to decode; otherwise 0."""

    @property
    def arriving_bytes(self) -> int:
        """Size of the message that arrives, as far as it is known; 0 if there is none."""

    def receive_data(self, data: bytes) -> None:
        """Buffer ``data``; ``b""`` means that the peer closed its sending side."""

    def next_message(self) -> ClientMessage | None:
        """Remove and return the next complete message; ``None`` if more data is needed.

        Raises:
            ProtocolError: the peer violated the protocol.  The codec cannot be used afterwards.
        """

    def decoding(self) -> Generator[None, None, ClientMessage | None]:
        """``next_message`` in pieces: yields between two of them, and returns the message."""

    def encode(self, event: ServerEvent) -> bytes:
        """Serialize an event."""

    @property
    def queues_requests(self) -> bool:
        """Whether a request waits for the end of the one before, instead of being refused."""


def server_codec(mode: Mode, *, max_frame_bytes: int, chat: bool = True) -> Codec:
    """Return the codec for the server's end of a connection.

    Args:
        chat: whether a line of the newline protocol is a message of a chat, or a text to continue.
    """
    if mode == "newline":
        return NewlineCodec(max_line_bytes=max_frame_bytes, chat=chat)
    return ServerCodec(mode, max_frame_bytes=max_frame_bytes)


class ServerCodec:
    """The server's end of the framed protocol.

    Events of a request have the encoding of the request; events without an ``id``, that of the latest frame received.
    """

    queues_requests = False

    def __init__(self, mode: Literal["auto", "json", "cbor"], *, max_frame_bytes: int) -> None:
        self.files: list[bytes] = []
        self._frames = framing.FrameReader(max_frame_bytes=max_frame_bytes)
        self._only = None if mode == "auto" else Encoding(mode)
        self._latest = self._only or Encoding.JSON
        self._pending: dict[str | None, tuple[Encoding, int]] = {}
        """Request id to encoding and number of answers that have not ended.  So a cancel in JSON does not change the
        encoding of a CBOR stream."""
        self._warnings: dict[str | None, list[str]] = {}
        """Request id to what its last event says of the request."""

    @property
    def mid_message(self) -> bool:
        return self._frames.mid_frame

    @property
    def next_bytes(self) -> int:
        return self._frames.next_bytes

    @property
    def arriving_bytes(self) -> int:
        return self._frames.arriving_bytes

    def receive_data(self, data: bytes) -> None:
        self._frames.receive_data(data)

    def next_message(self) -> ClientMessage | None:
        decoding = self.decoding()
        while True:
            try:
                next(decoding)
            except StopIteration as end:
                message: ClientMessage | None = end.value
                return message

    def decoding(self) -> Generator[None, None, ClientMessage | None]:
        data = self._frames.next_payload()
        if data is None:
            return None
        encoding = payload.encoding_of(data)
        if self._only is None:
            self._latest = encoding
        elif encoding is not self._only:
            wrong = InvalidJson if self._only is Encoding.JSON else InvalidCbor
            raise wrong(f"this daemon runs with --protocol {self._only.value}")
        cost = JsonCost() if encoding is Encoding.JSON else CborCost()
        for start in range(0, len(data), SLICE_BYTES):
            cost.add(data[start : start + SLICE_BYTES])
            yield
        fields = payload.decode(data, encoding)
        yield
        message = messages.parse(fields, self.files)
        if not isinstance(message, Cancel):
            answers = message.n if isinstance(message, Generate) else 1
            self._pending.setdefault(message.id, (encoding, answers))
            warnings = unknown_fields(fields, type(message))
            if isinstance(message, Generate):
                warnings += without_effect(fields, message)
            if warnings:
                self._warnings.setdefault(message.id, warnings)
        return message

    def encode(self, event: ServerEvent) -> bytes:
        encoding, answers = self._pending.get(event.id, (self._latest, 0))
        if isinstance(event, Fork) and answers:
            self._pending[event.id] = encoding, answers + 1
        fields = messages.to_fields(event)
        if not isinstance(event, IN_THE_MIDDLE) and not (
            isinstance(event, Transcript | TokenList | Embeddings | Controllers) and event.more
        ):
            self._pending.pop(event.id, None)
            if warnings := self._warnings.pop(event.id, None):
                fields["warnings"] = warnings
            if isinstance(event, Eos | Failure) and event.index is not None and answers > 1:
                self._pending[event.id] = encoding, answers - 1
        return framing.frame(payload.encode(fields, encoding))


class ClientCodec:
    """The client's end of the framed protocol: sends plain fields, receives typed events."""

    def __init__(self, encoding: Encoding = Encoding.JSON) -> None:
        self._frames = framing.FrameReader(max_frame_bytes=MAX_EVENT_BYTES)
        self._encoding = encoding

    @property
    def mid_event(self) -> bool:
        """Whether bytes have arrived that ``next_event`` has not returned."""
        return self._frames.mid_frame

    def receive_data(self, data: bytes) -> None:
        self._frames.receive_data(data)

    def next_event(self) -> Event | None:
        """Remove and return the next complete event; ``None`` if more data is needed.

        Raises:
            ProtocolError: the server violated the protocol.
        """
        try:
            data = self._frames.next_payload()
        except FrameTooLarge:
            if ERROR_LINE.startswith(self._frames.header):
                raise InvalidJson(
                    "the daemon sends lines instead of frames, because it runs with --protocol newline: start it "
                    "without that, or talk to it with nc -U"
                ) from None
            raise
        if data is None:
            return None
        return messages.decode_event(data)

    def encode(self, fields: dict[str, Any]) -> bytes:
        """Serialize a message, given as plain fields."""
        return framing.frame(payload.encode(fields, self._encoding))


class NewlineCodec:
    """The newline protocol: each line is a question, the answer is plain text.

    An answer ends with a newline; an error is a line ``error: CODE message``.  For debugging only: a newline inside an
    answer looks like its end, until the connection closes.

        echo 'Tell me a story' | nc -U uma.sock

    Args:
        chat: send a line as the user's message of a chat; otherwise as a text to continue.
    """

    queues_requests = True

    def __init__(self, *, max_line_bytes: int, chat: bool = True) -> None:
        self.files: list[bytes] = []  # no line can name one
        self._chat = chat
        self._buffer = bytearray()
        self._searched = 0
        """Length of the buffer's beginning that is known to contain no newline."""
        self._max_line_bytes = max_line_bytes
        self._closed = False
        self._requests = 0

    @property
    def mid_message(self) -> bool:
        return bool(self._buffer)

    @property
    def next_bytes(self) -> int:
        return 0

    @property
    def arriving_bytes(self) -> int:
        return len(self._buffer)

    def receive_data(self, data: bytes) -> None:
        self._buffer += data
        self._closed |= not data

    def decoding(self) -> Generator[None, None, ClientMessage | None]:
        yield from ()
        return self.next_message()

    def next_message(self) -> ClientMessage | None:
        end = self._buffer.find(b"\n", self._searched)
        self._searched = len(self._buffer) if end < 0 else 0
        line = bytes(self._buffer[: end if end >= 0 else None])
        self._check(line)  # also a part of a line: a frame has no newline at its end, so its client would wait
        if end < 0 and not (self._closed and self._buffer):
            return None
        del self._buffer[: len(line) + 1]
        return self._request(line.removesuffix(b"\r"))

    def _check(self, line: bytes) -> None:
        """Refuse a line, or the part of it that has arrived.  The result does not depend on how the line is split."""
        if b"\0" in line[: self._max_line_bytes + 1]:
            raise BadRequest(
                "a line may not contain NUL; this daemon runs with --protocol newline, and a client that sends frames "
                "needs a daemon without that"
            )
        if len(line) > self._max_line_bytes:
            raise FrameTooLarge(f"a line has more than {self._max_line_bytes} bytes")

    def _request(self, line: bytes) -> Generate:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
        self._requests += 1
        name = f"line-{self._requests}"
        if self._chat:
            return Generate(id=name, messages=[ChatMessage(role="user", content=text)])
        return Generate(id=name, prompt=text)

    def encode(self, event: ServerEvent) -> bytes:
        match event:
            case Token(text=text) | Reasoning(text=text):
                return text.encode()
            case Eos():
                return b"\n"
            case Failure(code=code, message=message):
                return ERROR_LINE + f"{code} {' '.join(message.splitlines())}\n".encode()
            case _:
                raise AssertionError("no line asks for this")
