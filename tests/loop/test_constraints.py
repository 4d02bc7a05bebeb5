"""Constrained output over the fake engine: the same text in a crowd, after a crash, with late masks, as alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.support.fake_engine import EOG, FakeEngine
from tests.support.profile import sampled
from tests.support.serving import Serving, serving
from uma_trio.client import Eos, ServerError, Token
from uma_trio.daemon.engines import link
from uma_trio.engine import matchers

DIGITS = {"regex": "([1-4][0-9]{2} ){30}7 "}
"""Thirty numbers from 100 to 499, then a 7."""


async def ask(harness: Serving, prompt: str = "hello", **fields: Any) -> tuple[list[int], Eos]:
    """The tokens and the last event of one answer."""
    tokens: list[int] = []
    async with harness.client() as client:
        async for event in client.generate(prompt=prompt, **{"max_tokens": 20, **fields}):
            if isinstance(event, Token) and event.token_id is not None:
                tokens.append(event.token_id)
    assert isinstance(event, Eos)
    return tokens, event


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Serving]:
    async with serving(FakeEngine(**options)) as harness:
        yield harness
        await harness.settled()


def follows(tokens: list[int]) -> bool:
    *body, last = tokens
    return all(100 <= token < 500 for token in body) and (last == 7 or 100 <= last < 500)


async def test_an_answer_follows_its_constraint_and_ends_where_nothing_more_is_allowed(autojump_clock):
    async with running() as harness:
        tokens, end = await ask(harness, constraint={"choice": ["12 34 ", "12 35 "]})
        assert tokens in ([12, 34], [12, 35])
        assert (end.reason, end.constraint_complete) == ("stop", True)


async def test_a_constraint_that_max_tokens_cuts_short_is_not_complete(autojump_clock):
    async with running() as harness:
        tokens, end = await ask(harness, constraint=DIGITS, max_tokens=5)
        assert len(tokens) == 5
        assert all(100 <= token < 500 for token in tokens)
        assert (end.reason, end.constraint_complete) == ("length", False)


async def test_an_answer_without_constraint_says_nothing_of_one(autojump_clock):
    async with running() as harness:
        _, end = await ask(harness)
        assert end.constraint_complete is None


async def test_in_a_crowd_as_alone(autojump_clock):
    constraints = [{"regex": f"({n}[0-9]{{2}} ){{12}}"} for n in range(1, 7)]
    async with running() as harness:
        alone = [await ask(harness, f"prompt {n}", constraint=each) for n, each in enumerate(constraints)]
        plain = await ask(harness, "plain")
        crowd: dict[int, list[int]] = {}

        async def one(n: int) -> None:
            fields = {"constraint": constraints[n]} if n < len(constraints) else {}
            crowd[n] = (await ask(harness, f"prompt {n}" if fields else "plain", **fields))[0]

        async with trio.open_nursery() as nursery:
            for n in range(len(constraints) + 1):
                nursery.start_soon(one, n)
        assert [crowd[n] for n in range(len(constraints))] == [tokens for tokens, _ in alone]
        assert crowd[len(constraints)] == plain[0]
        assert all(len(tokens) == 12 for tokens, _ in alone)
        assert harness.scheduler.telemetry.run_ahead_steps_total > 20


@pytest.mark.parametrize("late", sampled([2, 1, 5], 3))
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.5}])
async def test_late_masks_delay_an_answer_and_do_not_change_it(autojump_clock, late, fields):
    async with running() as harness:
        expected, _ = await ask(harness, constraint=DIGITS, **fields)
        neighbour, _ = await ask(harness, "neighbour")
        got: list[list[int]] = []

        async def neighbour_asks() -> None:
            got.append((await ask(harness, "neighbour"))[0])

        harness.engine.late_grammar_masks = late
        async with trio.open_nursery() as nursery:
            nursery.start_soon(neighbour_asks)
            tokens, _ = await ask(harness, constraint=DIGITS, **fields)
        assert harness.engine.late_grammar_masks == 0
        assert tokens == expected
        assert follows(tokens)
        assert got == [neighbour]


async def test_a_late_mask_where_nothing_can_be_computed_again_ends_the_request(autojump_clock):
    async with running(can_truncate=False) as harness:
        harness.engine.late_grammar_masks = 1
        with pytest.raises(ServerError, match="too complex") as caught:
            await ask(harness, constraint=DIGITS)
        assert caught.value.code == "E_CONSTRAINT_INVALID"


async def test_after_a_crash_as_without(autojump_clock):
    async with running() as harness:
        expected, _ = await ask(harness, constraint=DIGITS, temperature=1.0, seed=3)
        tokens: list[int] = []

        async def one() -> None:
            tokens.extend((await ask(harness, constraint=DIGITS, temperature=1.0, seed=3))[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.05)
            harness.scheduler._engine.link.kill()
        assert tokens == expected
        assert harness.scheduler._engine.restarts == 1


async def test_each_of_several_answers_follows_the_constraint(autojump_clock):
    async with running() as harness:
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async with harness.client() as client:
            fields: dict[str, Any] = {"constraint": DIGITS, "temperature": 1.0, "seed": 9, "max_tokens": 12}
            async for event in client.generate(prompt="hello", n=3, **fields):
                if isinstance(event, Token) and event.index is not None and event.token_id is not None:
                    found[event.index].append(event.token_id)
        assert all(follows(tokens) for tokens in found.values())
        assert found[1] != found[0]
        assert (await ask(harness, constraint=DIGITS, temperature=1.0, seed=10, max_tokens=12))[0] == found[1]


@pytest.mark.parametrize("speculate", [True, False])
async def test_draft_tokens_respect_the_constraint(autojump_clock, speculate):
    async with running(repeats=3) as harness:
        prompt = "abcabcabcabc"
        tokens, _ = await ask(harness, prompt, constraint=DIGITS, max_tokens=40, speculate=speculate)
        assert follows(tokens)
        if speculate:
            assert harness.scheduler.telemetry.totals["accepted_draft_tokens"] > 0
        plain, _ = await ask(harness, prompt, constraint=DIGITS, max_tokens=40, speculate=False)
        assert tokens == plain


async def test_tokens_without_a_choice_take_no_tick_of_their_own(autojump_clock):
    """A record: the names of its fields are forced, their values are not."""
    record = "".join([f"{600 + n} {700 + n} {800 + n} [1-4][0-9]{{2}} " for n in range(10)])
    async with running() as harness:
        for fields in ({}, {"temperature": 1.0, "seed": 4}, {"stream": False}, {"logprobs": 1}):
            before = harness.scheduler.telemetry.ticks_total
            tokens, end = await ask(harness, constraint={"regex": record}, max_tokens=60, **fields)
            ticks = harness.scheduler.telemetry.ticks_total - before
            if tokens:
                assert [token for token in tokens if token >= 600] == [
                    n + part for n in range(10) for part in (600, 700, 800)
                ]
            assert (end.usage.completion_tokens, end.constraint_complete) == (41, True)
            assert ticks <= 0.6 * 41
        assert harness.scheduler.telemetry.totals["forced_tokens"] >= 4 * 18
        assert harness.scheduler.telemetry.totals["draft_tokens"] == 0


async def test_mirostat_has_no_drafts_and_survives_a_crash(autojump_clock):
    """Its state after a draw decides how the next one is made, so a step samples one token, forced or not."""
    fields = {
        "constraint": {"regex": "600 700 [1-4][0-9]{2} 600 700 " * 4},
        "temperature": 1.0,
        "seed": 4,
        "mirostat": 2,
    }
    async with running(repeats=3) as harness:
        expected, _ = await ask(harness, **fields)
        assert expected != (await ask(harness, **fields | {"mirostat_tau": 4.0}))[0]
        tokens: list[int] = []

        async def one() -> None:
            tokens.extend((await ask(harness, **fields, speculate=True))[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.05)
            harness.scheduler._engine.link.kill()
        assert tokens == expected
        assert harness.scheduler._engine.restarts == 1
        assert harness.scheduler.telemetry.totals["draft_tokens"] == 0


async def test_turns_of_a_session_have_constraints_of_their_own(autojump_clock):
    async with running() as harness:
        one, _ = await ask(harness, constraint=DIGITS, session_id="s", max_tokens=6)
        two, _ = await ask(harness, constraint={"choice": ["800 801 "]}, session_id="s")
        assert follows(one)
        assert two == [800, 801]


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json_schema": {"type": "nothing"}}, "nothing"),
        ({"lark": "begin: /a/"}, "start"),
        ({"gbnf": "root := 1"}, "gbnf: Expected ::= at line 1"),
        ({"lark": "start: /a/", "after": "x"}, "after"),
    ],
)
async def test_an_unusable_constraint_is_refused_before_anything_is_computed(autojump_clock, constraint, error):
    async with running() as harness:
        with pytest.raises(ServerError, match=error) as caught:
            await ask(harness, constraint=constraint)
        assert caught.value.code == "E_CONSTRAINT_INVALID"
        assert harness.engine.steps == []


@pytest.mark.parametrize(
    "constraint",
    [{}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"regex": ""}, {"json_schema": "{}"}, {"after": "x"}],
)
async def test_a_constraint_of_the_wrong_shape_is_a_bad_request(autojump_clock, constraint):
    async with running() as harness:
        with pytest.raises(ServerError) as caught:
            await ask(harness, constraint=constraint)
        assert caught.value.code == "E_PROTO_BAD_REQUEST"


async def test_an_answer_that_must_not_end_has_no_constraint(autojump_clock):
    async with running() as harness:
        with pytest.raises(ServerError, match="ignore_eos"):
            await ask(harness, constraint=DIGITS, ignore_eos=True)


async def test_a_constraint_begins_behind_the_text_that_it_names(autojump_clock):
    async with running() as harness:
        plain, _ = await ask(harness, max_tokens=60)
        marker = f"{plain[4]} "
        tokens, end = await ask(harness, constraint={"choice": ["800 801 "], "after": marker}, max_tokens=60)
        assert tokens[:5] == plain[:5]
        assert tokens[5:] == [800, 801]
        assert end.constraint_complete is True


async def test_a_grammar_without_a_way_on_fails_its_request_alone(autojump_clock):
    """A stop token that the grammar does not know cannot end it, and a banned one closes the only way."""
    async with running() as harness:
        with pytest.raises(ServerError) as caught:
            await ask(harness, constraint={"choice": ["12 "]}, logit_bias={"12": -100})
        assert caught.value.code == "E_RUNTIME_DECODE"
        tokens, _ = await ask(harness, constraint={"choice": ["12 "]})
        assert tokens == [12]
        assert EOG == 0


async def test_a_grammar_that_became_too_complex_once_works_again(autojump_clock, monkeypatch):
    """The matcher of llguidance never recovers from that, so its sequence gets a new one."""
    async with running(n_seq_max=1) as harness:
        expected, _ = await ask(harness, constraint=DIGITS)
        real = matchers._advance
        calls = iter([False, False, True])

        def fails_once(sequence, matcher, answer, *, is_draft):
            if next(calls, False):
                matcher.consume_token(EOG)  # an error that stays
            return real(sequence, matcher, answer, is_draft=is_draft)

        monkeypatch.setattr(matchers, "_advance", fails_once)
        with pytest.raises(ServerError, match="cannot be followed"):
            await ask(harness, constraint=DIGITS)
        assert (await ask(harness, constraint=DIGITS))[0] == expected


async def test_counters_never_fall_when_constrained_requests_are_cancelled(autojump_clock):
    record = "".join([f"{600 + n} {700 + n} {800 + n} [1-4][0-9]{{2}} " for n in range(10)])
    async with running() as harness:
        before = {**harness.scheduler.telemetry.totals}
        for n in range(24):
            if n % 7 == 3:
                harness.engine.late_grammar_masks = 1
            with trio.move_on_after(0.004 + 0.005 * n):
                await ask(harness, constraint={"regex": record}, max_tokens=60)
            await trio.sleep(0.1)
            now = {**harness.scheduler.telemetry.totals}
            assert all(now[name] >= before[name] for name in now), (before, now)
            before = now
        assert before["forced_tokens"] > 0
        assert before["late_masks"] > 0


async def test_more_grammars_than_an_engine_remembers(autojump_clock, monkeypatch):
    """Also when as many as there is room for are used at once, next to others that come and go."""
    monkeypatch.setattr(link, "MIN_GRAMMARS", 3)
    async with running(n_seq_max=4) as harness:
        choices = [{"choice": [f"{100 + n} {200 + n} "]} for n in range(12)]
        for _ in range(2):
            for n, constraint in enumerate(choices):
                assert (await ask(harness, constraint=constraint))[0] == [100 + n, 200 + n]
        found: dict[int, list[int]] = {}

        async def one(n: int) -> None:
            constraint = {"regex": f"({n + 1}[0-9]{{2}} ){{30}}"} if n < 3 else choices[n]
            found[n] = (await ask(harness, f"prompt {n}", constraint=constraint, max_tokens=40))[0]

        async with trio.open_nursery() as nursery:
            for n in range(12):
                nursery.start_soon(one, n)
        assert all(len(found[n]) == 30 and {token // 100 for token in found[n]} == {n + 1} for n in range(3))
        assert all(found[n] == [100 + n, 200 + n] for n in range(3, 12))
        assert harness.engine.resets == 0
