"""Reasoning in events of its own, over the real daemon with a fake engine in virtual time.

The fake engine's tokens are numbers, and so are the markers: the answer to ``TEXT`` begins with ``BEGIN``, and its
sixth token is ``END``.
"""

from __future__ import annotations

import attrs
import pytest

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import remembering, serving
from uma_trio.client import Eos, Reasoning, ServerError, Token
from uma_trio.engine_link.messages import EngineDied
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.models.markers import ReasoningMarkers

TEXT = "a prompt"
IDS = expected_continuation([byte + 100 for byte in TEXT.encode()], 12)
BEGIN, END = str(IDS[0]), str(IDS[5])
MARKERS = ReasoningMarkers(begin=(BEGIN,), end=(f" {END}",), opened_by=(f"|{BEGIN}",))


def words(tokens) -> str:
    return " ".join(map(str, tokens))


REASONING, ANSWER = words(IDS[1:5]), words(IDS[6:]) + " "


async def events_of(harness, **fields):
    async with harness.client() as client:
        request = {"prompt": TEXT, "max_tokens": 12, "separate_reasoning": True, **fields}
        return [event async for event in client.generate(**request)]


def texts(events, cls) -> str:
    return "".join(event.text for event in events if type(event) is cls)


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_reasoning_and_answer_come_in_events_of_their_own(autojump_clock, encoding):
    async with serving(reasoning=MARKERS) as harness:
        async with harness.client(encoding=encoding) as client:
            request = {"prompt": TEXT, "max_tokens": 12, "separate_reasoning": True}
            events = [event async for event in client.generate(**request)]
        assert (texts(events, Reasoning), texts(events, Token)) == (REASONING, ANSWER)
        assert [event.token_id for event in events[:-1] if event.token_id is not None] == IDS, "one event has the token"
        kinds = [type(event) for event in events[:-1]]
        assert kinds == sorted(kinds, key=[Reasoning, Token].index), "all reasoning comes first"
        assert (events[-1].usage.reasoning_tokens, events[-1].usage.completion_tokens) == (6, 12)
        await harness.settled()


async def test_without_streaming_the_eos_has_both(autojump_clock):
    async with serving(reasoning=MARKERS) as harness:
        [eos] = await events_of(harness, stream=False, logprobs=0)
        assert (eos.reasoning, eos.text) == (REASONING, ANSWER)
        assert [entry.token_id for entry in eos.logprobs] == IDS
        await harness.settled()


async def test_logprobs_stream_with_the_event_that_has_the_token(autojump_clock):
    async with serving(reasoning=MARKERS) as harness:
        events = await events_of(harness, logprobs=1)
        assert [event.token_id for event in events[:-1] if event.logprob is not None] == IDS
        await harness.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_only_requests_that_ask_get_it(autojump_clock, stream):
    async with serving(reasoning=MARKERS) as harness:
        events = await events_of(harness, separate_reasoning=False, stream=stream)
        assert texts(events, Token) + (events[-1].text or "") == words(IDS) + " "
        assert not texts(events, Reasoning)
        assert (events[-1].reasoning, events[-1].usage.reasoning_tokens) == (None, None)
        await harness.settled()


async def test_a_model_without_markers_answers_as_always(autojump_clock):
    async with serving() as harness:
        events = await events_of(harness)
        assert texts(events, Token) == words(IDS) + " "
        assert events[-1].usage.reasoning_tokens == 0
        await harness.settled()


async def test_the_prompt_may_have_begun_the_reasoning(autojump_clock):
    prompt = f"{TEXT}|{BEGIN} "
    ids = expected_continuation([byte + 100 for byte in prompt.encode()], 9)
    markers = attrs.evolve(MARKERS, end=(f" {ids[3]}",))
    async with serving(reasoning=markers) as harness:
        [eos] = await events_of(harness, prompt=prompt, max_tokens=9, stream=False)
        assert (eos.reasoning, eos.text) == (words(ids[:3]), words(ids[4:]) + " ")
        await harness.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_max_tokens_in_the_reasoning(autojump_clock, stream):
    async with serving(reasoning=MARKERS) as harness:
        events = await events_of(harness, max_tokens=4, stream=stream)
        assert texts(events, Reasoning) + (events[-1].reasoning or "") == words(IDS[1:4]) + " "
        assert texts(events, Token) + (events[-1].text or "") == ""
        assert (events[-1].reason, events[-1].usage.reasoning_tokens) == ("length", 4)
        await harness.settled()


async def test_a_stop_string_counts_in_the_answer_only(autojump_clock):
    both = str(IDS[2])
    async with serving(reasoning=MARKERS) as harness:
        eos = (await events_of(harness, stop=[both, str(IDS[8])], stream=False))[-1]
        assert (eos.reasoning, eos.text, eos.stop) == (REASONING, words(IDS[6:8]) + " ", str(IDS[8]))
        [eos] = await events_of(harness, stop=[both], separate_reasoning=False, stream=False)
        assert eos.text == words(IDS[:2]) + " "
        [eos] = await events_of(harness, stop_token_ids=[IDS[2]], stream=False)
        assert (eos.reason, eos.reasoning, eos.text) == ("stop", f"{IDS[1]} ", "")
        await harness.settled()


async def test_an_end_token_in_the_reasoning(autojump_clock):
    async with serving(FakeEngine(eog_after=len(TEXT) + 3), reasoning=MARKERS) as harness:
        [eos] = await events_of(harness, stream=False)
        assert (eos.reason, eos.reasoning, eos.text) == ("stop", words(IDS[1:3]) + " ", "")
        await harness.settled()


async def test_each_of_several_answers_has_its_own(autojump_clock):
    params = SamplingParams(1.0, seed=7)
    first = expected_continuation([byte + 100 for byte in TEXT.encode()], 12, params=params)
    markers = ReasoningMarkers(begin=(str(first[0]),), end=(f" {first[5]}",))
    async with serving(reasoning=markers) as harness:
        fields = {"prompt": TEXT, "max_tokens": 12, "temperature": 1.0, "separate_reasoning": True}
        async with harness.client() as client:
            together = await client.choices(n=4, seed=7, **fields)
        for i, eos in enumerate(together):
            async with harness.client() as client:
                alone = await client.complete(seed=7 + i, **fields)
            assert (eos.reasoning, eos.text) == (alone.reasoning, alone.text)
        assert together[0].reasoning == words(first[1:5])
        await harness.settled()


async def test_a_crash_of_the_engine_in_the_reasoning_changes_nothing(autojump_clock):
    async with serving(reasoning=MARKERS) as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": TEXT, "max_tokens": 12, "separate_reasoning": True})
            events = [await client.receive() for _ in range(3)]
            harness.engine.fail_next = EngineDied("killed")
            while not isinstance(events[-1], Eos):
                events.append(await client.receive())
        assert (texts(events, Reasoning), texts(events, Token)) == (REASONING, ANSWER)
        await harness.settled()


# -- sessions ----------------------------------------------------------------------------------------


def user(text: str):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_session_keeps_reasoning_separately(autojump_clock, tmp_path, stream):
    request = {"session_id": "a", "max_tokens": 12, "separate_reasoning": True, "stream": stream}
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, reasoning=MARKERS) as harness:
            events = await events_of(harness, prompt=None, messages=user(TEXT), **request)
            assert events[-1].session.durable
            events = await events_of(harness, prompt=None, messages=user("more"), **request)
            async with harness.client() as client:
                kept = (await client.transcript("a")).messages
        assert (kept[1].content, kept[1].reasoning) == (ANSWER, REASONING)
        # the template of the fake model leaves reasoning out, as most do
        prompt = [byte + 100 for byte in f"{TEXT}|{ANSWER}|more".encode()]
        assert events[-1].usage.prompt_tokens == len(prompt)
        answer = texts(events, Token) + (events[-1].text or "")
        assert answer == words(expected_continuation(prompt, 12)) + " "
        assert (kept[3].content, kept[3].reasoning) == (answer, None)
        async with serving(storage=storage, reasoning=MARKERS) as harness, harness.client() as client:
            assert (await client.transcript("a")).messages == kept


async def test_a_session_of_prompts_goes_on_from_all_tokens(autojump_clock):
    async with serving(reasoning=MARKERS) as harness:
        request = {"session_id": "a", "separate_reasoning": True}
        await events_of(harness, stop=[str(IDS[8])], **request)
        [*_, eos] = await events_of(harness, prompt="on", max_tokens=5, **request)
        kept = [byte + 100 for byte in TEXT.encode()] + IDS[:8]
        assert eos.usage.prompt_tokens == len(kept) + 2
        expected = expected_continuation([*kept, *(byte + 100 for byte in b"on")], 5)
        assert eos.session.tokens == len(kept) + 2 + len(expected)


async def test_a_client_may_send_reasoning_back(autojump_clock):
    async with serving(reasoning=MARKERS) as harness:
        chat = [*user("a"), {"role": "assistant", "content": "b", "reasoning": "c"}, *user("d")]
        events = await events_of(harness, prompt=None, messages=chat)
        assert events[-1].usage.prompt_tokens == len("a|b|d")
        big = [*user("a"), {"role": "assistant", "content": "", "reasoning": "c" * 300_000}, *user("d")]
        with pytest.raises(ServerError, match="E_LIMIT_PROMPT_TOO_LARGE"):
            await events_of(harness, prompt=None, messages=big)
        await harness.settled()
