"""A tenant that holds all places of the real engine gives one up, and its texts stay what they are alone."""

from __future__ import annotations

import pytest
import trio

from tests.support.profile import thorough
from tests.support.real_daemon import Answer, real_daemon
from uma_trio.client import Token

COUNTING = [[{"role": "user", "content": f"Count from {n} to {n + 55}."}] for n in (1, 20, 100)]


async def answer(daemon, principal: str, begun: trio.Event | None = None, **fields) -> Answer:
    events = []
    async with daemon.client() as client:
        async for event in client.generate(principal=principal, **fields):
            events.append(event)
            if begun is not None and isinstance(event, Token):
                begun.set()
    return Answer.of(events)


async def test_a_stream_that_loses_its_place_goes_on_with_the_same_text(library) -> None:
    with real_daemon("--parallel", "2", "--threads", "1", "--ctx", "4096") as daemon:
        alone = [(await answer(daemon, "alone", messages=chat)).text for chat in COUNTING]
        crowded: list[Answer] = []

        async def greedy(chat: object, begun: trio.Event) -> None:
            crowded.append(await answer(daemon, "greedy", begun, messages=chat))

        async with trio.open_nursery() as nursery:
            began = [trio.Event() for _ in COUNTING]
            for chat, begun in zip(COUNTING, began, strict=True):
                nursery.start_soon(greedy, chat, begun)
            for begun in began[:2]:
                await begun.wait()
            for _ in range(3):  # one after another, so each takes a place again
                visitor = await answer(daemon, "visitor", prompt="Hello", max_tokens=3)
                assert visitor.last["usage"]["completion_tokens"] == 3
        assert sorted(each.text for each in crowded) == sorted(alone)
        assert daemon.metrics()["preemptions_total"] >= 1


LONG = "Count from one to one hundred. " * 180


GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 7, "constraint": {"regex": "[a-z ]{300}"}}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flash_attn", "ways"),
    [
        thorough("on", [SAMPLED, GREEDY, GREEDY | {"cache_prompt": False}]),
        ("off", [GREEDY]),  # the values of the KV cache are transposed
        thorough("off", [GREEDY | {"cache_prompt": False}, SAMPLED]),
    ],
)
async def test_a_stream_that_was_copied_to_memory_goes_on_with_the_same_text(library, flash_attn, ways) -> None:
    """There is one place, and prefill takes long."""
    with real_daemon("--parallel", "1", "--threads", "1", "--ctx", "4096", "--flash-attn", flash_attn) as daemon:
        for fields in ways:
            await compare_with_alone(daemon, {"prompt": LONG, "max_tokens": 60, **fields})


async def compare_with_alone(daemon, fields: dict[str, object]) -> None:
    alone = await answer(daemon, "alone", **fields)
    crowded: list[Answer] = []
    n_bytes = []

    async def greedy() -> None:
        crowded.append(await answer(daemon, "greedy", **fields))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(greedy)
        while not crowded:
            async with daemon.client() as client:
                async for event in client.generate(prompt="Hello", max_tokens=3, principal="visitor"):
                    if isinstance(event, Token):
                        n_bytes.append(daemon.metrics()["preempted_bytes"])
            await trio.sleep(0.01)
    assert max(n_bytes) > 0, "it was not copied"
    assert crowded[0].text == alone.text
    assert len(alone.text) > 10
    assert daemon.metrics()["preempted_bytes"] == 0
