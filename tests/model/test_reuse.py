"""Prefix reuse and speculation with the real library: they save work and do not change the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import trio

from tests.support.profile import amount, part, thorough
from tests.support.real_daemon import Answer, Daemon, real_daemon
from uma_trio.training.skills import documents

DOCUMENT = documents.make_document(seed=7, facts=60)
"""About 800 tokens."""

COPYING = [
    "Repeat: the grey goose and the green frog met the brown bear near the old mill, and the grey goose sang",
    "Repeat: grüße 🚀 日本, grüße 🦊 日本, grüße 🚀 日本",
    "Make a JSON record for Mia, 34, from Paris, who likes tea.",
    "Count from 1 to 60.",
]
"""Answers that repeat parts of their context."""

OTHERS = ["Tell me a story about a fox.", "What is the capital of France?", "Spell the word horse.", "What can you do?"]


@pytest.fixture(scope="module", params=[thorough("on"), "off"])
def layout(request: pytest.FixtureRequest) -> str:
    """``on``: unified KV; ``off``: per-sequence KV."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def reusing(library: None, layout: str) -> Iterator[Daemon]:
    with real_daemon("--parallel", "8", "--ctx", "32768", "--kv-unified", layout) as daemon:
        yield daemon


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages of user and assistant, alternating."""
    return [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]


def usage(answer: Answer) -> dict[str, int]:
    found: dict[str, int] = answer.last["usage"]
    return found


async def together(daemon: Daemon, requests: list[dict[str, object]]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def one(n: int, fields: dict[str, object]) -> None:
        async with daemon.client() as client:
            answers[n] = Answer.of([event async for event in client.generate(**fields)])

    async with trio.open_nursery() as nursery:
        for n, fields in enumerate(requests):
            nursery.start_soon(one, n, fields)
    return [answers[n] for n in range(len(requests))]


# -- prefix reuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "questions",
    [
        ("What is the capital of France?", "And of Italy?", "And of Japan?", "And of Peru?"),
        thorough(("Tell me a story about a fox named Ada", "Tell me a story about an owl.", "Count from 3 to 17.")),
        (
            documents.ask(DOCUMENT, DOCUMENT.facts[3].question),
            DOCUMENT.facts[30].question,
        ),
    ],
    ids=["capitals", "stories", "a document"],
)
def test_a_next_turn_computes_only_new_tokens_and_has_the_same_text(
    reusing: Daemon, questions: tuple[str, ...]
) -> None:
    turns: list[str] = []
    before = 0
    for question in questions:
        turns.append(question)
        plain = reusing.ask(messages=chat(*turns), max_tokens=200, cache_prompt=False)
        cached = reusing.ask(messages=chat(*turns), max_tokens=200)
        assert (cached.ids, cached.text, cached.reason) == (plain.ids, plain.text, plain.reason)
        assert usage(plain)["cached_tokens"] == 0
        assert usage(cached)["cached_tokens"] >= max(0, before - 4), "the last tokens of the answer were never computed"
        before = usage(cached)["prompt_tokens"] + usage(cached)["completion_tokens"]
        turns.append(cached.text)
    again = reusing.ask(messages=chat(*turns[:-1]), max_tokens=200)
    assert again.ids == cached.ids
    assert usage(again)["cached_tokens"] == usage(again)["prompt_tokens"] - 1
    reusing.settled()


@pytest.mark.thorough
async def test_a_prefix_of_eight_concurrent_requests_is_computed_once(reusing: Daemon) -> None:
    requests: list[dict[str, object]] = [
        {"messages": chat(documents.ask(DOCUMENT, DOCUMENT.facts[7 * n].question)), "max_tokens": 40} for n in range(8)
    ]
    alone = [reusing.ask(**fields, cache_prompt=False) for fields in requests]
    before = reusing.metrics()
    answers = await together(reusing, requests)
    after = reusing.settled()
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    computed = after["prompt_tokens_total"] - before["prompt_tokens_total"]
    prompt = max(usage(answer)["prompt_tokens"] for answer in answers)
    assert prompt > 700
    assert computed <= prompt + 7 * 20, "of the other seven, only the questions are computed"
    cached = sum(usage(answer)["cached_tokens"] for answer in answers)
    assert computed + cached == sum(usage(answer)["prompt_tokens"] for answer in answers)
    assert after["cached_tokens_total"] - before["cached_tokens_total"] == cached
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] >= 7
    assert after["kv"]["cached_sequences"] > 0


@pytest.mark.thorough
async def test_a_disconnect_of_the_first_does_not_change_the_others(reusing: Daemon) -> None:
    document = documents.make_document(seed=8, facts=60)
    requests: list[dict[str, object]] = [
        {"messages": chat(documents.ask(document, document.facts[15 * n].question)), "max_tokens": 40} for n in range(4)
    ]
    alone = [reusing.ask(**fields, cache_prompt=False) for fields in requests]
    with reusing.wire() as first:
        first.send(id="first", messages=chat(documents.ask(document, "What is the title?")), max_tokens=20)
        async with trio.open_nursery() as nursery:

            async def disconnect() -> None:
                await trio.sleep(0.1)
                first.sock.close()

            nursery.start_soon(disconnect)
            answers = await together(reusing, requests)
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    reusing.settled()


# -- speculation ------------------------------------------------------------------------------------------


def test_speculation_changes_no_token_and_copies_need_fewer_calls(reusing: Daemon) -> None:
    questions = part([*COPYING, *OTHERS], 2)
    plain = [reusing.ask(messages=chat(question), max_tokens=150, speculate=False) for question in questions]
    before = reusing.settled()
    answers = [reusing.ask(messages=chat(question), max_tokens=150, speculate=True) for question in questions]
    after = reusing.settled()
    for one, other in zip(answers, plain, strict=True):
        assert (one.ids, one.text, one.reason) == (other.ids, other.text, other.reason)
        assert usage(one)["completion_tokens"] == usage(other)["completion_tokens"]
    grown = {
        name: after[name] - before[name]
        for name in ("tokens_total", "decode_calls_total", "draft_tokens_total", "accepted_draft_tokens_total")
    }
    print(grown)
    assert grown["tokens_total"] == sum(usage(answer)["completion_tokens"] for answer in answers)
    assert 0 < grown["accepted_draft_tokens_total"] <= grown["draft_tokens_total"]
    assert grown["decode_calls_total"] <= grown["tokens_total"] - grown["accepted_draft_tokens_total"] + 2 * len(
        answers
    )


@pytest.mark.thorough
def test_speculation_changes_no_sampled_token(reusing: Daemon, layout: str) -> None:
    """Except where the rounding of a logit decides; this temperature is high enough for that.

    With per-sequence KV, llama.cpp's CPU kernel for several rows of a sequence gives logits that differ from those of the
    kernel for one row by up to 0.36 for this model (measured).  A random number that is used for the wrong token would
    change the text from the first draft on.
    """
    n_questions, n_seeds, n_tokens = amount(quick=2, thorough=3), amount(quick=2, thorough=4), 80
    hot = {"max_tokens": n_tokens, "temperature": 2.0, "top_k": 30, "ignore_eos": True, "cache_prompt": False}
    requests = [
        {"messages": chat(question), "seed": seed, **hot}
        for question in COPYING[:n_questions]
        for seed in range(n_seeds)
    ]
    plain = [reusing.ask(**fields, speculate=False) for fields in requests]
    drafted = [reusing.ask(**fields, speculate=True) for fields in requests]
    assert len({answer.text for answer in plain}) > len(requests) / 2, "the seeds have no effect"
    same = 0
    for one, other in zip(plain, drafted, strict=True):
        same += sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.ids, other.ids, strict=True))
        )
    share = same / (n_tokens * len(plain))
    print(f"{share:.0%} of the sampled tokens precede the first difference")
    assert share > (0.9 if layout == "on" else 0.5)


@pytest.mark.thorough
async def test_speculation_next_to_other_streams_changes_nothing(reusing: Daemon) -> None:
    questions = [*COPYING, *OTHERS[:2]]
    alone = [reusing.ask(messages=chat(question), max_tokens=80, speculate=False) for question in questions]
    requests: list[dict[str, object]] = [
        {"messages": chat(question), "max_tokens": 80, "speculate": n % 3 != 2} for n, question in enumerate(questions)
    ]
    answers = await together(reusing, requests)
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    reusing.settled()
