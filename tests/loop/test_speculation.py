"""Guesses make a stream quicker and change nothing else: not a token, not a count, not an end.

The model here mostly repeats what it said twenty tokens before, so that guesses come true, and now and then
says something else.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from uma_trio.scheduler.guessing import GUESSES_UP_TO, MOST_GUESSES

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import EOG, FakeEngine, expected_continuation
from uma_trio.engine.messages import EngineError
from uma_trio.sampling import SamplingParams

REPEATS = 20
PROMPT = random.Random(2).choices(range(1, 900), k=50)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 12}

DRAWS = pytest.mark.parametrize("samples", [{}, SAMPLED], ids=["greedy", "sampled"])


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"repeats": REPEATS, "n_ctx": 32_768, **options})


def expected(prompt: list[int], n: int, **samples: Any) -> list[int]:
    return expected_continuation(prompt, n, repeats=REPEATS, params=SamplingParams(**samples))


def outcome(client: Client) -> tuple[Any, ...]:
    """All that a client is told, but for times and what was cached."""
    last = client.last
    return client.tokens, client.text, last.reason, last.stop, last.usage.completion_tokens, last.text


def n_guesses(harness: Harness) -> tuple[int, int]:
    """Checked, and come true."""
    return harness.scheduler.telemetry.draft_tokens_total, harness.scheduler.telemetry.accepted_draft_tokens_total


def n_steps(harness: Harness) -> int:
    """Those that computed anything."""
    return sum(bool(step.calls) for step in harness.engine.steps)


# -- one stream ---------------------------------------------------------------------------------------


@DRAWS
async def test_the_text_is_the_same_in_fewer_steps(autojump_clock, samples):
    async with asking(engine()) as harness:
        plain = await harness.answer(PROMPT, 300, speculate=False, cache_prompt=False, **samples)
        steps, took_s = n_steps(harness), plain.sequence.ended_at - plain.sequence.arrived_at
        assert n_guesses(harness) == (0, 0)
        assert plain.tokens == expected(PROMPT, 300, **samples)
        assert steps == 300
        quick = await harness.answer(PROMPT, 300, speculate=True, cache_prompt=False, **samples)
        assert outcome(quick) == outcome(plain)
        drafted, accepted = n_guesses(harness)
        assert n_steps(harness) - steps == 300 - accepted
        assert 50 < accepted <= drafted
        assert quick.sequence.ended_at - quick.sequence.arrived_at < 0.9 * took_s
        await harness.clean()


async def test_who_guesses(autojump_clock):
    """The request says; if it says nothing, the settings."""
    for setting, wish, guesses in ((True, None, True), (True, False, False), (False, None, False), (False, True, True)):
        async with asking(engine(), speculation=setting) as harness:
            client = await harness.answer(PROMPT, 200, **({} if wish is None else {"speculate": wish}))
            assert client.tokens == expected(PROMPT, 200)
            assert (n_guesses(harness)[0] > 0) == guesses
            await harness.clean()


async def test_nothing_is_guessed_where_nothing_repeats(autojump_clock):
    async with asking(engine(repeats=0)) as harness:
        client = await harness.answer(PROMPT, 300)
        assert client.tokens == expected_continuation(PROMPT, 300)
        assert n_guesses(harness)[0] < 10
        assert n_steps(harness) >= 290
        await harness.clean()


async def test_guesses_that_keep_being_wrong_are_given_up(autojump_clock):
    """Each three tokens of the question are followed by something else in the answer."""
    async with asking(engine(repeats=0)) as harness:
        answer = expected_continuation(PROMPT, 0)
        story = list(PROMPT)
        for n in range(0, 200, 4):
            answer = expected_continuation(PROMPT, n + 3)
            story += [*answer[n : n + 3], 999]
        client = await harness.answer(story, 50)
        assert client.tokens == expected_continuation(story, 50)
        drafted, accepted = n_guesses(harness)
        assert drafted - accepted < 30
        await harness.clean()


async def test_a_model_that_cannot_forget_does_not_guess(autojump_clock):
    model = engine()
    model.info = msgspec.structs.replace(model.info, can_truncate=False)
    async with asking(model) as harness:
        client = await harness.answer(PROMPT, 100, speculate=True)
        assert client.tokens == expected(PROMPT, 100)
        assert n_guesses(harness) == (0, 0)
        await harness.clean()


# -- ends among guesses -------------------------------------------------------------------------------


@DRAWS
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_among_guesses_that_came_true(autojump_clock, samples, stream):
    """What was computed behind it is not told, not counted, and does not stay in the cache as if it had been."""
    said = expected(PROMPT, 200, **samples)
    async with asking(engine()) as harness:
        for at in range(90, 125):
            stop = f" {said[at]} {said[at + 1]}"
            first = f"{' '.join(map(str, said))} ".index(stop)
            fields = {"stop": [stop], "stream": stream, **samples}
            plain = await harness.answer(PROMPT, 200, speculate=False, cache_prompt=False, **fields)
            quick = await harness.answer(PROMPT, 200, speculate=True, **fields)
            assert outcome(quick) == outcome(plain)
            assert quick.reason == "stop"
            text = quick.text if stream else quick.last.text
            assert text == f"{' '.join(map(str, said))} "[:first]
            told = [*PROMPT, *said[: quick.last.usage.completion_tokens], 5]
            on = await harness.answer(told, 5, speculate=False)
            assert on.tokens == expected(told, 5)
            assert on.cached >= len(told) - 2
        assert n_guesses(harness)[1] > 500
        await harness.clean()


@pytest.mark.parametrize("ignore", [False, True])
async def test_the_end_of_generation_among_guesses(autojump_clock, ignore):
    for eog_after in range(100, 130):
        async with asking(engine(eog_after=eog_after)) as harness:
            fields = {"ignore_eos": ignore, "cache_prompt": False}
            plain = await harness.answer(PROMPT, 120, speculate=False, **fields)
            quick = await harness.answer(PROMPT, 120, speculate=True, **fields)
            assert outcome(quick) == outcome(plain)
            assert quick.reason == ("length" if ignore else "stop")
            assert quick.last.usage.completion_tokens == (120 if ignore else eog_after - len(PROMPT) + 1)
            assert n_guesses(harness)[1] > 10
            await harness.clean()


async def test_an_end_that_was_guessed_itself(autojump_clock):
    """As in a chat whose answers are alike: each ends with the same token."""
    found = 0
    for at in range(12, 20):
        story = list(PROMPT)
        story[-REPEATS + at] = EOG
        async with asking(engine()) as harness:
            plain = await harness.answer(story, 100, speculate=False, cache_prompt=False)
            quick = await harness.answer(story, 100, speculate=True, cache_prompt=False)
            assert outcome(quick) == outcome(plain)
            found += quick.reason == "stop" and n_guesses(harness)[1] > 2
            await harness.clean()
    assert found > 3


@DRAWS
async def test_any_number_of_tokens(autojump_clock, samples):
    async with asking(engine()) as harness:
        said = expected(PROMPT, 60, **samples)
        for n in range(1, 61):
            client = await harness.answer(PROMPT, n, speculate=True, **samples)
            assert (client.tokens, client.reason, client.last.usage.completion_tokens) == (said[:n], "length", n)
            harness.scheduler.check_integrity()
        await harness.clean()


@pytest.mark.parametrize("n_ctx", [64, 70, 90])
async def test_guesses_stay_within_the_room_that_was_reserved(autojump_clock, n_ctx):
    """To the last cell."""
    async with asking(engine(n_ctx=n_ctx, n_seq_max=1)) as harness:
        n = n_ctx - 30 + 1
        client = await harness.answer(PROMPT[:30], n, speculate=True)
        assert client.tokens == expected(PROMPT[:30], n)
        await harness.clean()


async def test_cancelled_at_any_moment(autojump_clock):
    async with asking(engine()) as harness:
        said = expected(PROMPT, 500)
        for n in range(40):
            client = harness.ask(PROMPT, 500, speculate=True)
            await trio.sleep(0.2 + 0.0037 * n)
            harness.scheduler.cancel(client.sequence)
            assert client.reason == "cancelled"
            assert 0 < len(client.tokens) < 500
            assert client.tokens == said[: len(client.tokens)]
            await harness.clean()
            assert harness.engine.used_cells() == {}
        assert n_guesses(harness)[1] > 500


async def test_a_client_that_does_not_read_for_a_while(autojump_clock):
    async with asking(engine()) as harness:
        client = harness.ask(PROMPT, 300, speculate=True)
        while not client.sequence.done.is_set():
            await trio.sleep(0.05)
            client.has_room = False
            had = len(client.tokens)
            await trio.sleep(0.5)
            assert len(client.tokens) <= had + MOST_GUESSES + 1, "one step was under way"
            harness.read_on(client)
        assert client.tokens == expected(PROMPT, 300)
        await harness.clean()


@pytest.mark.parametrize("fatal", [True, False])
async def test_a_step_with_guesses_fails(autojump_clock, fatal):
    async with asking(engine()) as harness:
        for after_s in (0.2, 0.25, 0.31):
            paused, client = harness.ask(PROMPT, 100, speculate=True), harness.ask(PROMPT[1:], 300, speculate=True)
            await trio.sleep(after_s)
            paused.has_room = False
            await trio.sleep(0.1)
            harness.engine.fail_next = EngineError("gone")
            await harness.ended(client)
            assert client.reason == "E_RUNTIME_DECODE"
            harness.read_on(paused)
            await harness.ended(paused)
            assert paused.tokens == expected(PROMPT, 100), "it was computed again, and guessed on"
            await harness.clean()


# -- several streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])
@pytest.mark.parametrize("n", [2, 5, GUESSES_UP_TO])
async def test_streams_together_are_what_they_are_alone(autojump_clock, n, unified):
    """Some guess and some do not, some draw, and they end at different times."""
    async with asking(engine(unified=unified)) as harness:
        clients = []
        for i in range(n):
            samples = {"temperature": 1.0, "seed": i} if i % 3 == 1 else {}
            clients.append((harness.ask(PROMPT[i:], 80 + 20 * i, speculate=i % 4 != 2, **samples), samples))
            await trio.sleep(0.03)
        for client, samples in clients:
            await harness.ended(client)
            assert client.tokens == expected(client.prompt, client.sequence.max_tokens, **samples)
        assert n_guesses(harness)[1] > 50
        await harness.clean()


async def test_beside_many_streams_nobody_guesses(autojump_clock):
    """The search would be between two steps, and a wide batch has little to gain."""
    async with asking(engine(n_seq_max=GUESSES_UP_TO + 1)) as harness:
        clients = [harness.ask(PROMPT[i:], 200, speculate=True) for i in range(GUESSES_UP_TO + 1)]
        await trio.sleep(1)
        assert n_guesses(harness) == (0, 0)
        harness.scheduler.cancel(clients[0].sequence)
        await harness.ended(*clients)
        assert all(client.tokens == expected(client.prompt, 200) for client in clients[1:])
        assert n_guesses(harness)[1] > 100, "one has gone"
        await harness.clean()


async def test_prompts_of_others_come_in_between(autojump_clock):
    async with asking(engine()) as harness:
        stream = harness.ask(PROMPT, 400, speculate=True)
        others = []
        for i in range(8):
            await trio.sleep(0.1)
            others.append(harness.ask(random.Random(i).choices(range(1, 900), k=700), 5))
        await harness.ended(stream, *others)
        assert stream.tokens == expected(PROMPT, 400)
        assert all(client.tokens == expected(client.prompt, 5) for client in others)
        await harness.clean()


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])
async def test_chats_that_guess_are_kept_and_gone_on_with(autojump_clock, unified):
    """What stays in the cache is what was told: no guess that was wrong, nothing behind a stop string."""
    chance = random.Random(4)
    async with asking(engine(unified=unified, n_ctx=16_384, n_seq_max=16)) as harness:

        async def converse() -> None:
            story = chance.choices(range(1, 900), k=30)
            for _ in range(10):
                samples = {"temperature": 1.0, "seed": chance.randrange(100)} if chance.random() < 0.5 else {}
                n = chance.randint(1, 90)
                said = expected(story, n, **samples)
                stop = [f" {chance.choice(said)} "] if chance.random() < 0.4 else []
                client = harness.ask(story, n, speculate=chance.choice([True, None]), stop=stop, **samples)
                if chance.random() < 0.15:
                    await trio.sleep(chance.random())
                    harness.scheduler.cancel(client.sequence)
                await harness.ended(client)
                harness.scheduler.check_integrity()
                assert client.tokens == said[: len(client.tokens)]
                if client.reason == "length":
                    assert client.tokens == said
                if client.reason != "cancelled":
                    story = [*story, *said[: client.last.usage.completion_tokens]]
                story = [*story, *chance.choices(range(1, 900), k=chance.randint(1, 10))]

        async with trio.open_nursery() as nursery:
            for _ in range(GUESSES_UP_TO - 1):
                nursery.start_soon(converse)
        telemetry = harness.scheduler.telemetry
        assert telemetry.accepted_draft_tokens_total > 300
        assert telemetry.cached_tokens_total > 0.3 * telemetry.prompt_tokens_total
        assert set(telemetry.requests) == {"length", "stop", "cancelled"}
        await harness.clean()
