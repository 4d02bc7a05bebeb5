"""The daemon's log on stderr: readable text on a terminal, JSON lines otherwise.

A thread writes it.  A program that should read the log and does not, such as a pager, must not stall the event loop.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
from typing import Any, Final

import structlog

from uma_trio.config import Operations
from uma_trio.daemon.log_limit import LogLimit

MAX_QUEUED: Final = 10_000
"""Records that wait to be written.  Further ones are dropped and counted."""

FLUSH_S: Final = 1.0


def configure(settings: Operations) -> None:
    """Send the records of structlog and of ``logging``, which include those of libllama and of the engines, to stderr."""
    human = settings.log_format == "human" or (settings.log_format == "auto" and sys.stderr.isatty())
    level = logging.DEBUG if settings.debug else getattr(logging, settings.log_level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
        structlog.processors.StackInfoRenderer(),
    ]
    if not human or level <= logging.DEBUG:
        shared.append(structlog.stdlib.add_logger_name)
    if human:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False)
        last: list[structlog.typing.Processor] = [_on_one_line, renderer]
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
    writer = logging.StreamHandler()
    writer.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_add_fields, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    handler = BackgroundHandler(writer)
    handler.addFilter(LogLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # the info level of libllama is for people who debug libllama
    library = logging.getLogger("llama_abi")
    library.setLevel(level if settings.debug else max(level, logging.WARNING))
    library.addFilter(_is_not_about_training_context)


def flush() -> None:
    """Wait until the log is written, ``FLUSH_S`` at most: for what is printed after it."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class BackgroundHandler(logging.handlers.QueueHandler):
    """Has a thread write the records, and never waits for it.

    Args:
        writer: formats and writes; may block.
    """

    def __init__(self, writer: logging.Handler) -> None:
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(MAX_QUEUED)
        super().__init__(self._records)
        self._dropped = 0
        logging.handlers.QueueListener(self._records, writer).start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave formatting to the thread."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue ``record``; where there is no room, count it and say so later."""
        try:
            if self._dropped:
                text = f"{self._dropped} log records were dropped: nobody read the log"
                self._records.put_nowait(logging.LogRecord("uma_trio", logging.WARNING, "", 0, text, (), None))
                self._dropped = 0
            self._records.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until everything is written, ``FLUSH_S`` at most; ``logging`` calls it when the program ends."""
        records = self._records
        with records.all_tasks_done:
            records.all_tasks_done.wait_for(lambda: not records.unfinished_tasks, FLUSH_S)


def _add_fields(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Add the fields of a record that comes from a child process."""
    event.update(getattr(event["_record"], "fields", {}))
    return event


def _on_one_line(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace values that are spelled in Python, for people: no ``None``, no dictionaries, no lists."""
    shown: structlog.typing.EventDict = {}
    for key, value in event.items():
        match value:
            case None:
                continue
            case dict():
                shown[key] = ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
            case list() | tuple():
                shown[key] = ", ".join(map(str, value)) or "none"
            case _:
                shown[key] = value
    return shown


def _is_not_about_training_context(record: logging.LogRecord) -> bool:
    """Drop a warning that is wrong here: many sequences share the context, and none may exceed the trained length."""
    return "possible training context overflow" not in record.getMessage()
