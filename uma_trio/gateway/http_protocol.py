"""HTTP/1.1 as uvicorn speaks it, with bounds on what comes before the body of a request."""

from __future__ import annotations

import math
from typing import Any, Final, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES: Final = 64 * 1024
HEAD_TIMEOUT_S: Final = 30.0
"""How long a client may take from its connection, or from the first byte of a later request, to the end of the headers."""

TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose headers are too large or too slow, and ignores headers that come after a body.

    Requests beyond ``limit_concurrency`` at a time have ``is_overloaded`` in their state, so that the application can refuse
    them in its own words, where uvicorn would answer with a plain text.  Beyond twice as many connections, each new one
    closes the one that has waited longest for a request, so connections without requests keep nobody out.
    """

    _in_head = True
    _head_bytes = 0
    _head_timer: Any = None
    _waits_since = 0.0
    """When the connection was made, or its last answer ended."""
    _running: RequestResponseCycle | None = None
    """The request that is answered.  ``cycle`` is the last one that has arrived: a client may send several at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections = math.inf if self.limit_concurrency is None else self.limit_concurrency
        self.limit_concurrency = None

    def connection_made(self, transport: Any) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._expect_head()
        if len(self.connections) > 2 * self._max_connections:
            waiting = [each for each in self._all if each._is_waiting and not each.transport.is_closing()]
            min(waiting, key=lambda each: each._waits_since, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        super().on_message_begin()
        if not self._in_head:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``httptools``.  It also calls this for trailers, which would change the headers of a running request."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        self._in_head = False
        self._stop_timer()
        self.scope["state"]["is_overloaded"] = len(self.connections) > self._max_connections <= self._n_busy
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._waits_since = self.loop.time()
        super().on_response_complete()

    @property
    def _all(self) -> set[BoundedHttp]:
        """All open connections."""
        return cast(set[BoundedHttp], self.connections)

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _n_busy(self) -> int:
        return sum(not each._is_waiting for each in self._all)

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing.  uvicorn calls this for all bytes, also for line breaks and the rest of a body, which begin no request."""

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, TOO_SLOW)

    def _stop_timer(self) -> None:
        super()._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if self._head_bytes and not is_answering:
                self.transport.write(answer)
            self.transport.close()
