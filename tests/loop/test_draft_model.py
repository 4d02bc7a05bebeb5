"""A draft model makes streams faster and changes nothing else, over a fake engine in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import EOG, FakeEngine, expected_continuation
from tests.support.profile import amount
from tests.support.serving import serving
from uma_trio.client import Token
from uma_trio.daemon.serving.drafting import MAX_MISSING
from uma_trio.daemon.serving.speculation import MAX_DRAFTS
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.sampling import SamplingParams

PROMPT = random.Random(3).choices(range(1, 900), k=50)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 12}

SAMPLING = pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
FAILURES = pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("killed")], ids=str)


def engine(errors: int = 9, **options: Any) -> FakeEngine:
    return FakeEngine(**{"draft_errors": errors, "n_ctx": 32_768, **options})


def expected(prompt: list[int], n: int, **params: Any) -> list[int]:
    return expected_continuation(prompt, n, params=SamplingParams(**params))


def drafts(harness: Harness) -> tuple[int, int]:
    """How many tokens of the draft model were verified, and how many were accepted."""
    telemetry = harness.scheduler.telemetry
    return telemetry.totals["model_draft_tokens"], telemetry.totals["accepted_model_draft_tokens"]


def seconds(client: Client) -> float:
    ended = client.answer.times.ended_at
    assert ended is not None
    return ended - client.answer.times.arrived_at


# -- the text -----------------------------------------------------------------------------------------


@SAMPLING
async def test_the_same_text_in_less_time(autojump_clock, params):
    async with asking(engine()) as harness:
        plain = await harness.answer(PROMPT, 300, speculate=False, cache_prompt=False, **params)
        assert drafts(harness) == (0, 0)
        quick = await harness.answer(PROMPT, 300, cache_prompt=False, **params)
        assert quick.tokens == plain.tokens == expected(PROMPT, 300, **params)
        drafted, accepted = drafts(harness)
        assert 100 < accepted <= drafted
        assert seconds(quick) < 0.9 * seconds(plain)
        await harness.clean()


async def test_the_request_decides_about_speculation_or_else_the_config(autojump_clock):
    for setting, wanted, speculates in ((True, None, True), (True, False, False), (False, None, False)):
        async with asking(engine(), speculation=setting) as harness:
            client = await harness.answer(PROMPT, 100, **({} if wanted is None else {"speculate": wanted}))
            assert client.tokens == expected(PROMPT, 100)
            assert (drafts(harness)[0] > 0) == speculates
            await harness.clean()


async def test_prompt_lookup_goes_first_where_it_is_better(autojump_clock):
    async with asking(engine(errors=3, repeats=20)) as harness:
        client = await harness.answer(PROMPT, 300)
        assert client.tokens == expected_continuation(PROMPT, 300, repeats=20)
        from_model, accepted = drafts(harness)
        assert 0 < accepted <= from_model
        assert harness.scheduler.telemetry.totals["accepted_draft_tokens"] - accepted > 50
        await harness.clean()


async def test_a_model_that_is_always_wrong_costs_next_to_nothing(autojump_clock):
    """All of its tokens are wrong, on a device on which rows are expensive."""

    def slow(prompt: int, decodes: int) -> float:
        return 1 + 0.1 * prompt + 2.0 * decodes

    async with asking(engine(errors=1, cost_ms=slow)) as harness:
        others = [
            harness.ask([*PROMPT, n], 50, speculate=False) for n in range(4)
        ]  # from these it learns what rows cost
        for other in others:
            await other.answer.done.wait()
        plain = [await harness.answer(PROMPT, 250, speculate=False, cache_prompt=False) for _ in range(3)]
        quick = [await harness.answer(PROMPT, 250, cache_prompt=False) for _ in range(3)]
        assert [client.tokens for client in quick] == [expected(PROMPT, 250)] * 3
        assert sum(map(seconds, plain)) > 0.98 * sum(map(seconds, quick))
        await harness.clean()


async def test_four_streams(autojump_clock):
    prompts = [random.Random(n).choices(range(1, 900), k=40 + n) for n in range(4)]
    async with asking(engine()) as harness:
        clients = [harness.ask(prompt, 200, **(SAMPLED if n % 2 else {})) for n, prompt in enumerate(prompts)]
        for client in clients:
            await client.answer.done.wait()
        for n, client in enumerate(clients):
            assert client.tokens == expected(prompts[n], 200, **(SAMPLED if n % 2 else {}))
        assert drafts(harness)[1] > 200
        await harness.clean()


@pytest.mark.parametrize("eog_after", range(60, amount(quick=66, thorough=75)))
async def test_an_end_among_draft_tokens(autojump_clock, eog_after):
    async with asking(engine(errors=0, eog_after=eog_after)) as harness:
        client = await harness.answer(PROMPT, 100)
        assert client.reason == "stop"
        assert client.tokens == [*expected(PROMPT, eog_after - len(PROMPT)), EOG][: len(client.tokens)]
        assert client.last.usage.completion_tokens == eog_after - len(PROMPT) + 1
        await harness.clean()


async def test_drafts_never_exceed_the_answer(autojump_clock):
    async with asking(engine(errors=0)) as harness:
        for n in range(1, 40):
            client = await harness.answer(PROMPT, n)
            assert client.tokens == expected(PROMPT, n)
            assert client.reason == "length"
        await harness.clean()


@SAMPLING
async def test_penalties_biases_and_logprobs(autojump_clock, params):
    fields = {"frequency_penalty": 0.5, "logprobs": True, "logit_bias": {17: -100.0}, **params}
    async with asking(engine(errors=0)) as harness:
        plain = await harness.answer(PROMPT, 100, speculate=False, cache_prompt=False, **fields)
        quick = await harness.answer(PROMPT, 100, cache_prompt=False, **fields)
        assert quick.tokens == plain.tokens
        assert [e.logprob for e in quick.events[:-1]] == [e.logprob for e in plain.events[:-1]]
        assert drafts(harness)[1] > 10
        await harness.clean()


async def test_drafts_follow_the_first_token_of_an_answer(autojump_clock):
    async with asking(engine(errors=0)) as harness:
        client = await harness.answer(PROMPT, 1 + 2 * (MAX_DRAFTS + 1))
        assert client.reason == "length"
        assert len(harness.engine.steps) <= 4, "the prompt, two steps with drafts, and perhaps a last token"
        await harness.clean()


async def test_steps_with_drafts_run_ahead(autojump_clock):
    async with asking(engine(errors=4)) as harness:
        client = await harness.answer(PROMPT, 300)
        assert client.tokens == expected(PROMPT, 300)
        telemetry = harness.scheduler.telemetry
        assert telemetry.run_ahead_steps_total > 0.8 * len(harness.engine.steps)
        await harness.clean()


async def test_the_next_turn_goes_on_from_what_the_draft_model_holds(autojump_clock):
    async with asking(engine(errors=5)) as harness:
        turn = list(PROMPT)
        for n in range(4):
            client = await harness.answer(turn, 60)
            assert client.tokens == expected(turn, 60)
            first = next(each for inputs in harness.engine.draft_inputs for each in inputs)
            assert first.position >= (len(PROMPT) + 50) * bool(n)
            harness.engine.draft_inputs.clear()
            turn = [*turn, *client.tokens, 5, 6, 7]
        assert drafts(harness)[1] > 60
        await harness.clean()


@SAMPLING
@pytest.mark.parametrize("late_masks", [0, 5])
async def test_drafts_respect_the_constraint(autojump_clock, params, late_masks):
    """Drafts that the constraint forbids are rejected, also where a mask is late."""
    fields = {"prompt": "hello", "constraint": {"regex": "([1-8][0-9]{2} ){60}7 "}, "max_tokens": 80, **params}
    async with serving(engine(errors=0)) as harness:
        async with harness.client() as client:
            plain = await client.complete(speculate=False, keep_alive=True, **fields)
            harness.engine.late_grammar_masks = late_masks
            quick = await client.complete(**fields)
        assert quick.text == plain.text
        assert len(quick.text.split()) == 61
        assert harness.scheduler.telemetry.totals["model_draft_tokens"] > 0
        await harness.settled()


async def test_several_answers_of_one_request(autojump_clock):
    async with serving(engine(errors=7)) as harness:
        fields = {"prompt": "a prompt that is shared", "max_tokens": 80, "temperature": 1.0}
        texts: dict[int, str] = {}
        async with harness.client() as client:
            async for event in client.generate(n=4, seed=7, **fields):
                if isinstance(event, Token):
                    assert event.index is not None
                    texts[event.index] = texts.get(event.index, "") + event.text
        for n in range(4):
            async with harness.client() as client:
                alone = await client.complete(seed=7 + n, speculate=False, cache_prompt=False, **fields)
            assert texts[n] == alone.text
        assert harness.scheduler.telemetry.totals["accepted_model_draft_tokens"] > 50
        await harness.settled()


# -- what the draft model lacks -------------------------------------------------------------------------


async def test_it_catches_up_in_parts(autojump_clock):
    """A long prompt is computed by the draft model some tokens a step; the stream goes on."""
    prompt = random.Random(5).choices(range(1, 900), k=1000)
    async with asking(engine(draft_ms=0.1)) as harness:
        client = await harness.answer(prompt, 400)
        assert client.tokens == expected(prompt, 400)
        parts = [each for inputs in harness.engine.draft_inputs for each in inputs if not each.n_drafts]
        assert sum(len(each.tokens) for each in parts) >= 1000 - MAX_MISSING
        assert max(len(each.tokens) for each in parts) <= harness.engine.info.draft_batch
        assert drafts(harness)[1] > 100
        await harness.clean()


async def test_a_short_answer_is_not_worth_a_long_prompt(autojump_clock):
    prompt = random.Random(5).choices(range(1, 900), k=1000)
    async with asking(engine(draft_ms=5.0)) as harness:
        client = await harness.answer(prompt, 10)
        assert client.tokens == expected(prompt, 10)
        assert not harness.engine.draft_inputs
        await harness.clean()


async def test_no_drafts_behind_the_context_of_the_draft_model(autojump_clock):
    async with asking(engine(errors=0, draft_ctx=80)) as harness:
        client = await harness.answer(PROMPT, 100)
        assert client.tokens == expected(PROMPT, 100)
        assert 0 < drafts(harness)[1] <= 30
        await harness.clean()


async def test_what_the_draft_model_has_lost_is_computed_again(autojump_clock):
    async with asking(engine(errors=0)) as harness:
        client = harness.ask(PROMPT, 200)
        await trio.sleep(0.1)
        before = drafts(harness)[1]
        harness.engine.drafted.clear()
        await client.answer.done.wait()
        assert client.tokens == expected(PROMPT, 200)
        assert drafts(harness)[1] > before + 50
        await harness.clean()


async def test_a_failed_draft_costs_drafts_and_nothing_else(autojump_clock):
    async with asking(engine(errors=0)) as harness:
        harness.engine.draft_failure = "no memory"
        client = await harness.answer(PROMPT, 200)
        assert client.tokens == expected(PROMPT, 200)
        assert drafts(harness) == (0, 0)
        again = await harness.answer(PROMPT, 200)
        assert again.tokens == expected(PROMPT, 200)
        assert drafts(harness)[1] > 50
        await harness.clean()


# -- failures -------------------------------------------------------------------------------------------


@SAMPLING
@FAILURES
async def test_a_failure_of_the_engine_in_the_middle(autojump_clock, params, failure):
    async with asking(engine()) as harness:
        client = harness.ask(PROMPT, 200, **params)
        await trio.sleep(0.25)
        assert drafts(harness)[0]
        harness.engine.fail_next = failure
        await client.answer.done.wait()
        assert client.tokens == expected(PROMPT, 200, **params)
        await harness.clean()


async def test_cancelling_at_any_time(autojump_clock):
    for n in range(1, 30):
        async with asking(engine()) as harness:
            client = harness.ask(PROMPT, 200)
            await trio.sleep(0.004 * n)
            harness.scheduler.cancel(client.answer)
            again = await harness.answer([*PROMPT, 3], 50)
            assert again.tokens == expected([*PROMPT, 3], 50)
            assert client.tokens == expected(PROMPT, len(client.tokens))
            await harness.clean()


@pytest.mark.parametrize("seed", range(amount(quick=8, thorough=500)))
async def test_anything_at_any_time(autojump_clock, seed):
    """Clients come, leave, stall and stop at strings while the engine fails; all get the text without drafts."""
    rng = random.Random(seed)
    options = {"eog_after": rng.choice([None, 90]), "repeats": rng.choice([0, 20]), "unified": rng.random() < 0.5}
    async with asking(engine(errors=rng.choice([0, 3, 9]), **options)) as harness:
        asked: list[tuple[Client, dict[str, Any]]] = []
        for _ in range(12):
            params = {"temperature": 1.0, "seed": rng.randrange(9)} if rng.random() < 0.5 else {}
            prompt = rng.choice([PROMPT, PROMPT[:30], rng.choices(range(1, 900), k=rng.randrange(1, 150))])
            asked.append((harness.ask(prompt, rng.choice([1, 2, 17, 40, 150]), **params), params))
            await trio.sleep(rng.choice([0.0, 0.004, 0.013, 0.05]))
            client, _ = rng.choice(asked)
            match rng.randrange(8):
                case 0:
                    harness.scheduler.cancel(client.answer)
                case 1:
                    client.has_room = False
                case 2:
                    harness.engine.fail_next = rng.choice([EngineError("no room"), EngineDied("killed")])
                case 3:
                    harness.engine.drafted.clear()
        await trio.sleep(0.05)
        for client, _ in asked:
            harness.read_on(client)
        for client, params in asked:
            await harness.ended(client)
            plain = expected_continuation(
                client.prompt, 150, repeats=options["repeats"], params=SamplingParams(**params)
            )
            got = client.tokens[:-1] if client.reason == "stop" else client.tokens
            assert got == plain[: len(got)]
            assert client.reason in ("stop", "length", "cancelled", "E_RUNTIME_DECODE"), (
                "the last: it was alone in two failures"
            )
        await harness.clean()


async def test_drafts_are_bounded(autojump_clock):
    async with asking(engine(errors=0)) as harness:
        await harness.answer(PROMPT, 300)
        drafts = [each.n_drafts for inputs in harness.engine.draft_inputs for each in inputs]
        assert 8 < max(drafts) <= MAX_DRAFTS
        await harness.clean()
