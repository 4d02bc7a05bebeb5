"""Records that are alike: some pass, the others are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import attrs
import pytest

from uma_trio.daemon.log_limit import MAX_ALIKE, MAX_KINDS, WINDOW_S, LogLimit


@attrs.define
class Log(logging.Handler):
    """A logger with a limit, and a clock that the test turns."""

    now: float = 0.0
    lines: list[str] = attrs.Factory(list)
    timers: list[tuple[float, Callable[[], None]]] = attrs.Factory(list)

    def __attrs_post_init__(self) -> None:
        super().__init__()
        self.limit = LogLimit(now=lambda: self.now, later=lambda delay, call: self.timers.append((delay, call)))
        self.addFilter(self.limit)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() if isinstance(record.msg, str) else record.msg["event"])

    def __hash__(self) -> int:
        return id(self)


@pytest.fixture
def log() -> Iterator[Log]:
    found = Log()
    logger = logging.getLogger("test_log_limit")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(found)
    yield found
    logger.removeHandler(found)


logger = logging.getLogger("test_log_limit")


def test_some_pass_and_the_others_are_counted(log: Log) -> None:
    for n in range(MAX_ALIKE + 500):
        logger.warning("Invalid HTTP request from %d", n)
    assert len(log.lines) == MAX_ALIKE
    [(delay_s, count)] = log.timers
    assert delay_s == WINDOW_S
    log.now += delay_s
    count()
    assert log.lines[MAX_ALIKE:] == [f"500 more lines in {WINDOW_S:.0f} s: Invalid HTTP request from %d"]


def test_a_window_later_they_pass_again_and_are_counted_again(log: Log) -> None:
    for window in range(1, 4):
        for _ in range(MAX_ALIKE + 1):
            logger.info("the same")
        log.now += WINDOW_S
        log.timers[-1][1]()
        assert (len(log.timers), len(log.lines)) == (window, window * (MAX_ALIKE + 1))


def test_few_of_them_are_never_counted(log: Log) -> None:
    for _ in range(10 * MAX_ALIKE):
        logger.info("once in a while")
        log.now += WINDOW_S / MAX_ALIKE
    assert len(log.lines) == 10 * MAX_ALIKE
    assert not log.timers


def test_others_pass_meanwhile(log: Log) -> None:
    for _ in range(2 * MAX_ALIKE):
        logger.info("a flood")
    logger.info({"event": "refused", "code": "E_PROTO_BUSY"})
    logger.error("a flood")
    assert log.lines[MAX_ALIKE:] == ["refused", "a flood"]


def test_refusals_are_counted_by_their_code_and_children_s_lines_by_their_text(log: Log) -> None:
    for _ in range(MAX_ALIKE + 1):
        for n in range(3):
            logger.info({"event": "refused", "code": f"E_{n}"})
            logger.info("%s", f"text {n}\n{id(object())}", extra={"fields": {"code": f"E_{n}"}})
    assert len(log.lines) == 6 * MAX_ALIKE


def test_lines_of_requests_that_were_served_all_pass(log: Log) -> None:
    for _ in range(10 * MAX_ALIKE):
        logger.info({"event": "request"})
        logger.info("http", extra={"fields": {"status": 200}})
    assert len(log.lines) == 20 * MAX_ALIKE


def test_it_remembers_the_most_recent_kinds_only(log: Log) -> None:
    for n in range(2 * MAX_KINDS):
        logger.info("%s", f"kind {n}")
    assert len(log.limit._windows) == MAX_KINDS
