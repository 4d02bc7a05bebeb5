"""The first text of a controller is shared like a prompt: computed once, and then copied or waited for."""

from __future__ import annotations

import itertools
import random

import pytest
import trio

from tests.support.controlling import START, Client, Controlling, controlling
from tests.support.fake_engine import FakeEngine
from tests.support.programs import Back, Gen, Program, Say, Script, by_path, expected

PROGRAMS = {"program": Program}
TEXT = random.Random(2).choices(range(1, 800), k=300)
names = itertools.count()
LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])


def engine(unified: bool = True, *, can_truncate: bool = True) -> FakeEngine:
    return FakeEngine(n_ctx=8192, unified=unified, can_truncate=can_truncate)


def computed(harness: Controlling) -> int:
    """Tokens that the engine has computed."""
    return sum(len(each.tokens) for step in harness.engine.steps for call in step.calls for each in call)


async def begin(harness: Controlling, script: Script, n: int = 400, **fields: object) -> tuple[Client, object]:
    client = Client()
    return client, await harness.control("program", client, n, argument=script, id=f"r{next(names)}", **fields)


async def run(harness: Controlling, script: Script, **fields: object) -> Client:
    client, answers = await begin(harness, script, **fields)
    await harness.done(answers)
    assert by_path(client, client.tokens) == expected(script)
    return client


@LAYOUTS
@pytest.mark.parametrize("can_truncate", [True, False])
async def test_a_text_that_an_earlier_answer_began_with_is_not_computed_again(
    autojump_clock: object, unified: bool, can_truncate: bool
) -> None:
    async with controlling(PROGRAMS, engine(unified, can_truncate=can_truncate)) as harness:
        first = await run(harness, [Say(TEXT), Gen(5)])
        assert first.ends[0].usage.cached_tokens == 0
        before = computed(harness)
        second = await run(harness, [Say([*TEXT, 801, 802]), Gen(5)])
        cached = second.ends[0].usage.cached_tokens
        assert computed(harness) - before <= 1 + len(TEXT) + 2 + 5 - cached
        assert cached == 1 + len(TEXT) if can_truncate else cached > len(TEXT) // 2
        await harness.clean()


async def test_the_whole_text_again(autojump_clock: object) -> None:
    """Its last token is computed, for its logits."""
    async with controlling(PROGRAMS, engine()) as harness:
        await run(harness, [Say(TEXT), Gen(5)])
        again = await run(harness, [Say(TEXT), Gen(5)])
        assert again.ends[0].usage.cached_tokens == len(TEXT)
        await harness.clean()


async def test_a_prompt_and_a_text_share(autojump_clock: object) -> None:
    async with controlling(PROGRAMS, engine()) as harness:
        plain = harness.ask([START, *TEXT, 5], client := Client(), 5)
        await harness.done([plain])
        controlled = await run(harness, [Say([*TEXT, 6]), Gen(3)])
        assert controlled.ends[0].usage.cached_tokens == 1 + len(TEXT)
        plain = harness.ask([START, *TEXT, 7], client := Client(), 5)
        await harness.done([plain])
        assert client.ends[0].usage.cached_tokens == 1 + len(TEXT)
        await harness.clean()


async def test_nothing_is_shared_without_the_cache(autojump_clock: object) -> None:
    async with controlling(PROGRAMS, engine()) as harness:
        await run(harness, [Say(TEXT), Gen(5)])
        again = await run(harness, [Say(TEXT), Gen(5)], cache_prompt=False)
        assert again.ends[0].usage.cached_tokens == 0
        await harness.clean()


@LAYOUTS
async def test_many_answers_at_once_compute_the_text_once(autojump_clock: object, unified: bool) -> None:
    async with controlling(PROGRAMS, engine(unified)) as harness:
        scripts: list[Script] = [[Say([*TEXT, 801 + n]), Gen(5)] for n in range(4)]
        begun = [await begin(harness, script) for script in scripts]
        await harness.done(*[answers for _, answers in begun])
        for script, (client, _) in zip(scripts, begun, strict=True):
            assert by_path(client, client.tokens) == expected(script)
        cached = sorted(client.ends[0].usage.cached_tokens for client, _ in begun)
        assert cached == [0] + 3 * [1 + len(TEXT)]
        await harness.clean()


async def test_a_text_that_is_removed_meanwhile_is_not_shared(autojump_clock: object) -> None:
    async with controlling(PROGRAMS, engine()) as harness:
        scripts: list[Script] = [
            [Say(TEXT), Gen(2), Back(100, list(range(1, 90))), Gen(5)],
            [Say([*TEXT, 9]), Gen(5)],
            [Say([*TEXT[:250], *range(1, 60)]), Gen(5)],
        ]
        for pause_s in (0.0, 0.01, 0.05):
            begun = []
            for script in scripts:
                begun.append(await begin(harness, script))
                await trio.sleep(pause_s)
            await harness.done(*[answers for _, answers in begun])
            for script, (client, _) in zip(scripts, begun, strict=True):
                assert by_path(client, client.tokens) == expected(script)
        await harness.clean()
