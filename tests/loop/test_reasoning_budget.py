"""A budget of reasoning, over a fake engine in virtual time: which tokens come, and that nothing else changes them.

The fake engine's tokens are numbers.  ``END`` is two of them, which the model itself never chooses here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.asking import asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount, sampled
from tests.support.serving import serving
from uma_trio.client import Eos, Reasoning, Token
from uma_trio.daemon.text.budget import ReasoningLimit
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.models.markers import ReasoningMarkers

PROMPT = random.Random(4).choices(range(1, 900), k=50)
BUDGET, N = 30, 90
END = [220, 221]
SPELLED = "220 221"
OPEN = ReasoningMarkers(begin=("222",), end=(SPELLED,), opened_by=("",))
"""The markers of a model whose prompt always begins the reasoning."""
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 12}


def limit(n_tokens: int = BUDGET, markers: ReasoningMarkers = OPEN) -> ReasoningLimit:
    return ReasoningLimit(n_tokens=n_tokens, end=END, markers=markers)


def budgeted(n: int = N, n_tokens: int = BUDGET, **options: Any) -> list[int]:
    """An answer to ``PROMPT`` whose reasoning is ended after ``n_tokens``."""
    thought = [*expected_continuation(PROMPT, n_tokens, **options), *END]
    return (thought + expected_continuation(PROMPT + thought, max(0, n - len(thought)), **options))[:n]


# -- which tokens come --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"unified": False}, {"can_truncate": False}], ids=str)
@pytest.mark.parametrize("n_tokens", [1, 2, BUDGET])
async def test_the_end_follows_after_the_budget_and_the_answer_goes_on(autojump_clock, options, n_tokens):
    async with asking(FakeEngine(**options)) as harness:
        client = await harness.answer(PROMPT, N, limit=limit(n_tokens))
        assert client.tokens == budgeted(n_tokens=n_tokens)
        assert client.last.usage.completion_tokens == N
        await harness.clean()


@pytest.mark.parametrize("n", [BUDGET, BUDGET + 1, BUDGET + 2])
async def test_max_tokens_counts_the_end_too(autojump_clock, n):
    async with asking() as harness:
        client = await harness.answer(PROMPT, n, limit=limit())
        assert (client.tokens, client.reason) == (budgeted(n), "length")
        await harness.clean()


async def test_a_budget_that_is_not_used_up_changes_nothing(autojump_clock):
    ids = expected_continuation(PROMPT, N)
    ended = ReasoningMarkers(begin=("222",), end=(str(ids[20]),), opened_by=("",))
    never = ReasoningMarkers(begin=("222",), end=(SPELLED,))
    async with asking() as harness:
        for markers, n_tokens in ((OPEN, N), (ended, 21), (never, 0)):
            client = await harness.answer(PROMPT, N, limit=limit(n_tokens, markers))
            assert client.tokens == ids
        await harness.clean()


async def test_without_reasoning_steps_run_ahead_as_always(autojump_clock):
    never = ReasoningMarkers(begin=("222",), end=(SPELLED,))
    ran_ahead = []
    for given in (None, limit(0, never)):
        async with asking() as harness:
            await harness.answer(PROMPT, N, limit=given)
            ran_ahead.append(harness.scheduler.telemetry.run_ahead_steps_total)
            await harness.clean()
    assert ran_ahead[0] - 2 <= ran_ahead[1] <= ran_ahead[0], "only the first token may begin reasoning"


async def test_all_stretches_of_reasoning_have_one_budget(autojump_clock):
    ids = expected_continuation(PROMPT, 6)
    markers = ReasoningMarkers(begin=(f"{ids[0]} ", f"{ids[5]} "), end=(str(ids[3]), SPELLED), repeats=True)
    async with asking() as harness:
        client = await harness.answer(PROMPT, 20, limit=limit(4, markers))
        first = [*ids[:6], *expected_continuation(PROMPT + ids, 2), *END]  # two tokens of the budget were used before
        assert client.tokens[: len(first)] == first
        await harness.clean()


async def test_forced_tokens_have_no_log_probability(autojump_clock):
    async with asking() as harness:
        client = await harness.answer(PROMPT, N, limit=limit(), logprobs=0)
        tokens = [event for event in client.events if isinstance(event, Token)]
        assert [event.token_id for event in tokens if event.logprob is None] == END
        assert [event.token_id for event in tokens] == budgeted()
        whole = await harness.answer(PROMPT, N, limit=limit(), logprobs=0, stream=False)
        assert [each.token_id for each in whole.last.logprobs] == [token for token in budgeted() if token not in END]
        await harness.clean()


# -- the same text however it is computed -------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options", sampled([{"repeats": 20}, {"draft_errors": 9}, {"repeats": 20, "draft_errors": 9}], 3), ids=str
)
async def test_draft_tokens_never_overrun_the_budget(autojump_clock, options, params):
    async with asking(FakeEngine(n_ctx=32_768, **options)) as harness:
        for n_tokens in range(60, 75, amount(quick=4, thorough=1)):
            request = {"limit": limit(n_tokens), "cache_prompt": False, **params}
            plain = await harness.answer(PROMPT, 150, speculate=False, **request)
            quick = await harness.answer(PROMPT, 150, speculate=True, **request)
            assert quick.tokens == plain.tokens
            assert plain.tokens[n_tokens : n_tokens + 2] == END
        telemetry = harness.scheduler.telemetry
        assert telemetry.totals["accepted_draft_tokens"] + telemetry.totals["accepted_model_draft_tokens"] > 30
        await harness.clean()


@pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("killed")], ids=str)
@pytest.mark.parametrize("n", [BUDGET - 2, BUDGET - 1, BUDGET, BUDGET + 2, BUDGET + 3])
async def test_a_failure_of_the_engine_changes_no_text(autojump_clock, n, failure):
    async with asking() as harness:
        client, other = harness.ask(PROMPT, N, limit=limit()), harness.ask([7], N)
        await client.reached(n)
        harness.engine.fail_next = failure
        await harness.ended(client, other)
        assert client.tokens == budgeted()
        assert other.tokens == expected_continuation([7], N)
        assert harness.engine.resets >= 1
        await harness.clean()


@pytest.mark.parametrize("options", [{}, {"unified": False}, {"can_truncate": False}], ids=str)
async def test_a_stream_that_loses_its_place_has_the_same_text(autojump_clock, options):
    def cost_ms(prompt: int, decodes: int) -> float:
        return 1 + 0.5 * prompt + 50 * decodes

    async with asking(FakeEngine(n_seq_max=1, n_ctx=8000, cost_ms=cost_ms, **options)) as harness:
        long = harness.ask(PROMPT, N, principal="greedy", limit=limit())
        while not long.answer.done.is_set():
            visitor = await harness.answer([9], 2, principal="visitor")
            assert visitor.tokens == expected_continuation([9], 2)
        assert harness.scheduler.telemetry.preemptions_total >= 3
        assert long.tokens == budgeted()
        await harness.clean()


async def test_in_a_crowd_as_alone(autojump_clock):
    async with asking() as harness:
        crowd = [harness.ask(PROMPT, N, limit=limit(n), principal=f"uid:{n % 3}") for n in range(1, 12)]
        await harness.ended(*crowd)
        assert [client.tokens for client in crowd] == [budgeted(n_tokens=n) for n in range(1, 12)]
        await harness.clean()


# -- over the socket ----------------------------------------------------------------------------------

TEXT = "a prompt"
BYTES = [byte + 100 for byte in TEXT.encode()]
IDS = expected_continuation(BYTES, 12)
MARKERS = ReasoningMarkers(begin=(f"{IDS[0]} ",), end=(SPELLED,), opened_by=("|think",), closed_by="xy")
"""``xy`` is ``END`` to the fake tokenizer."""


async def ask(harness: Any, **fields: Any) -> tuple[list[int], str, str, Eos]:
    """The tokens, the reasoning and the text of one answer, and its last event."""
    request = {"prompt": TEXT, "max_tokens": 12, "separate_reasoning": True, "reasoning_budget": 3, **fields}
    async with harness.client() as client:
        events = [event async for event in client.generate(**request)]
    assert isinstance(events[-1], Eos)
    tokens = [event.token_id for event in events[:-1] if event.token_id is not None]
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return tokens, reasoning, "".join(event.text for event in events if isinstance(event, Token)), events[-1]


def words(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


@pytest.mark.parametrize("n_tokens", [0, 1, 3])
async def test_the_region_ends_and_usage_counts_the_end(autojump_clock, n_tokens):
    thought = [*IDS[: 1 + n_tokens], *END]
    answer = expected_continuation(BYTES + thought, 12 - len(thought))
    async with serving(reasoning=MARKERS) as harness:
        tokens, reasoning, text, eos = await ask(harness, reasoning_budget=n_tokens)
        assert tokens == thought + answer
        assert (reasoning, text) == (words(IDS[1 : 1 + n_tokens]).strip(), words(answer))
        assert (eos.usage.completion_tokens, eos.usage.reasoning_tokens) == (12, len(thought))
        _, reasoning, text, eos = await ask(harness, reasoning_budget=n_tokens, separate_reasoning=False)
        assert (reasoning, text) == ("", words(thought + answer)), "the limit does not depend on how the text is sent"
        await harness.settled()


async def test_a_prompt_that_has_begun_the_reasoning_ends_it_with_a_budget_of_0(autojump_clock):
    prompt = f"{TEXT}|think"
    known = [byte + 100 for byte in f"{prompt}xy".encode()]
    async with serving(reasoning=MARKERS) as harness:
        tokens, reasoning, text, eos = await ask(harness, prompt=prompt, reasoning_budget=0)
        assert tokens == expected_continuation(known, 12)
        assert (reasoning, text) == ("", words(tokens))
        assert (eos.usage.prompt_tokens, eos.usage.reasoning_tokens) == (len(known), 0)
        await harness.settled()


async def test_each_of_several_answers_has_the_whole_budget(autojump_clock):
    async with serving(reasoning=MARKERS) as harness, harness.client() as client:
        request = {"prompt": f"{TEXT}|think", "max_tokens": 12, "temperature": 1.0, "reasoning_budget": 3}
        found = await client.choices(n=3, seed=7, separate_reasoning=True, **request)
        assert [len((eos.reasoning or "").split()) for eos in found] == [3, 3, 3]
        assert len({eos.text for eos in found}) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_counts_after_the_forced_end(autojump_clock, stream):
    thought = [*IDS[:4], *END]
    answer = expected_continuation(BYTES + thought, 6)
    async with serving(reasoning=MARKERS) as harness:
        *_, text, eos = await ask(harness, stop=[str(IDS[2]), str(answer[2])], stream=stream)
        assert (eos.text or text, eos.stop) == (words(answer[:2]), str(answer[2]))
        await harness.settled()


async def test_a_constraint_applies_after_the_forced_end(autojump_clock):
    async with serving(reasoning=MARKERS) as harness:
        tokens, reasoning, text, eos = await ask(harness, constraint={"regex": "7 8 9 "}, max_tokens=40)
        assert tokens[:6] == [*IDS[:4], *END]
        assert (reasoning, text.strip(), eos.reason) == (words(IDS[1:4]).strip(), "7 8 9", "stop")
        assert eos.constraint_complete
        await harness.settled()


@pytest.mark.parametrize(
    "fields",
    [{"separate_reasoning": False, "constraint": {"regex": "7 8 9 "}}, {"constraint": {"lark": 'start: "7 8 9 "'}}],
)
@pytest.mark.parametrize("n_tokens", [0, 1])
async def test_a_constraint_from_the_first_token_leaves_no_room_for_a_forced_end(autojump_clock, fields, n_tokens):
    async with serving(reasoning=MARKERS) as harness:
        found = await ask(harness, prompt=f"{TEXT}|think", reasoning_budget=n_tokens, **fields)
        _, reasoning, text, eos = found
        assert (reasoning + text, eos.reason, eos.constraint_complete) == ("7 8 9 ", "stop", True)
        await harness.settled()


async def test_a_model_without_markers_ignores_the_budget(autojump_clock):
    async with serving() as harness:
        tokens, _, _, _ = await ask(harness, reasoning_budget=0)
        assert tokens == IDS
        await harness.settled()
