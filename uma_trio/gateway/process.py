"""The server of the gateway process: uvicorn, with the daemon's log, signals and limits.

Its HTTP/1.1 has bounds on what comes before the body of a request."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from typing import Any, Final, cast

import setproctitle
import structlog
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from uma_trio.config import Config
from uma_trio.gateway.application import build
from uma_trio.gateway.request_state import IS_OVERLOADED
from uma_trio.processes import parent_process


class Server(uvicorn.Server):
    """Serves HTTP on a listening socket.  SIGHUP reads the file of tenants again.

    Raises:
        KeyFileError: the file of tenants cannot be used.
        OSError, ssl.SSLError: the files for TLS cannot be used.
    """

    def __init__(self, config: Config, sock: socket.socket) -> None:
        setproctitle.setproctitle(f"uma-trio gateway: {_address_of(sock)}")
        level = logging.DEBUG if config.operations.debug else getattr(logging, config.operations.log_level.upper())
        parent_process.send_log_to_it(level)
        structlog.configure(
            processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _with_fields],
            logger_factory=structlog.stdlib.LoggerFactory(),
            cache_logger_on_first_use=True,
        )
        logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))
        app, self._read_again, self._drain = build(config)
        settings = uvicorn.Config(
            app,
            http=BoundedHttp,
            ssl_certfile=config.http.tls_certificate,
            ssl_keyfile=config.http.tls_key,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(config.http.idle_timeout_s),
            timeout_graceful_shutdown=round(config.limits.drain_timeout_s),
            limit_concurrency=config.http.max_connections,
            ws="none",
        )
        settings.load()
        super().__init__(settings)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._read_again)
        loop.add_signal_handler(signal.SIGUSR1, self._drain)
        if self.started:
            parent_process.report_ready()


def _with_fields(_: Any, __: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Arguments of ``logging`` for a record of structlog."""
    return (str(event.pop("event")),), {"extra": {"fields": event}}


def _address_of(sock: socket.socket) -> str:
    host, port, *_ = sock.getsockname()
    return f"{host}:{port}"


MAX_HEAD_BYTES: Final = 64 * 1024
HEAD_TIMEOUT_S: Final = 30.0
"""How long a client may take from its connection, or from the first byte of a later request, to the end of the headers."""

TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose headers are too large or too slow, and ignores headers that come after a body.

    Requests beyond ``limit_concurrency`` at a time have ``IS_OVERLOADED`` in their state, so that the application can refuse
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
            waiting = [
                protocol for protocol in self._all if protocol._is_waiting and not protocol.transport.is_closing()
            ]
            min(waiting, key=lambda protocol: protocol._waits_since, default=self).transport.abort()

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
        self.scope["state"][IS_OVERLOADED] = len(self.connections) > self._max_connections <= self._n_busy
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
        return sum(not protocol._is_waiting for protocol in self._all)

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
