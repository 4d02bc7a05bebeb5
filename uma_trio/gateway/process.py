"""The server of the gateway process: uvicorn, with the daemon's log, signals and limits."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import Any

import setproctitle
import structlog
import uvicorn

from uma_trio import parent_process
from uma_trio.config import Config
from uma_trio.gateway.application import build
from uma_trio.gateway.http_protocol import BoundedHttp


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
        app, self._read_again = build(config)
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
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_again)
        if self.started:
            parent_process.report_ready()


def _with_fields(_: Any, __: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Arguments of ``logging`` for a record of structlog."""
    return (str(event.pop("event")),), {"extra": {"fields": event}}


def _address_of(sock: socket.socket) -> str:
    host, port, *_ = sock.getsockname()
    return f"{host}:{port}"
