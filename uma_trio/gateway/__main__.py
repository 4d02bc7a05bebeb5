"""The gateway process: ``python -m uma_trio.gateway FD CONFIG``, started by the daemon and by nobody else."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import structlog
import uvicorn

from uma_trio import parent_process
from uma_trio.config import Config
from uma_trio.gateway.application import make_app
from uma_trio.gateway.http_protocol import BoundedHttp


def main() -> None:
    """Serve HTTP on the listening socket until the daemon ends or sends SIGTERM."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    config = msgspec.json.decode(sys.argv[2], type=Config, dec_hook=_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_process.end_with_it()
    setproctitle.setproctitle(f"uma-trio gateway: {_address_of(sock)}")
    level = logging.DEBUG if config.operations.debug else getattr(logging, config.operations.log_level.upper())
    parent_process.send_log_to_it(level)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _with_fields],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(config),
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
    )
    server.run(sockets=[sock])


def _with_fields(_: Any, __: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Arguments of ``logging`` for a record of structlog."""
    return (str(event.pop("event")),), {"extra": {"fields": event}}


def _path(cls: type, value: Any) -> Any:
    return Path(value) if cls is Path else value


def _address_of(sock: socket.socket) -> str:
    host, port, *_ = sock.getsockname()
    return f"{host}:{port}"


if __name__ == "__main__":
    main()
