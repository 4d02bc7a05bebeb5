"""One connection's view of the protocol: bytes to messages, events to bytes.

``ServerCodec`` and ``ClientCodec`` are the two ends of the framed protocol; ``NewlineCodec`` is the
server's end of the one for people at a terminal (``nc -U``).  None of them knows a socket, and none
knows whether a message is allowed *now*: that is the connection's affair.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from uma_trio.errors import BadRequest, FrameTooLarge, InvalidCbor, InvalidJson
from uma_trio.protocol import framing, messages, payload
from uma_trio.protocol.messages import (
    Cancel,
    ClientMessage,
    Eos,
    Failure,
    Generate,
    Metrics,
    ServerEvent,
    SessionList,
    Token,
)
from uma_trio.protocol.payload import Encoding

Mode = Literal["auto", "json", "cbor", "newline"]


class Codec(Protocol):
    """What the daemon needs of a protocol."""

    @property
    def mid_message(self) -> bool:
        """Whether a message has begun to arrive and is not complete."""

    def receive_data(self, data: bytes) -> None:
        """Store ``data``; ``b""`` says that the peer has closed its side."""

    def next_message(self) -> ClientMessage | None:
        """Take the next whole message; ``None`` when it takes more data.

        Raises:
            ProtocolError: after one of these the connection is closed.
        """

    def encode(self, event: ServerEvent) -> bytes:
        """The bytes that tell ``event`` to the peer."""


def server_codec(mode: Mode, *, max_frame_bytes: int) -> Codec:
    """The server's end of one connection."""
    if mode == "newline":
        return NewlineCodec(max_line_bytes=max_frame_bytes)
    return ServerCodec(mode, max_frame_bytes=max_frame_bytes)


class ServerCodec:
    """The server's end of the framed protocol; answers in the encoding that was asked in.

    What has no ``id`` is told in the encoding of the latest frame.
    """

    def __init__(self, mode: Literal["auto", "json", "cbor"], *, max_frame_bytes: int) -> None:
        self._frames = framing.FrameReader(max_frame_bytes=max_frame_bytes)
        self._only = None if mode == "auto" else Encoding(mode)
        self._latest = self._only or Encoding.JSON
        self._asked_in: dict[str | None, tuple[Encoding, int]] = {}
        """By id: of what is still to be answered, so that a cancel in JSON leaves a CBOR stream CBOR; and how many
        answers are."""

    @property
    def mid_message(self) -> bool:
        return self._frames.mid_frame

    def receive_data(self, data: bytes) -> None:
        self._frames.receive_data(data)

    def next_message(self) -> ClientMessage | None:
        found = self._frames.next_payload()
        if found is None:
            return None
        encoding = payload.encoding_of(found)
        if self._only is None:
            self._latest = encoding
        elif encoding is not self._only:
            wrong = InvalidJson if self._only is Encoding.JSON else InvalidCbor
            raise wrong(f"this server was started with --protocol {self._only.value}")
        message = messages.parse(payload.decode(found, encoding))
        if not isinstance(message, Cancel):
            answers = message.n if isinstance(message, Generate) else 1
            self._asked_in.setdefault(message.id, (encoding, answers))
        return message

    def encode(self, event: ServerEvent) -> bytes:
        encoding, answers = self._asked_in.get(event.id, (self._latest, 0))
        if type(event) is not Token:
            self._asked_in.pop(event.id, None)
            if isinstance(event, Eos | Failure) and event.index is not None and answers > 1:
                self._asked_in[event.id] = encoding, answers - 1
        return framing.frame(payload.encode(messages.to_fields(event), encoding))


class ClientCodec:
    """The client's end of the framed protocol: sends plain fields, receives plain fields."""

    def __init__(self, encoding: Encoding = Encoding.JSON, *, max_frame_bytes: int = 64 << 20) -> None:
        self._frames = framing.FrameReader(max_frame_bytes=max_frame_bytes)
        self._encoding = encoding

    def receive_data(self, data: bytes) -> None:
        self._frames.receive_data(data)

    def next_event(self) -> dict[str, Any] | None:
        """Take the next event; ``None`` when it takes more data.

        Raises:
            ProtocolError: the server did not keep to the protocol.
        """
        found = self._frames.next_payload()
        return None if found is None else payload.decode(found, payload.encoding_of(found))

    def encode(self, fields: dict[str, Any]) -> bytes:
        return framing.frame(payload.encode(fields, self._encoding))


class NewlineCodec:
    """A prompt a line in, raw text out: ``echo 'Tell me a story' | nc -U uma.sock``.

    The answer to a prompt ends with a newline, an error reads ``error: CODE message``.  Only for
    debugging: nothing tells an answer's own newline from its end but the closing connection.
    """

    def __init__(self, *, max_line_bytes: int) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """Bytes at the buffer's beginning that hold no end of a line."""
        self._max_line_bytes = max_line_bytes
        self._closed = False
        self._requests = 0

    @property
    def mid_message(self) -> bool:
        return bool(self._buffer)

    def receive_data(self, data: bytes) -> None:
        self._buffer += data
        self._closed |= not data

    def next_message(self) -> ClientMessage | None:
        end = self._buffer.find(b"\n", self._searched)
        self._searched = len(self._buffer) if end < 0 else 0
        if end < 0 and not (self._closed and self._buffer):
            if len(self._buffer) > self._max_line_bytes:
                raise FrameTooLarge(f"a line of more than {self._max_line_bytes} bytes")
            return None
        line = bytes(self._buffer[: end if end >= 0 else None])
        del self._buffer[: len(line) + 1]
        if len(line) > self._max_line_bytes:
            raise FrameTooLarge(f"a line of more than {self._max_line_bytes} bytes")
        return self._request(line.removesuffix(b"\r"))

    def _request(self, line: bytes) -> Generate:
        if b"\0" in line:
            raise BadRequest("a prompt line may not hold NUL")
        try:
            prompt = line.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"the prompt is not UTF-8: {error.reason} at byte {error.start}") from None
        self._requests += 1
        return Generate(id=f"line-{self._requests}", prompt=prompt)

    def encode(self, event: ServerEvent) -> bytes:
        match event:
            case Token(text=text):
                return text.encode()
            case Eos():
                return b"\n"
            case Failure(code=code, message=message):
                return f"error: {code} {' '.join(message.splitlines())}\n".encode()
            case Metrics() | SessionList():
                raise AssertionError("nobody can ask for that in the newline protocol")
