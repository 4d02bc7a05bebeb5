"""Sampling parameters of requests reach the engine, in planned steps, in run-ahead steps and with draft tokens.

For each sample request the fake engine compares the past tokens with the tokens that its sequence holds.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio

from tests.support.asking import Client, asking
from tests.support.fake_engine import EOG, N_VOCAB, FakeEngine, expected_continuation, expected_score
from tests.support.serving import token_to_bytes
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.errors import BadRequest
from uma_trio.principal import ANONYMOUS
from uma_trio.protocol.events import Eos, PrefillProgress, Token
from uma_trio.protocol.requests import Generate

REPEATS = 20
PROMPT = random.Random(5).choices(range(1, 900), k=40)
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 3}
SHORT: dict[str, Any] = {"repetition_penalty": 1.5, "repeat_last_n": 7}
PENALTIES: tuple[dict[str, Any], ...] = (
    SHORT,
    {"repetition_penalty": 1.5, "repeat_last_n": 4096},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1, "repeat_last_n": 30},
)


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(**{"repeats": REPEATS, "n_ctx": 32_768, **options})


def expected(n: int, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    return expected_continuation(prompt, n, repeats=REPEATS, params=SamplingParams(**params))


def token_events(client: Client) -> list[Token]:
    return [event for event in client.events if isinstance(event, Token) and not event.echo]


# -- penalties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
async def test_penalties_look_at_the_past(autojump_clock, penalties, params):
    """In planned steps, in run-ahead steps and with draft tokens."""
    answer = expected(120, **penalties, **params)
    assert (answer != expected(120, **params)) == (penalties != SHORT), "the model repeats tokens that are further back"
    async with asking(engine()) as harness:
        for speculate in (False, True):
            client = await harness.answer(PROMPT, 120, speculate=speculate, cache_prompt=False, **penalties, **params)
            assert client.tokens == answer
        telemetry = harness.scheduler.telemetry
        assert telemetry.run_ahead_steps_total > 50
        assert telemetry.totals["accepted_draft_tokens"] > (10 if penalties == SHORT else -1)
        await harness.clean()


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
async def test_streams_with_different_parameters_do_not_affect_each_other(autojump_clock, unified):
    async with asking(engine(unified=unified, n_seq_max=32)) as harness:
        clients = []
        for i in range(32):
            params = {**PENALTIES[i % 4], **(HOT if i % 3 else {})} if i % 5 else {}
            clients.append((harness.ask(PROMPT[i:], 30 + i, **params), params))
            await trio.sleep(0.01)
        for client, params in clients:
            await harness.ended(client)
            assert client.tokens == expected(client.answer.max_tokens, client.prompt, **params)
        await harness.clean()


@pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("killed")], ids=str)
async def test_the_past_survives_a_lost_cache(autojump_clock, failure):
    async with asking(engine()) as harness:
        for after_s in (0.2, 0.3):
            paused = harness.ask(PROMPT, 80, speculate=True, **PENALTIES[3])
            running = harness.ask(PROMPT[1:], 300, **PENALTIES[0])
            await trio.sleep(after_s)
            paused.has_room = False
            await trio.sleep(0.1)
            harness.engine.fail_next = failure
            await harness.ended(running)
            assert running.tokens == expected(300, PROMPT[1:], **PENALTIES[0])
            harness.read_on(paused)
            await harness.ended(paused)
            assert paused.tokens == expected(80, **PENALTIES[3])
            await harness.clean()


# -- biases and end tokens -----------------------------------------------------------------------------


async def test_a_bias_of_minus_100_is_a_ban(autojump_clock):
    async with asking(engine()) as harness:
        plain = expected(5)
        forced = await harness.answer(PROMPT, 5, logit_bias={7: 100.0, 9: -100.0, 8: 0.0})
        assert forced.tokens == [7] * 5
        bias, banned = forced.answer.sampling.bias, forced.answer.sampling.banned
        assert (bias.ids.tolist(), bias.values.tolist(), banned.tolist()) == ([7], [100.0], [9])
        without = await harness.answer(PROMPT, 5, logit_bias={plain[0]: -100.0}, ignore_eos=True)
        assert plain[0] not in without.tokens
        assert sorted(without.answer.sampling.banned.tolist()) == sorted([plain[0], EOG])
        await harness.clean()


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2, 30, 59])
async def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(autojump_clock, at, speculate):
    answer = expected(60, **HOT)
    stop = answer[at]
    first = answer.index(stop)
    async with asking(engine()) as harness:
        for stream in (True, False):
            client = await harness.answer(
                PROMPT, 60, stop_token_ids=[stop, 999], ignore_eos=True, speculate=speculate, stream=stream, **HOT
            )
            assert client.reason == "stop"
            assert client.last.usage.completion_tokens == first + 1
            text = "".join(f"{token} " for token in answer[:first])
            if stream:
                assert (client.tokens, client.text) == (answer[:first], text)
            else:
                assert client.last.text == text
            await harness.clean()


async def test_a_stop_token_ends_its_own_request_only(autojump_clock):
    answer = expected(40)
    async with asking(engine()) as harness:
        stopped = harness.ask(PROMPT, 40, stop_token_ids=[answer[10]])
        other = harness.ask(PROMPT, 40)
        await harness.ended(stopped, other)
        assert stopped.tokens == answer[: answer.index(answer[10])]
        assert other.tokens == answer
        await harness.clean()


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [N_VOCAB, N_VOCAB + 1, 2**31 - 1])
async def test_token_ids_out_of_range_are_refused(autojump_clock, field, token):
    async with asking(engine()) as harness:
        value = {"logit_bias": {0: 1.0, token: 1.0}, "stop_token_ids": [0, token]}[field]
        with pytest.raises(BadRequest, match=f"^{field} names the token {token}; this model has 0 to {N_VOCAB - 1}$"):
            harness.ask(PROMPT, 5, **{field: value})
        assert [*harness.scheduler.answers()] == []
        edge = {"logit_bias": {N_VOCAB - 1: 1.0}, "stop_token_ids": [N_VOCAB - 1]}[field]
        await harness.answer(PROMPT, 5, **{field: edge})
        await harness.clean()


# -- the events of an answer --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("speculate", [False, True])
async def test_each_token_comes_with_its_own_logprobs(autojump_clock, speculate, n):
    async with asking(engine()) as harness:
        plain = harness.ask(PROMPT[1:], 300)
        client = await harness.answer(PROMPT, 120, speculate=speculate, logprobs=n)
        assert client.tokens == expected(120)
        for event in token_events(client):
            score = expected_score(event.token_id, n)
            assert event.logprob == score.logprob
            assert event.bytes == list(token_to_bytes(event.token_id))
            assert [(each.token_id, each.logprob) for each in event.top_logprobs] == list(score.top_logprobs)
            assert all(bytes(each.bytes).decode() == each.text == f"{each.token_id} " for each in event.top_logprobs)
        await harness.ended(plain)
        assert all(event.logprob is event.top_logprobs is event.bytes is None for event in token_events(plain))
        assert (harness.scheduler.telemetry.totals["accepted_draft_tokens"] > 10) == speculate or not speculate
        await harness.clean()


async def test_without_streaming_logprobs_are_a_list_in_the_last_event(autojump_clock):
    async with asking(engine(eog_after=60)) as harness:
        streamed = await harness.answer(PROMPT, 120, logprobs=2)
        whole = await harness.answer(PROMPT, 120, logprobs=2, stream=False)
        assert [event.token_id for event in token_events(streamed)] == [each.token_id for each in whole.last.logprobs]
        for event, each in zip(token_events(streamed), whole.last.logprobs, strict=True):
            assert (event.logprob, event.bytes, event.top_logprobs) == (each.logprob, each.bytes, each.top_logprobs)
        assert isinstance(streamed.last, Eos)
        assert streamed.last.logprobs is None
        assert (await harness.answer(PROMPT, 5, stream=False)).last.logprobs is None
        await harness.clean()


@pytest.mark.parametrize("name", ["echo", "return_full_text"])
async def test_the_prompt_is_echoed_in_front_of_the_answer(autojump_clock, name):
    async with asking(engine()) as harness:
        n_cells = len(PROMPT)
        for stream in (True, False):
            client = Client(list(PROMPT))
            prompt = attrs.evolve((await harness.answer(PROMPT, 1)).answer.prompt, text="the prompt: ")
            request = Generate(id="e", prompt="", max_tokens=5, stream=stream, logprobs=0, **{name: True})
            [client.answer] = harness.scheduler.submit(PreparedRequest(request, prompt, client, ANONYMOUS))
            await harness.ended(client)
            text = client.text if stream else client.last.text
            assert text == "the prompt: " + "".join(f"{token} " for token in expected(5))
            assert client.last.usage.prompt_tokens == n_cells
            if not stream:
                assert len(client.last.logprobs) == 5, "there are none for the prompt"
        await harness.clean()


# -- progress of the prefill ---------------------------------------------------------------------------


def prefilled(client):
    return [event.prefilled_tokens for event in client.events if isinstance(event, PrefillProgress)]


async def test_progress_of_the_prefill_is_sent_to_those_who_ask(autojump_clock):
    prompt = list(range(100, 1100))
    async with asking(engine()) as harness:
        client = await harness.answer(prompt, 3, progress=True, cache_prompt=False)
        found = prefilled(client)
        assert found == sorted(set(found))
        assert len(found) > 2
        assert (found[0], found[-1]) == (0, len(prompt))
        kinds = [type(event) for event in client.events]
        assert kinds == [PrefillProgress] * len(found) + [Token] * 3 + [Eos]
        assert {event.prompt_tokens for event in client.events[: len(found)]} == {len(prompt)}
        assert not prefilled(await harness.answer(prompt, 3, cache_prompt=False))
        await harness.answer(prompt, 3)
        again = await harness.answer(prompt, 3, progress=True)
        assert prefilled(again) == [again.last.usage.cached_tokens, len(prompt)] == [len(prompt) - 1, len(prompt)]
        await harness.clean()


async def test_a_lost_cache_in_the_middle_of_an_answer_is_no_progress(autojump_clock):
    async with asking(engine()) as harness:
        client = harness.ask(PROMPT, 300, progress=True)
        while not client.tokens:
            await trio.sleep(0.01)
        before = prefilled(client)
        harness.engine.fail_next = EngineDied("killed")
        await harness.ended(client)
        assert prefilled(client) == before
        await harness.clean()
