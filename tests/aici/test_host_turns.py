"""Real controllers wait for their turn to call the host.  The time that they spend is counted, not measured."""

from __future__ import annotations

import itertools
import math
import threading
import time

import numpy as np
import pytest

from tests.support.wat_controllers import MID, Words, controller, returning
from uma_trio.aici.runtime.controller import Controller
from uma_trio.aici.runtime.host import WasmHost
from uma_trio.aici.runtime.interface import ControllerTimeout, Limits
from uma_trio.aici.runtime.turns import HostTurns
from uma_trio.aici.runtime.variables import Variables

N_CALLS = 100
CALLS = f"""
(local.set $n (i32.const {N_CALLS}))
(loop $again
  (drop (call $aici_host_self_seq_id))
  (br_if $again (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))
"""


class Counted:
    """A clock on which every look takes a second; time itself stands still unless a test moves it."""

    def __init__(self) -> None:
        self.looks = itertools.count()
        self.now_s = 0.0

    def cpu_s(self) -> float:
        return float(next(self.looks))

    def now(self) -> float:
        return self.now_s


def started(host: WasmHost) -> Controller:
    module = host.load(host.compile(controller(mid=CALLS + returning(MID))))
    found = host.instantiate(module, "", Variables())
    found.start([], deadline=time.monotonic() + 60)
    found.assign(1)
    return found


def wait_until_waiting(turns: HostTurns, thread: threading.Thread) -> None:
    until = time.monotonic() + 60
    while not turns.n_waiting:
        assert thread.is_alive(), "it went on"
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def clock() -> Counted:
    return Counted()


@pytest.fixture
def turns(clock: Counted) -> HostTurns:
    return HostTurns(clock.now, clock.cpu_s)


def test_an_expensive_controller_waits_for_the_end_of_a_quick_one(turns: HostTurns, clock: Counted) -> None:
    host = WasmHost(Words(), Limits(), turns)
    expensive, ended = started(host), []
    row = np.empty(Words().n_vocab, np.float32)

    def call() -> None:
        expensive.mid_process([1], row, deadline=time.monotonic() + 60)
        ended.append("expensive")

    thread = threading.Thread(target=call)
    with turns.call(math.inf):
        looks_before = next(clock.looks)
        thread.start()
        wait_until_waiting(turns, thread)
        assert next(clock.looks) - looks_before < N_CALLS, "it has used up its share after a few calls"
        ended.append("quick")
    thread.join(60)
    assert ended == ["quick", "expensive"]
    host.close()


def test_it_misses_its_deadline_and_not_that_of_the_others(turns: HostTurns, clock: Counted) -> None:
    host = WasmHost(Words(), Limits(), turns)
    expensive, failures = started(host), []
    row = np.empty(Words().n_vocab, np.float32)

    def call() -> None:
        with pytest.raises(ControllerTimeout, match="next to those of others") as caught:
            expensive.mid_process([1], row, deadline=time.monotonic() + 60)
        failures.append(caught.value)

    thread = threading.Thread(target=call)
    with turns.call(math.inf) as quick:
        quick.began = 1e13  # one quick call after the other
        thread.start()
        wait_until_waiting(turns, thread)
        clock.now_s = 1e12  # its deadline has come
        with turns.call(math.inf):  # whose end wakes it
            pass
        thread.join(60)
    assert len(failures) == 1
    assert turns.n_waiting == 0
    host.close()
