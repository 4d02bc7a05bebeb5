"""Speculation makes streams faster and changes nothing else, over a fake engine in virtual time.

The fake model mostly repeats the token that it sampled twenty tokens before, so most draft tokens are accepted.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import EOG, FakeEngine, expected_continuation
from tests.support.profile import amount, sampled
from uma_trio.daemon.serving.speculation import MAX_DECODES_WITH_DRAFTS, MAX_DRAFTS
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.sampling import SamplingParams

REPEATS = 20
PROMPT = random.Random(2).choices(range(1, 900), k=50)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 12}

SAMPLING = pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
FAILURES = pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("killed")], ids=str)


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"repeats": REPEATS, "n_ctx": 32_768, **options})


def expected(prompt: list[int], n: int, **params: Any) -> list[int]:
    return expected_continuation(prompt, n, repeats=REPEATS, params=SamplingParams(**params))


def outcome(client: Client) -> tuple[Any, ...]:
    """Everything in the events of ``client``, except times and cached tokens."""
    last = client.last
    return client.tokens, client.text, last.reason, last.stop, last.usage.completion_tokens, last.text


def draft_tokens(harness: Harness) -> tuple[int, int]:
    """How many draft tokens were verified, and how many were accepted."""
    return harness.scheduler.telemetry.totals["draft_tokens"], harness.scheduler.telemetry.totals[
        "accepted_draft_tokens"
    ]


def n_steps(harness: Harness) -> int:
    """How many steps computed anything."""
    return sum(bool(step.calls) for step in harness.engine.steps)


# -- one stream ---------------------------------------------------------------------------------------


@SAMPLING
async def test_the_same_text_in_fewer_steps(autojump_clock, params):
    async with asking(engine()) as harness:
        plain = await harness.answer(PROMPT, 300, speculate=False, cache_prompt=False, **params)
        steps, plain_s = n_steps(harness), plain.answer.times.ended_at - plain.answer.times.arrived_at
        assert draft_tokens(harness) == (0, 0)
        assert plain.tokens == expected(PROMPT, 300, **params)
        assert steps == 300
        quick = await harness.answer(PROMPT, 300, speculate=True, cache_prompt=False, **params)
        assert outcome(quick) == outcome(plain)
        drafted, accepted = draft_tokens(harness)
        assert n_steps(harness) - steps == 300 - accepted
        assert 50 < accepted <= drafted
        assert quick.answer.times.ended_at - quick.answer.times.arrived_at < 0.9 * plain_s
        await harness.clean()


async def test_the_request_decides_about_speculation_or_else_the_config(autojump_clock):
    for setting, wanted, speculates in (
        (True, None, True),
        (True, False, False),
        (False, None, False),
        (False, True, True),
    ):
        async with asking(engine(), speculation=setting) as harness:
            client = await harness.answer(PROMPT, 200, **({} if wanted is None else {"speculate": wanted}))
            assert client.tokens == expected(PROMPT, 200)
            assert (draft_tokens(harness)[0] > 0) == speculates
            await harness.clean()


async def test_without_repetition_there_are_no_draft_tokens(autojump_clock):
    async with asking(engine(repeats=0)) as harness:
        client = await harness.answer(PROMPT, 300)
        assert client.tokens == expected_continuation(PROMPT, 300)
        assert draft_tokens(harness)[0] < 10
        assert n_steps(harness) >= 290
        await harness.clean()


async def test_speculation_stops_where_draft_tokens_keep_being_rejected(autojump_clock):
    """In the answer, other tokens follow each three tokens of the prompt."""
    async with asking(engine(repeats=0)) as harness:
        answer = expected_continuation(PROMPT, 0)
        chat = list(PROMPT)
        for n in range(0, 200, 4):
            answer = expected_continuation(PROMPT, n + 3)
            chat += [*answer[n : n + 3], 999]
        client = await harness.answer(chat, 50)
        assert client.tokens == expected_continuation(chat, 50)
        drafted, accepted = draft_tokens(harness)
        assert drafted - accepted < 30
        await harness.clean()


async def test_no_speculation_without_truncation(autojump_clock):
    async with asking(engine(can_truncate=False, checkpoints=0)) as harness:
        client = await harness.answer(PROMPT, 100, speculate=True)
        assert client.tokens == expected(PROMPT, 100)
        assert draft_tokens(harness) == (0, 0)
        await harness.clean()


# -- ends among draft tokens ----------------------------------------------------------------------------


@SAMPLING
@pytest.mark.parametrize("stream", sampled([True, False], 2))
async def test_a_stop_string_among_accepted_draft_tokens(autojump_clock, params, stream):
    """Tokens behind it are neither sent nor counted, and they leave the KV cache."""
    answer = expected(PROMPT, 200, **params)
    async with asking(engine()) as harness:
        for at in range(90, amount(quick=95, thorough=125)):
            stop = f" {answer[at]} {answer[at + 1]}"
            first = f"{' '.join(map(str, answer))} ".index(stop)
            fields = {"stop": [stop], "stream": stream, **params}
            plain = await harness.answer(PROMPT, 200, speculate=False, cache_prompt=False, **fields)
            quick = await harness.answer(PROMPT, 200, speculate=True, **fields)
            assert outcome(quick) == outcome(plain)
            assert quick.reason == "stop"
            text = quick.text if stream else quick.last.text
            assert text == f"{' '.join(map(str, answer))} "[:first]
            turn = [*PROMPT, *answer[: quick.last.usage.completion_tokens], 5]
            on = await harness.answer(turn, 5, speculate=False)
            assert on.tokens == expected(turn, 5)
            assert on.cached >= len(turn) - 2
        assert draft_tokens(harness)[1] > amount(quick=50, thorough=500)
        await harness.clean()


@pytest.mark.parametrize("ignore", sampled([False, True], 2))
async def test_an_end_token_behind_draft_tokens(autojump_clock, ignore):
    for eog_after in range(100, amount(quick=104, thorough=130)):
        async with asking(engine(eog_after=eog_after)) as harness:
            fields = {"ignore_eos": ignore, "cache_prompt": False}
            plain = await harness.answer(PROMPT, 120, speculate=False, **fields)
            quick = await harness.answer(PROMPT, 120, speculate=True, **fields)
            assert outcome(quick) == outcome(plain)
            assert quick.reason == ("length" if ignore else "stop")
            assert quick.last.usage.completion_tokens == (120 if ignore else eog_after - len(PROMPT) + 1)
            assert draft_tokens(harness)[1] > 10
            await harness.clean()


async def test_an_end_token_that_is_a_draft_token(autojump_clock):
    """As in a chat with similar answers, which all end with the same token."""
    found = 0
    for at in range(12, 20):
        chat = list(PROMPT)
        chat[-REPEATS + at] = EOG
        async with asking(engine()) as harness:
            plain = await harness.answer(chat, 100, speculate=False, cache_prompt=False)
            quick = await harness.answer(chat, 100, speculate=True, cache_prompt=False)
            assert outcome(quick) == outcome(plain)
            found += quick.reason == "stop" and draft_tokens(harness)[1] > 2
            await harness.clean()
    assert found > 3


@SAMPLING
async def test_max_tokens_from_1_to_60(autojump_clock, params):
    async with asking(engine()) as harness:
        answer = expected(PROMPT, 60, **params)
        for n in range(1, 61, amount(quick=4, thorough=1)):
            client = await harness.answer(PROMPT, n, speculate=True, **params)
            assert (client.tokens, client.reason, client.last.usage.completion_tokens) == (answer[:n], "length", n)
            harness.scheduler.check_integrity()
        await harness.clean()


@pytest.mark.parametrize("n_ctx", [64, 70, 90])
async def test_draft_tokens_stay_within_the_reserved_cells(autojump_clock, n_ctx):
    async with asking(engine(n_ctx=n_ctx, n_seq_max=1)) as harness:
        n = n_ctx - 30 + 1
        client = await harness.answer(PROMPT[:30], n, speculate=True)
        assert client.tokens == expected(PROMPT[:30], n)
        await harness.clean()


async def test_cancelled_at_any_moment(autojump_clock):
    async with asking(engine()) as harness:
        answer = expected(PROMPT, 500)
        for n in range(0, 40, amount(quick=3, thorough=1)):
            client = harness.ask(PROMPT, 500, speculate=True)
            await trio.sleep(0.2 + 0.0037 * n)
            harness.scheduler.cancel(client.answer)
            assert client.reason == "cancelled"
            assert 0 < len(client.tokens) < 500
            assert client.tokens == answer[: len(client.tokens)]
            await harness.clean()
            assert harness.engine.used_cells() == {}
        assert draft_tokens(harness)[1] > amount(quick=150, thorough=500)


async def test_a_client_that_does_not_read_for_a_while(autojump_clock):
    async with asking(engine()) as harness:
        client = harness.ask(PROMPT, 300, speculate=True)
        while not client.answer.done.is_set():
            await trio.sleep(0.05)
            client.has_room = False
            had = len(client.tokens)
            await trio.sleep(0.5)
            assert len(client.tokens) <= had + MAX_DRAFTS + 1, "one step was in flight"
            harness.read_on(client)
        assert client.tokens == expected(PROMPT, 300)
        await harness.clean()


@FAILURES
async def test_a_step_with_draft_tokens_fails(autojump_clock, failure):
    async with asking(engine()) as harness:
        for after_s in (0.2, 0.25, 0.31):
            paused, client = harness.ask(PROMPT, 100, speculate=True), harness.ask(PROMPT[1:], 300, speculate=True)
            await trio.sleep(after_s)
            paused.has_room = False
            await trio.sleep(0.1)
            harness.engine.fail_next = failure
            await harness.ended(client)
            assert client.tokens == expected(PROMPT[1:], 300)
            harness.read_on(paused)
            await harness.ended(paused)
            assert paused.tokens == expected(PROMPT, 100), "it is prefilled again, and speculation goes on"
            await harness.clean()


# -- several streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
@pytest.mark.parametrize("n", [2, 5, MAX_DECODES_WITH_DRAFTS])
async def test_streams_in_one_batch_do_not_affect_each_other(autojump_clock, n, unified):
    """With and without speculation, greedy and sampled, of different lengths."""
    async with asking(engine(unified=unified)) as harness:
        clients = []
        for i in range(n):
            params = {"temperature": 1.0, "seed": i} if i % 3 == 1 else {}
            clients.append((harness.ask(PROMPT[i:], 80 + 20 * i, speculate=i % 4 != 2, **params), params))
            await trio.sleep(0.03)
        for client, params in clients:
            await harness.ended(client)
            assert client.tokens == expected(client.prompt, client.answer.max_tokens, **params)
        assert draft_tokens(harness)[1] > 50
        await harness.clean()


async def test_no_speculation_in_a_wide_batch(autojump_clock):
    """See ``MAX_DECODES_WITH_DRAFTS``."""
    async with asking(engine(n_seq_max=MAX_DECODES_WITH_DRAFTS + 1)) as harness:
        clients = [harness.ask(PROMPT[i:], 200, speculate=True) for i in range(MAX_DECODES_WITH_DRAFTS + 1)]
        await trio.sleep(1)
        assert draft_tokens(harness) == (0, 0)
        harness.scheduler.cancel(clients[0].answer)
        await harness.ended(*clients)
        assert all(client.tokens == expected(client.prompt, 200) for client in clients[1:])
        assert draft_tokens(harness)[1] > amount(quick=100, thorough=500), "one stream has ended"
        await harness.clean()


async def test_prefill_of_others_between_steps_with_draft_tokens(autojump_clock):
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


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
async def test_only_tokens_that_were_sent_stay_in_the_cache(autojump_clock, unified):
    """No rejected draft tokens, and nothing behind a stop string.  Chats go on from there."""
    rng = random.Random(4)
    async with asking(engine(unified=unified, n_ctx=16_384, n_seq_max=16)) as harness:

        async def converse() -> None:
            chat = rng.choices(range(1, 900), k=30)
            for _ in range(10):
                params = {"temperature": 1.0, "seed": rng.randrange(100)} if rng.random() < 0.5 else {}
                n = rng.randint(1, 90)
                answer = expected(chat, n, **params)
                stop = [f" {rng.choice(answer)} "] if rng.random() < 0.4 else []
                client = harness.ask(chat, n, speculate=rng.choice([True, None]), stop=stop, **params)
                if rng.random() < 0.15:
                    await trio.sleep(rng.random())
                    harness.scheduler.cancel(client.answer)
                await harness.ended(client)
                harness.scheduler.check_integrity()
                assert client.tokens == answer[: len(client.tokens)]
                if client.reason == "length":
                    assert client.tokens == answer
                if client.reason != "cancelled":
                    chat = [*chat, *answer[: client.last.usage.completion_tokens]]
                chat = [*chat, *rng.choices(range(1, 900), k=rng.randint(1, 10))]

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_DECODES_WITH_DRAFTS - 1):
                nursery.start_soon(converse)
        telemetry = harness.scheduler.telemetry
        assert telemetry.totals["accepted_draft_tokens"] > 300
        assert telemetry.cached_tokens_total > 0.3 * telemetry.prompt_tokens_total
        assert set(telemetry.requests) == {"length", "stop", "cancelled"}
        await harness.clean()
