"""Reads the bodies of requests, whole or in parts, within bounds of size, time, memory and what their decoding costs.

The event loop serves all clients, and decoding keeps it busy.  So each body is cheap to decode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import anyio
import anyio.lowlevel
import attrs
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from uma_trio.errors import InvalidJson, TooManyValues
from uma_trio.gateway.errors import (
    BODY_TIMEOUT,
    BODY_TOO_LARGE,
    ENCODED_BODY,
    TOO_MANY_BODIES,
    HttpError,
    client_left,
    invalid,
    json_refusal,
)
from uma_trio.protocol.json_cost import SLICE_BYTES, JsonCost

MAX_INCOMPLETE: Final = 8
"""Bodies of the largest size that may be in memory before they are complete.  Smaller ones may be more."""
DISCARD_S: Final = 1.0
"""How long the answer to a refused request waits for the end of its body, after which the connection can stay open."""
LINGER_S: Final = 10.0
"""How long a refused request may go on sending its body after the answer."""
MAX_DISCARDED_BYTES: Final = 64 << 20
"""What is read of such a body before the answer, and after it."""
PACE_BYTES: Final = 64 * 1024
"""Bytes of a body that is read in parts."""


@attrs.define
class BodyLimits:
    """The limits of the bodies of all requests, and what incomplete ones take now.

    Args:
        max_bytes: size of the largest body.
        timeout_s: how long a client may take to send one.
        setting: where ``max_bytes`` comes from.
    """

    max_bytes: int
    timeout_s: float
    setting: str
    are_json: bool = True
    """Whether they are decoded."""
    are_streamed: bool = False
    """Whether their endpoints read them in parts."""
    incomplete_bytes: int = 0
    """Bytes in memory of bodies whose end has not arrived."""


class Body:
    """The body of one request."""

    def __init__(self, bodies: BodyLimits, headers: Headers, receive: Receive) -> None:
        self._bodies = bodies
        self._headers = headers
        self._receive = receive
        self._is_complete = False

    async def read(self) -> bytes | None:
        """Read it; ``None`` if the client leaves before its end.

        Raises:
            HttpError: it is compressed, too large, has too many values, is nested too deeply, comes too slowly, or too many others are being read.
        """
        self._check_announced()
        parts: list[bytes] = []
        size = 0
        cost = JsonCost() if self._bodies.are_json else None
        try:
            with anyio.fail_after(self._bodies.timeout_s):
                while not self._is_complete:
                    part = await self._next()
                    if part is None:
                        return None
                    size += len(part)
                    self._bodies.incomplete_bytes += len(part)
                    parts.append(part)
                    if size > self._bodies.max_bytes:
                        raise self._too_large()
                    if cost is not None:
                        await _count(part, cost)
                    if self._bodies.incomplete_bytes > MAX_INCOMPLETE * self._bodies.max_bytes:
                        message = "too many large requests arrive at once"
                        raise HttpError(TOO_MANY_BODIES, message)
        except (InvalidJson, TooManyValues) as error:
            raise json_refusal(error) from None
        except TimeoutError:
            message = f"the body did not arrive within {self._bodies.timeout_s:g} s"
            raise HttpError(BODY_TIMEOUT, message) from None
        finally:
            self._bodies.incomplete_bytes -= size
        return b"".join(parts)

    async def parts(self) -> AsyncIterator[bytes]:
        """Its parts as they arrive, for one that may be larger than memory.  ``timeout_s`` is the limit for ``PACE_BYTES``.

        Raises:
            HttpError: it is compressed, or too large, or comes too slowly, or the client leaves before its end.
        """
        self._check_announced()
        size, paced_bytes, left_s = 0, 0, self._bodies.timeout_s
        while not self._is_complete:
            began = anyio.current_time()
            with anyio.move_on_after(left_s) as waiting:
                part = await self._next()
            if waiting.cancelled_caught:
                message = f"{PACE_BYTES:,} bytes of the body did not arrive within {self._bodies.timeout_s:g} s"
                raise HttpError(BODY_TIMEOUT, message)
            if part is None:
                raise client_left()
            size += len(part)
            if size > self._bodies.max_bytes:
                raise self._too_large()
            paced_bytes, left_s = paced_bytes + len(part), left_s - (anyio.current_time() - began)
            if paced_bytes >= PACE_BYTES:
                paced_bytes, left_s = 0, self._bodies.timeout_s
            yield part

    def _check_announced(self) -> None:
        encoding = self._headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"the body is encoded as {encoding[:40]!r}: send it as it is, without Content-Encoding"
            raise HttpError(ENCODED_BODY, message)
        announced = self._headers.get("content-length", "0")
        if not (announced.isascii() and announced.isdigit()):
            raise invalid("Content-Length is not a number")
        if len(announced) > 20 or int(announced) > self._bodies.max_bytes:
            raise self._too_large()

    @property
    def is_waiting(self) -> bool:
        """Whether the client waits for a sign before it sends the body."""
        return "expect" in self._headers

    async def discard(self, seconds: float) -> bool:
        """Read what is left of a body that nobody wants; returns whether it is complete."""
        if self._headers.get("content-length", "0") == "0" and "transfer-encoding" not in self._headers:
            return True
        n_bytes = 0
        with anyio.move_on_after(seconds):
            while not (self._is_complete or self.is_waiting) and n_bytes < MAX_DISCARDED_BYTES:
                if (part := await self._next()) is None:
                    break
                n_bytes += len(part)
        return self._is_complete

    async def _next(self) -> bytes | None:
        message = await self._receive()
        if message["type"] != "http.request":
            return None
        self._is_complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> HttpError:
        return HttpError(
            BODY_TOO_LARGE,
            f"the body of a request has at most {self._bodies.max_bytes:,} bytes here ({self._bodies.setting})",
        )


class Refusal(Response):
    """The response to a request whose body is not wanted.  Reads the rest of that, also after the response.

    Bytes that nobody has read would reset the connection, and a client that still sends would not see the response.
    """

    def __init__(self, response: Response, body: Body) -> None:
        super().__init__(response.body, response.status_code)
        self.raw_headers = response.raw_headers
        self._rest = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, and close the connection unless the whole body came in time."""

        async def send_open(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        is_complete = await self._rest.discard(DISCARD_S)
        if not is_complete:
            self.headers["connection"] = "close"
        if is_complete or self._rest.is_waiting:
            await super().__call__(scope, receive, send)
        else:
            await super().__call__(scope, receive, send_open)
            await self._rest.discard(LINGER_S)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _count(part: bytes, cost: JsonCost) -> None:
    """Count the values of a part, which may be as large as the system's buffers.

    Raises:
        TooManyValues: there are too many.
        InvalidJson: they are nested too deeply.
    """
    for start in range(0, len(part), SLICE_BYTES):
        if start:
            await anyio.lowlevel.checkpoint()
        cost.add(part[start : start + SLICE_BYTES])


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the ``body``, which was read already, and then later messages."""
    parts = [body]

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replay
