"""The runtime of controllers dies or hangs under load, and the daemon is killed: who notices, and what is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import uma_trio
from tests.model.test_controllers import PROGRAM, TEXT
from tests.support.profile import sampled
from tests.support.real_daemon import Canary, Daemon, Wire, real_daemon

SHARED_MEMORY = Path("/dev/shm")
N_CONTROLLED = 3
ENDLESS = "start(async () => { await gen({ regex: /[a-z ]{7000}/, maxTokens: 7000 }) })"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def daemon(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with real_daemon("--threads", "1", folder=tmp_path_factory.mktemp("daemon")) as found:
        uma_trio.run("jsctrl", PROGRAM, socket=found.socket)
        yield found


def runtime_of(daemon: Daemon) -> psutil.Process:
    return psutil.Process(daemon.metrics()["controllers"]["pid"])


def names_of(*processes: psutil.Process) -> list[str]:
    """Shared memory of a daemon."""
    found = re.compile(rf"(sem\.)?uma({'|'.join(str(each.pid) for each in processes)})-")
    return [name for name in os.listdir(SHARED_MEMORY) if found.match(name)]


@contextlib.contextmanager
def controlled(daemon: Daemon) -> Iterator[list[Wire]]:
    """Answers that controllers steer, under way."""
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(daemon.wire(timeout_s=PATIENCE_S)) for _ in range(N_CONTROLLED)]
        for wire in wires:
            wire.send(id="steered", controller="jsctrl", controller_arg=ENDLESS)
        for wire in wires:
            for _ in range(5):
                event = wire.receive()
                assert event is not None
                assert event["event"] == "token", event
        yield wires


@pytest.mark.parametrize(
    ("number", "reason"), sampled([(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "stopped by a signal")], 2)
)
def test_only_controlled_requests_notice_the_end_of_the_runtime(
    daemon: Daemon, number: signal.Signals, reason: str
) -> None:
    before = runtime_of(daemon)
    restarts = daemon.metrics()["controllers"]["restarts_total"]
    with Canary(daemon) as canary:
        with controlled(daemon) as wires:
            os.kill(before.pid, number)
            began = time.monotonic()
            for wire in wires:
                answer = wire.answer()
                assert answer.code == "E_CONTROLLER_UNAVAILABLE"
                assert reason in answer.last["message"]
                assert answer.last["index"] == 0
            noticed_s = time.monotonic() - began
        tree = uma_trio.run("jsctrl", PROGRAM, socket=daemon.socket)
        print(f"{number.name}: noticed after {noticed_s:.2f} s, a new answer after {time.monotonic() - began:.2f} s")
        assert re.fullmatch(rf"{TEXT}\d\d", tree[0].text), tree[0]
    assert canary.rounds
    daemon.settled()
    assert daemon.metrics()["controllers"]["restarts_total"] == restarts + 1
    after = runtime_of(daemon)
    assert after.pid != before.pid
    assert not before.is_running() or before.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stopped", sampled([False, True], 2))
def test_the_runtime_ends_with_the_daemon(library: None, tmp_path: Path, stopped: bool) -> None:
    with contextlib.suppress(AssertionError), real_daemon("--threads", "1", folder=tmp_path) as daemon:
        uma_trio.run("yesno", socket=daemon.socket)
        runtime, process = runtime_of(daemon), psutil.Process(daemon.pid)
        assert names_of(process)
        assert "aicirt" in " ".join(runtime.cmdline())
        if stopped:
            runtime.suspend()
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    _, left = psutil.wait_procs([runtime], PATIENCE_S)
    assert not left
    assert names_of(process) == []


def test_nothing_is_left_after_a_usual_end(library: None, tmp_path: Path) -> None:
    with real_daemon("--threads", "1", folder=tmp_path) as daemon:
        assert names_of(psutil.Process(daemon.pid)) == [], "a runtime was started before anybody needed it"
        uma_trio.run("yesno", socket=daemon.socket)
        runtime, process = runtime_of(daemon), psutil.Process(daemon.pid)
    psutil.wait_procs([runtime], PATIENCE_S)
    assert not runtime.is_running()
    assert names_of(process) == []


@pytest.mark.thorough
def test_requests_that_are_cancelled_before_they_begin_leave_no_controllers_behind(
    library: None, tmp_path: Path
) -> None:
    """The runtime lets 256 controllers wait for a sequence."""
    with real_daemon("--threads", "1", "--parallel", "1", folder=tmp_path) as daemon:
        uma_trio.run("yesno", socket=daemon.socket)
        with daemon.wire() as wire:
            wire.send(id="first", controller="jsctrl", controller_arg=ENDLESS)
            assert wire.receive() is not None
            for n in range(300):
                with daemon.wire() as short:
                    short.send(id="short", controller="yesno")
                    if n % 10:
                        daemon.wait_until(lambda found: found["queue_depth"], "it waits")
                daemon.wait_until(lambda found: not found["queue_depth"], "it has gone")
        assert uma_trio.run("yesno", socket=daemon.socket)[0].text in ("yes", "no")
