"""Limits of a child process that answers questions: what it computes counts, and not what it waits for on a busy machine."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from uma_trio.sandbox import Interrupted, NoAnswer, Sandbox

CHILD = """
import json, sys
for line in sys.stdin:
    while json.loads(line).get("loops"):
        pass
    print(json.dumps({"answer": 1}), flush=True)
"""
SECONDS = 0.1


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox([sys.executable, "-c", CHILD], dict, SECONDS, busy_seconds=60)
    found.start()
    yield found
    found.stop()


def test_a_child_that_could_not_compute_for_its_limit_is_waited_for(sandbox: Sandbox) -> None:
    process = sandbox._child._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(sandbox.ask({})))
    asking.start()
    time.sleep(3 * SECONDS)  # the machine is busy with something else
    process.send_signal(signal.SIGCONT)
    asking.join()
    assert answers == [{"answer": 1}]


def test_a_child_that_computes_longer_is_replaced(sandbox: Sandbox) -> None:
    with pytest.raises(NoAnswer, match=r"it takes longer than 0\.1 s"):
        sandbox.ask({"loops": True})
    assert sandbox.ask({}) == {"answer": 1}


def test_a_child_that_gets_no_time_is_not_to_blame() -> None:
    sandbox = Sandbox([sys.executable, "-c", CHILD], dict, SECONDS, busy_seconds=0.2)
    sandbox.start()
    process = sandbox._child._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(Interrupted, match="the machine is busy"):
        sandbox.ask({})
    assert sandbox.ask({}) == {"answer": 1}
    sandbox.stop()


def unread(process: subprocess.Popen[bytes]) -> int:
    """Bytes that the child has not read yet."""
    assert process.stdin is not None
    return int.from_bytes(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize(
    ("number", "is_interrupted"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGABRT, False)]
)
def test_who_has_ended_a_child(sandbox: Sandbox, number: signal.Signals, is_interrupted: bool) -> None:
    process = sandbox._child._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    failures: list[NoAnswer] = []

    def ask() -> None:
        try:
            sandbox.ask({})
        except NoAnswer as failure:
            failures.append(failure)

    asking = threading.Thread(target=ask)
    asking.start()
    while not unread(process):
        time.sleep(0.001)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    asking.join()
    [failure] = failures
    assert isinstance(failure, Interrupted) == is_interrupted
    assert (number.name in str(failure)) == is_interrupted
    assert sandbox.ask({}) == {"answer": 1}


def test_without_a_longer_wait_only_the_time_counts() -> None:
    sandbox = Sandbox([sys.executable, "-c", CHILD], dict, SECONDS)
    sandbox.start()
    process = sandbox._child._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(NoAnswer):
        sandbox.ask({})
    assert process.returncode == -signal.SIGKILL
