"""Requests with several answers (``n``), over the real daemon with a fake engine in virtual time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import trio

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import Serving, serving
from uma_trio.client import Eos, Event, ServerError, Token
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.sampling import SamplingParams

TEXT = "a prompt that is long enough to be shared"
PROMPT = [byte + 100 for byte in TEXT.encode()]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 7}


def text_of(i: int, n: int) -> str:
    params = SamplingParams(1.0, seed=7 + i)
    return "".join(f"{token} " for token in expected_continuation(PROMPT, n, params=params))


async def asked(client: Any, **fields: Any) -> dict[int, list[Event]]:
    """The events of one request by index, in order."""
    found = defaultdict(list)
    async for event in client.generate(prompt=TEXT, **fields):
        found[event.index].append(event)
    return found


def prompt_tokens_computed(harness: Serving) -> int:
    return harness.scheduler.telemetry.prompt_tokens_total


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_each_answer_equals_that_of_a_single_request_with_its_seed(autojump_clock, encoding, n):
    async with serving() as harness:
        async with harness.client(encoding=encoding) as client:
            found = await asked(client, n=n, max_tokens=9, **HOT)
            assert await client.receive() is None, "without keep_alive the server closes behind the last event"
        assert sorted(found) == [*range(n)]
        for i, events in found.items():
            assert "".join(event.text for event in events[:-1]) == text_of(i, 9)
            eos = events[-1]
            assert (type(eos), eos.seed, eos.reason) == (Eos, 7 + i, "length")
            assert eos.usage.completion_tokens == 9
            async with harness.client() as client:
                alone = await client.complete(prompt=TEXT, max_tokens=9, temperature=1.0, seed=7 + i)
            assert alone.text == text_of(i, 9)
            assert alone.index is None
        await harness.settled()


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
async def test_the_prompt_is_computed_once(autojump_clock, unified):
    engine = FakeEngine(unified=unified, n_ctx=8192)
    async with serving(engine) as harness:
        long = TEXT * 4
        async with harness.client() as client:
            ends = await client.choices(prompt=long, n=8, max_tokens=5, **HOT)
        assert prompt_tokens_computed(harness) <= len(long) + 8
        assert sorted(eos.usage.cached_tokens for eos in ends) == [0] + [len(long) - 1] * 7
        await harness.settled()


async def test_without_cache_prompt_each_answer_computes_the_prompt(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client:
            ends = await client.choices(prompt=TEXT, n=3, max_tokens=5, cache_prompt=False, **HOT)
        assert [eos.text for eos in ends] == [text_of(i, 5) for i in range(3)]
        assert prompt_tokens_computed(harness) == 3 * len(TEXT)
        await harness.settled()


async def test_more_answers_than_sequences_wait_in_the_queue(autojump_clock):
    async with serving(FakeEngine(n_seq_max=2)) as harness:
        async with harness.client() as client:
            ends = await client.choices(prompt=TEXT, n=16, max_tokens=5, echo=True, **HOT)
        assert [eos.text for eos in ends] == [TEXT + text_of(i, 5) for i in range(16)]
        await harness.settled()


@pytest.mark.parametrize("free", [0, 1, 2])
async def test_all_answers_are_admitted_or_none(autojump_clock, free):
    """The engine has two sequences, and the queue has two places."""
    async with serving(FakeEngine(n_seq_max=2), max_queue=2) as harness, trio.open_nursery() as nursery:
        others = []
        for _ in range(2 - free):
            client = await open_client_for_good(nursery, harness)
            await client.send({"id": "o", "prompt": "other", "max_tokens": 200})
            others.append(client)
        await trio.sleep(0.05)
        async with harness.client() as client:
            with pytest.raises(ServerError, match="E_LIMIT_QUEUE"):
                await asked(client, n=free + 3, max_tokens=5, echo=True, **HOT)
        harness.scheduler.check_integrity()
        assert len(list(harness.scheduler.answers())) == len(others)
        async with harness.client() as client:
            ends = await client.choices(prompt=TEXT, n=free + 2, max_tokens=5, **HOT)
        assert len(ends) == free + 2
        nursery.cancel_scope.cancel()


async def open_client_for_good(nursery: trio.Nursery, harness: Serving) -> Any:
    """A client that stays connected until ``nursery`` is cancelled."""

    async def hold(task_status: trio.TaskStatus[Any]) -> None:
        async with harness.client() as client:
            task_status.started(client)
            await trio.sleep_forever()

    return await nursery.start(hold)


@pytest.mark.parametrize("after", [0, 1, 20])
async def test_a_cancel_ends_all_answers(autojump_clock, after):
    async with serving(FakeEngine(n_seq_max=4)) as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": TEXT, "n": 6, "max_tokens": 300, "keep_alive": True, **HOT})
            events = [await client.receive() for _ in range(after)]
            await client.cancel("a")
            while sum(isinstance(event, Eos) for event in events) < 6:
                events.append(await client.receive())
            ends = [event for event in events if isinstance(event, Eos)]
            assert {event.index for event in ends} == {*range(6)}
            assert {event.reason for event in ends} == {"cancelled"}
            assert len(await client.choices(prompt=TEXT, n=2, max_tokens=2)) == 2, "the connection is still usable"
        await harness.settled()


async def test_a_closed_socket_ends_all_answers(autojump_clock):
    async with serving(FakeEngine(n_seq_max=4)) as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": TEXT, "n": 6, "max_tokens": 300, **HOT})
            await client.receive()
        await harness.settled()
        assert harness.scheduler.telemetry.requests["cancelled"] == 6


async def test_answers_end_independently(autojump_clock):
    """One of them meets a stop token early, and the others go on."""
    stops = {i: expected_continuation(PROMPT, 20, params=SamplingParams(1.0, seed=7 + i)) for i in range(4)}
    stop = next(token for token in stops[2] if all(token not in stops[i] for i in (0, 1, 3)))
    async with serving() as harness:
        async with harness.client() as client:
            ends = await client.choices(prompt=TEXT, n=4, max_tokens=20, stop_token_ids=[stop], **HOT)
        assert [eos.reason for eos in ends] == ["length", "length", "stop", "length"]
        assert [eos.text for eos in ends] == [text_of(i, stops[2].index(stop) if i == 2 else 20) for i in range(4)]
        await harness.settled()


@pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("killed")], ids=str)
async def test_a_failed_step_changes_no_answer(autojump_clock, failure):
    async with serving(FakeEngine(n_seq_max=2)) as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": TEXT, "n": 4, "max_tokens": 40, "keep_alive": True, **HOT})
            events = [await client.receive() for _ in range(10)]
            harness.engine.fail_next = failure
            while len(ends := [event for event in events if not isinstance(event, Token)]) < 4:
                events.append(await client.receive())
            assert [type(event) for event in ends] == [Eos] * 4
            assert sorted(event.index for event in ends) == [0, 1, 2, 3]
            for i in range(4):
                text = "".join(event.text for event in events if event.index == i and isinstance(event, Token))
                assert text == text_of(i, 40)
            assert len(await client.choices(prompt=TEXT, n=2, max_tokens=2)) == 2
        await harness.settled()


async def test_seeds_wrap_around_at_the_largest(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client:
            ends = await client.choices(prompt=TEXT, n=3, max_tokens=2, temperature=1.0, seed=2**63 - 2)
        assert [eos.seed for eos in ends] == [2**63 - 2, 2**63 - 1, 0]
        async with harness.client() as client:
            ends = await client.choices(prompt=TEXT, n=3, max_tokens=2, temperature=1.0)
        assert len({eos.seed for eos in ends}) == 3
        await harness.settled()


async def test_a_timeout_ends_all_answers(autojump_clock):
    async with serving(request_timeout_s=1.0) as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": TEXT, "n": 3, "max_tokens": 1000, **HOT})
            events = []
            while (event := await client.receive()) is not None:
                events.append(event)
        ends = [event for event in events if not isinstance(event, Token)]
        assert [(event.code, event.index) for event in ends] == [("E_LIMIT_REQUEST_TIMEOUT", i) for i in range(3)]
        await harness.settled()
