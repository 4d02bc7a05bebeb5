"""The link contract on a worker thread with a fake engine: real sockets, real time, no library."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import trio

from tests.support.fake_engine import FakeEngine, fake_vocabulary
from tests.support.link_contract import *  # noqa: F403
from tests.support.link_contract import prefill
from uma_trio import config
from uma_trio.daemon.engines.link import ThreadLauncher
from uma_trio.engine_link.messages import LoadError, Start, Step
from uma_trio.grammar.checker import LocalChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.protocol.requests import Constraint

START = Start(Path("fake.gguf"), config.Model())


class SlowEngine(FakeEngine):
    """Takes some time for what is long, so that the daemon can act while it computes."""

    def step(self, step, callbacks=None):
        if sum(len(each.tokens) for call in step.calls for each in call) > 64:
            time.sleep(0.02)
        return super().step(step, callbacks)


@pytest.fixture
def prompts():
    return [[10 + i, 20 + i, 30 + i] for i in range(5)]


@pytest.fixture
def grammar():
    found = GrammarCompiler(fake_vocabulary, LocalChecker(fake_vocabulary)).compile(Constraint(choice=["12 34 56 78 "]))
    return found.key, found.source, [12, 34, 56, 78]


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
async def link(request, nursery):
    def load(start, progress):
        engine = SlowEngine(n_ctx=4096, n_seq_max=4, n_batch=64)
        engine.is_async = request.param
        return engine

    launcher = ThreadLauncher(nursery, load)
    link = launcher.launch("fake")
    assert await link.load(START, lambda share: None, lambda: True)
    yield link
    await link.aclose()


class LaunchingEngine(FakeEngine):
    """A device whose steps wait before they are launched: CUDA takes milliseconds for one that it has not recorded."""

    def __init__(self, **options):
        super().__init__(**options)
        self.is_async = True
        self.may_launch = {number: threading.Event() for number in range(1, 6)}

    def step(self, step, callbacks=None):
        assert self.may_launch[step.number].wait(60)
        return super().step(step, callbacks)


@pytest.fixture
async def launching(nursery):
    engine = LaunchingEngine(n_ctx=4096, n_seq_max=4, n_batch=64)
    link = ThreadLauncher(nursery, lambda start, progress: engine).launch("fake")
    assert await link.load(START, lambda share: None, lambda: True)
    yield link, engine.may_launch
    for event in engine.may_launch.values():
        event.set()
    await link.aclose()


async def numbers(link, seconds):
    """The steps whose answers come within this time."""
    with trio.move_on_after(seconds):
        return [each.number for each in await link.receive()]
    return []


async def test_an_answer_does_not_wait_for_the_launch_of_a_prompt(launching, prompts):
    link, may_launch = launching
    link.submit(Step((), [[prefill(0, prompts[0])]], 1))
    link.submit(Step((), [[0, prefill(1, prompts[1])]], 2, 1))
    may_launch[1].set()
    assert await numbers(link, 60) == [1]
    may_launch[2].set()
    assert await numbers(link, 60) == [2]


async def test_an_answer_waits_for_the_launch_of_a_recording_alone(launching, prompts):
    link, may_launch = launching
    link.submit(Step((), [[prefill(0, prompts[0])]], 1))
    link.submit(Step((), [[0]], 2, 1))
    for number in (1, 2, 3):  # the second decode is recorded, so the third one repeats it
        link.submit(Step((), [[0]], number + 2, number + 1))
        may_launch[number].set()
        assert await numbers(link, 60 if number < 3 else 0.1) == ([number] if number < 3 else [])
    may_launch[4].set()
    assert await numbers(link, 60) == [3]


async def test_progress_is_reported(nursery):
    shares = []

    def load(start, progress):
        for n in range(100):
            if not progress(n / 100):
                raise LoadError("given up")
        return FakeEngine()

    launcher = ThreadLauncher(nursery, load)
    link = launcher.launch("fake")
    assert await link.load(START, shares.append, lambda: True)
    assert shares == sorted(shares)
    assert len(shares) == 100
    await link.aclose()


async def test_loading_can_be_given_up(nursery):
    shares = []

    def load(start, progress):
        while progress(0.5):
            time.sleep(0.001)
        raise LoadError("given up")

    link = ThreadLauncher(nursery, load).launch("fake")
    with trio.fail_after(60):
        assert not await link.load(START, shares.append, lambda: len(shares) < 5)
    assert link.ended.is_set()


async def test_a_model_that_cannot_be_loaded(nursery):
    def load(start, progress):
        raise LoadError("no such file")

    link = ThreadLauncher(nursery, load).launch("fake")
    with pytest.raises(LoadError, match="no such file"):
        await link.load(START, lambda share: None, lambda: True)
    assert link.ended.is_set()


async def test_a_defect_of_the_engine_ends_the_worker(nursery, caplog):
    class Broken(FakeEngine):
        def step(self, step, callbacks=None):
            raise RuntimeError("a defect")

    link = ThreadLauncher(nursery, lambda start, progress: Broken()).launch("fake")
    assert await link.load(START, lambda share: None, lambda: True)
    link.submit(Step((), [[prefill(0, [1])]], 1))
    with trio.fail_after(60), pytest.raises(EngineDied):  # noqa: F405
        await link.receive()
    assert "a defect" in caplog.text
    await link.aclose()
