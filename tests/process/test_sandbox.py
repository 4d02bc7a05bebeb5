"""Limits of a child process that answers questions: what it computes counts, and not what it waits for on a busy machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from uma_trio.processes.sandbox import Interrupted, NoAnswer, Sandbox

CHILD = """
import json, os, sys
for line in sys.stdin:
    question = json.loads(line)
    while question.get("loops"):
        pass
    if "waits" in question:
        open(question["waits"]).read()
    if question.get("dies"):
        os.kill(os.getpid(), question["dies"])
    print(json.dumps({"pid": os.getpid()}), flush=True)
"""
SECONDS = 0.1
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox([sys.executable, "-c", CHILD], dict, SECONDS, busy_seconds=60)
    found.start()
    yield found
    found.stop()


def process_of(sandbox: Sandbox) -> subprocess.Popen[bytes]:
    process = sandbox._child._process
    assert process is not None
    return process


def test_a_child_that_could_not_compute_for_its_limit_is_waited_for(sandbox: Sandbox, tmp_path: Path) -> None:
    """It waits for this test, which looks as on a machine that is busy with something else."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    answers: list[dict[str, Any]] = []
    pid = process_of(sandbox).pid
    asking = threading.Thread(target=lambda: answers.append(sandbox.ask({"waits": str(gate)})))
    asking.start()
    with gate.open("w"):  # the child has begun
        deadline = time.monotonic() + 3 * SECONDS
        while time.monotonic() < deadline:
            time.sleep(SECONDS)
    asking.join()
    assert answers == [{"pid": pid}]


@pytest.mark.parametrize("number", ENDS)
def test_a_child_that_somebody_ends_between_questions_is_replaced(sandbox: Sandbox, number: signal.Signals) -> None:
    process = process_of(sandbox)
    process.send_signal(number)
    assert sandbox.ask({})["pid"] != process.pid
    assert process.returncode in (-signal.SIGKILL, -signal.SIGTERM)


@pytest.mark.parametrize("number", ENDS)
def test_a_child_that_somebody_ends_during_a_question_is_asked_again(
    sandbox: Sandbox, tmp_path: Path, number: signal.Signals
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = process_of(sandbox)
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(sandbox.ask({"waits": str(gate)})))
    asking.start()
    with gate.open("w"):  # the first one has begun
        process.send_signal(number)
        process.wait(60)
    gate.open("w").close()  # the second one has
    asking.join()
    assert answers[0]["pid"] != process.pid
    assert answers == [{"pid": process_of(sandbox).pid}]


@pytest.mark.parametrize("number", ENDS)
def test_a_question_during_which_two_children_were_ended_is_given_up(sandbox: Sandbox, number: signal.Signals) -> None:
    with pytest.raises(Interrupted, match=r"was (ended|stopped) by"):
        sandbox.ask({"dies": number})
    assert sandbox.ask({})["pid"]


def test_a_child_that_is_stopped_while_it_starts_is_replaced(tmp_path: Path) -> None:
    mark = tmp_path / "second"
    code = f"import os\nif not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w')\n    os.kill(os.getpid(), {int(signal.SIGSTOP)})\n{CHILD}"  # fmt: skip
    sandbox = Sandbox([sys.executable, "-c", code], dict, 60)
    assert sandbox.ask({})["pid"]
    sandbox.stop()


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV])
def test_a_child_that_its_limits_end_is_not_asked_again(sandbox: Sandbox, number: signal.Signals) -> None:
    with pytest.raises(NoAnswer, match="too much memory or time"):
        sandbox.ask({"dies": number})


def test_a_child_that_computes_longer_is_replaced(sandbox: Sandbox) -> None:
    with pytest.raises(NoAnswer, match=r"it takes longer than 0\.1 s"):
        sandbox.ask({"loops": True})
    assert sandbox.ask({})["pid"]


def test_a_child_that_gets_no_time_is_not_to_blame(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    sandbox = Sandbox([sys.executable, "-c", CHILD], dict, SECONDS, busy_seconds=0.2)
    sandbox.start()
    process = process_of(sandbox)
    with pytest.raises(Interrupted, match="the machine is busy"):
        sandbox.ask({"waits": str(gate)})
    assert process.returncode == -signal.SIGKILL
    assert sandbox.ask({})["pid"]
    sandbox.stop()


def test_without_a_longer_wait_only_the_time_counts(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    sandbox = Sandbox([sys.executable, "-c", CHILD], dict, SECONDS)
    sandbox.start()
    process = process_of(sandbox)
    with pytest.raises(NoAnswer):
        sandbox.ask({"waits": str(gate)})
    assert process.returncode == -signal.SIGKILL
