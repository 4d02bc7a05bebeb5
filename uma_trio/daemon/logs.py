"""How the daemon logs: for people on a terminal, as JSON lines otherwise."""

from __future__ import annotations

import logging
import sys

import structlog

from uma_trio.config import Operations


def configure(settings: Operations) -> None:
    """Send structlog and the standard library's logging (libllama's messages among it) to stderr."""
    human = settings.log_format == "human" or (settings.log_format == "auto" and sys.stderr.isatty())
    level = logging.DEBUG if settings.debug else getattr(logging, settings.log_level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
        structlog.processors.StackInfoRenderer(),
    ]
    if human:
        last: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # libllama tells at its info level what people who debug it want to know
    library = logging.getLogger("llama_abi")
    library.setLevel(level if settings.debug else max(level, logging.WARNING))
    library.addFilter(_not_about_training_context)


def _not_about_training_context(record: logging.LogRecord) -> bool:
    """The cache is shared by many sequences; no single one is ever let past the trained length."""
    return "possible training context overflow" not in record.getMessage()
