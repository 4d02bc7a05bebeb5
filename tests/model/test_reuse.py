"""Reuse and guesses with the real library: the text is what it is without, and less is computed for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import trio

from tests.support.real_daemon import Answer, Daemon, real_daemon
from uma_trio.training.skills import documents

DOCUMENT = documents.make_document(seed=7, facts=110)
"""About 1,500 tokens."""

COPYING = [
    "Repeat: the grey goose and the green frog met the brown bear near the old mill, and the grey goose sang",
    "Repeat: grüße 🚀 日本, grüße 🦊 日本, grüße 🚀 日本",
    "Make a JSON record for Mia, 34, from Paris, who likes tea.",
    "Count from 1 to 60.",
]
"""What stood before comes again."""

OTHERS = ["Tell me a story about a fox.", "What is the capital of France?", "Spell the word horse.", "What can you do?"]


@pytest.fixture(scope="module", params=["on", "off"])
def layout(request: pytest.FixtureRequest) -> str:
    """One cache for all sequences, or one for each."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def house(library: None, layout: str) -> Iterator[Daemon]:
    with real_daemon("--parallel", "8", "--ctx", "32768", "--kv-unified", layout) as daemon:
        yield daemon


def chat(*turns: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
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


# -- reuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "questions",
    [
        ("What is the capital of France?", "And of Italy?", "And of Japan?", "And of Peru?"),
        ("Tell me a story about a fox named Ada", "Tell me a story about an owl.", "Count from 3 to 17."),
        (
            documents.ask(DOCUMENT, DOCUMENT.facts[3].question),
            DOCUMENT.facts[60].question,
            DOCUMENT.facts[100].question,
        ),
    ],
    ids=["capitals", "stories", "a document"],
)
def test_a_chat_that_goes_on_says_the_same_and_computes_only_what_is_new(
    house: Daemon, questions: tuple[str, ...]
) -> None:
    turns: list[str] = []
    before = 0
    for question in questions:
        turns.append(question)
        plain = house.ask(messages=chat(*turns), max_tokens=200, cache_prompt=False)
        cached = house.ask(messages=chat(*turns), max_tokens=200)
        assert (cached.ids, cached.text, cached.reason) == (plain.ids, plain.text, plain.reason)
        assert usage(plain)["cached_tokens"] == 0
        assert usage(cached)["cached_tokens"] >= max(0, before - 4), "the answer's last tokens were never fed"
        before = usage(cached)["prompt_tokens"] + usage(cached)["completion_tokens"]
        turns.append(cached.text)
    again = house.ask(messages=chat(*turns[:-1]), max_tokens=200)
    assert again.ids == cached.ids
    assert usage(again)["cached_tokens"] == usage(again)["prompt_tokens"] - 1
    house.settled()


@pytest.mark.slow
async def test_eight_that_arrive_together_compute_what_they_share_once(house: Daemon) -> None:
    requests: list[dict[str, object]] = [
        {"messages": chat(documents.ask(DOCUMENT, DOCUMENT.facts[13 * n].question)), "max_tokens": 40} for n in range(8)
    ]
    alone = [house.ask(**fields, cache_prompt=False) for fields in requests]
    before = house.metrics()
    answers = await together(house, requests)
    after = house.settled()
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    computed = after["prompt_tokens_total"] - before["prompt_tokens_total"]
    prompt = max(usage(answer)["prompt_tokens"] for answer in answers)
    assert prompt > 1400
    assert computed <= 1.1 * prompt
    cached = sum(usage(answer)["cached_tokens"] for answer in answers)
    assert computed + cached == sum(usage(answer)["prompt_tokens"] for answer in answers)
    assert after["cached_tokens_total"] - before["cached_tokens_total"] == cached
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] >= 7
    assert after["kv"]["cached_sequences"] > 0


async def test_when_the_first_hangs_up_the_others_say_the_same(house: Daemon) -> None:
    document = documents.make_document(seed=8, facts=110)
    requests: list[dict[str, object]] = [
        {"messages": chat(documents.ask(document, document.facts[20 * n].question)), "max_tokens": 40} for n in range(4)
    ]
    alone = [house.ask(**fields, cache_prompt=False) for fields in requests]
    with house.wire() as first:
        first.send(id="first", messages=chat(documents.ask(document, "What is the title?")), max_tokens=20)
        async with trio.open_nursery() as nursery:

            async def hang_up() -> None:
                await trio.sleep(0.1)
                first.sock.close()

            nursery.start_soon(hang_up)
            answers = await together(house, requests)
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    house.settled()


# -- guesses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [*COPYING, *OTHERS])
def test_guesses_change_no_token(house: Daemon, question: str) -> None:
    plain = house.ask(messages=chat(question), max_tokens=200, speculate=False)
    quick = house.ask(messages=chat(question), max_tokens=200, speculate=True)
    assert (quick.ids, quick.text, quick.reason) == (plain.ids, plain.text, plain.reason)
    assert usage(quick)["completion_tokens"] == usage(plain)["completion_tokens"]
    house.settled()


def test_copies_take_fewer_calls_than_tokens(house: Daemon) -> None:
    before = house.settled()
    answers = [house.ask(messages=chat(question), max_tokens=200, speculate=True) for question in COPYING]
    after = house.settled()
    gone = {
        name: after[name] - before[name]
        for name in ("tokens_total", "decode_calls_total", "draft_tokens_total", "accepted_draft_tokens_total")
    }
    print(gone)
    assert gone["tokens_total"] == sum(usage(answer)["completion_tokens"] for answer in answers)
    assert 0 < gone["accepted_draft_tokens_total"] <= gone["draft_tokens_total"]
    assert gone["decode_calls_total"] <= gone["tokens_total"] - gone["accepted_draft_tokens_total"] + 2 * len(answers)


@pytest.mark.slow
def test_with_a_seed_guesses_change_no_token_either(house: Daemon, layout: str) -> None:
    """But for the last bits of a logit, so hot that they decide now and then.

    Where each sequence has cells of its own, llama.cpp's CPU kernel for several rows of one sequence gives logits
    that differ from those of one row by up to 0.36 for this model (measured).  A random number out of its turn would
    make another text from the first guess on.
    """
    hot = {"max_tokens": 120, "temperature": 2.0, "top_k": 30, "ignore_eos": True, "cache_prompt": False}
    requests = [{"messages": chat(question), "seed": seed, **hot} for question in COPYING[:3] for seed in range(4)]
    plain = [house.ask(**fields, speculate=False) for fields in requests]
    quick = [house.ask(**fields, speculate=True) for fields in requests]
    assert len({answer.text for answer in plain}) > 6, "the seeds make no difference"
    same = 0
    for one, other in zip(plain, quick, strict=True):
        same += sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.ids, other.ids, strict=True))
        )
    share = same / (120 * len(plain))
    print(f"{share:.0%} of the sampled tokens come before the first that differs")
    assert share > (0.9 if layout == "on" else 0.5)


async def test_guesses_beside_other_streams_change_nothing(house: Daemon) -> None:
    questions = [*COPYING, *OTHERS[:2]]
    alone = [house.ask(messages=chat(question), max_tokens=120, speculate=False) for question in questions]
    requests: list[dict[str, object]] = [
        {"messages": chat(question), "max_tokens": 120, "speculate": n % 3 != 2} for n, question in enumerate(questions)
    ]
    answers = await together(house, requests)
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    house.settled()
