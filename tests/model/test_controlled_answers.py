"""Controlled answers on the real engine: forks share cells, backtracking leaves nothing, splices are like a prompt.

The controllers are scripted ones in this process; the engine reads their masks from shared memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import attrs
import numpy as np
import pytest
import trio

from tests.support.controlling import Client
from tests.support.fake_runtime import FakeRuntime
from tests.support.profile import sampled
from tests.support.programs import Back, Fork, Gen, Insert, Program, Say, Script, Set, Skip, Wait, by_path, straight
from uma_trio import config
from uma_trio.daemon.engines.link import ProcessLauncher
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.controllers.state import ControlledRequest
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.engine_link.messages import Start
from uma_trio.models.packaged import EMBEDDED
from uma_trio.principal import Principal
from uma_trio.protocol.events import Eos
from uma_trio.protocol.requests import Generate
from uma_trio.tokenizer.tokenizer import open_vocabulary

pytestmark = pytest.mark.usefixtures("forked_children")

SHARED = 600
"""Tokens that the forks share."""

NEARLY = 0.3
"""In a unified cache, log-probabilities depend on the cells and on what else is in a batch by less than this."""

SETTINGS = {
    "unified": {"ctx": 1024, "kv_unified": "on"},
    "per sequence": {"ctx": 8 * 1024, "kv_unified": "off"},
}
"""The unified cache has room for one copy of the shared tokens."""


@pytest.fixture(scope="module")
def text(library: None) -> list[int]:
    with open_vocabulary(EMBEDDED) as vocabulary:
        words = " ".join(f"The {n}th goose met the {n + 1}th frog near the old mill." for n in range(1, 80))
        found = vocabulary.tokenizer.encode(words).tolist()
    assert len(found) > SHARED
    return found[:SHARED]


@attrs.frozen
class Real:
    scheduler: Scheduler
    runtime: FakeRuntime
    start: list[int]

    async def run(self, script: Script, n: int = 700) -> dict[str, Eos]:
        """Run a program to its end; returns the last events of its answers, by path."""
        client, name = Client(), f"r{len(self.runtime.calls)}"
        generation = await self.runtime.instantiate(name, "program", script, self.start)
        sequences = self.scheduler.submit(
            PreparedRequest(
                Generate(id=name, controller="program", max_tokens=n, temperature=0.0, stream=False, logprobs=2),
                Prompt(np.array(self.start, np.int32), ""),
                client,
                Principal("uid:0"),
                controlled=ControlledRequest(name=name, generation=generation),
            )
        )
        with trio.fail_after(60):
            for sequence in sequences:
                await sequence.done.wait()
        assert {*client.reasons.values()} == {"stop"}, client.ends
        return by_path(client, client.ends)

    async def ask(self, prompt: Sequence[int], n: int) -> Eos:
        """The answer to a prompt, without a controller."""
        client = Client()
        request = Generate(id="plain", prompt="", max_tokens=n, temperature=0.0, stream=False, logprobs=2)
        [sequence] = self.scheduler.submit(
            PreparedRequest(request, Prompt(np.array(prompt, np.int32), ""), client, Principal("uid:0"))
        )
        with trio.fail_after(60):
            await sequence.done.wait()
        last: Eos = client.ends[0]
        return last

    async def clean(self) -> None:
        with trio.fail_after(60):
            await self.scheduler.wait_idle()
            while self.runtime.live or self.runtime.waiting:
                await trio.sleep(0.01)
        self.scheduler.check_integrity()
        assert self.scheduler.cache.statistics().cells_reserved == 0


def check_equal(found: Eos, wanted: Eos) -> None:
    """Compare two answers.  From where two tokens were equally likely, another one may have been chosen."""
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    for one, other in zip(found.logprobs, wanted.logprobs, strict=False):
        assert one.logprob == pytest.approx(other.logprob, abs=NEARLY)
        if one.token_id != other.token_id:
            first, second = (top.logprob for top in one.top_logprobs)
            assert first - second < NEARLY
            return
    assert len(found.logprobs) == len(wanted.logprobs) >= 5
    assert found.text == wanted.text


@contextlib.asynccontextmanager
async def real(layout: str) -> AsyncIterator[Real]:
    with open_vocabulary(EMBEDDED) as vocabulary:
        begin = vocabulary.tokenizer.encode("\n").tolist()
    async with trio.open_nursery() as nursery:
        launcher = ProcessLauncher(nursery)
        start = Start(EMBEDDED, config.Model(parallel=6, threads=1, layout_trial_s=0, **SETTINGS[layout]))
        link = launcher.launch(EMBEDDED.name)
        assert await link.load(start, lambda share: None, lambda: True)
        engine = SupervisedEngine(launcher, start, link, config.Engine())
        runtime = FakeRuntime({"program": Program}, n_vocab=link.info.n_vocab, exchange_ms=0.1)
        scheduler = Scheduler(engine, lambda token: b"%d " % token, config.load(flags={}), runtime=runtime)
        await nursery.start(runtime.run)
        nursery.start_soon(scheduler.run)
        try:
            yield Real(scheduler, runtime, begin)
        finally:
            with trio.CancelScope(shield=True):
                await engine.link.aclose()
            nursery.cancel_scope.cancel()


def four(text: list[int]) -> Script:
    """Four answers that wait for each other."""
    return [
        Say(text),
        Fork(
            [
                [Set("ready"), Gen(5), Wait("done"), Gen(3)],
                [Gen(2), Wait("ready"), Gen(4), Set("done")],
                [Insert(text[10:20]), Gen(6)],
                [Gen(4), Back(3, text[30:33]), Skip(), Gen(2)],
            ]
        ),
        Gen(2),
    ]


@pytest.mark.parametrize("layout", sampled(SETTINGS, 2))
async def test_forks_of_four_equal_four_separate_runs(text: list[int], layout: str) -> None:
    async with real(layout) as engine:
        most = []
        check = engine.scheduler.cache.statistics
        engine.runtime.exchange_ms = lambda name: most.append(check()) or 0.1  # type: ignore[func-returns-value]
        together = await engine.run(four(text))
        assert max(each.sequences for each in most) == 4
        if layout == "unified":
            assert SHARED < max(each.cells_used for each in most) < SHARED + 4 * 25
        assert {*together} == {"/0", "/1", "/2", "/3"}
        for path, answer in together.items():
            script = [each for each in straight(four(text), [int(path[1:])]) if not isinstance(each, Wait)]
            check_equal(answer, (await engine.run(script))[""])
        await engine.clean()


@pytest.mark.parametrize("layout", sampled(SETTINGS, 2))
async def test_what_was_removed_was_never_generated(text: list[int], layout: str) -> None:
    async with real(layout) as engine:
        detour = [Say(text[:50]), Gen(5), Insert(text[60:70]), Gen(6), Back(12, text[80:84]), Gen(10)]
        direct = [Say(text[:50]), Gen(5), Insert([*text[60:64], *text[80:84]]), Gen(10)]
        found, wanted = [(await engine.run(script))[""] for script in (detour, direct)]
        check_equal(found, wanted)
        assert found.usage.completion_tokens == wanted.usage.completion_tokens
        assert found.usage.sampled_tokens == 21
        await engine.clean()


@pytest.mark.parametrize("layout", sampled(SETTINGS, 2))
async def test_inserted_tokens_are_like_a_prompt_and_masks_decide(text: list[int], layout: str) -> None:
    async with real(layout) as engine:
        for first in (Say, Insert):
            inserted = (await engine.run([first(text[:200]), Gen(7)]))[""]
            prompt = await engine.ask([*engine.start, *text[:200]], 7)
            check_equal(attrs.evolve(inserted, text="".join(inserted.text.split(" ", 200)[200:])), prompt)
        allowed = sorted({*text[100:130]})
        answer = (await engine.run([Say(text[:40]), Gen(20, allowed)]))[""]
        assert {each.token_id for each in answer.logprobs} <= {*allowed}
        await engine.clean()


@pytest.mark.thorough
async def test_answers_go_on_exactly_after_the_engine_was_killed(text: list[int]) -> None:
    """In the middle of forks that share their first tokens, and have masks or splices that were not used yet."""
    async with real("unified") as engine:
        wanted = await engine.run(four(text))
        n_calls = len(engine.runtime.calls)

        def kill(name: str) -> float:
            if len(engine.runtime.calls) in (n_calls + n_calls // 3, n_calls + 2 * n_calls // 3):
                engine.scheduler._engine.link.kill()
            return 0.1

        engine.runtime.exchange_ms = kill
        found = await engine.run(four(text))
        assert engine.scheduler._engine.restarts >= 1
        assert {*found} == {*wanted}
        for path, answer in found.items():
            check_equal(answer, wanted[path])
        await engine.clean()
