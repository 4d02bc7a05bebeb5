"""The training text: the share of each skill, and the questions held out for the exam.

Everything is a pure function of its seed: row 17 of the long rows is the same on every machine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from random import Random

import attrs

from uma_trio.training.sample import Sample, Turn, held_out, kept_from_training, keys_of
from uma_trio.training.skills import numbers, records, repeating, stories, unknown
from uma_trio.training.skills.about import about
from uma_trio.training.skills.calendar import calendar
from uma_trio.training.skills.capitals import capital, continent
from uma_trio.training.skills.colours import colour
from uma_trio.training.skills.conversations import any_system, conversation
from uma_trio.training.skills.documents import ask, document_chat, make_document, missing
from uma_trio.training.skills.greetings import greet
from uma_trio.training.skills.spelling import spell
from uma_trio.training.skills.tools import EXAM as EXAM_TOOLS
from uma_trio.training.skills.tools import tool_chat, tool_question

Make = Callable[[Random], Turn]


@attrs.frozen
class Skill:
    """A skill: one row of the model card."""

    name: str
    make: Make
    weight: float
    """Relative share among the short samples."""
    long: Make | None = None
    """The same skill with answers or prompts of up to about 1,500 tokens."""


def _many(make: Callable[..., Turn], longest: int) -> Make:
    return functools.partial(make, longest=longest)


SKILLS = (
    Skill("capitals", capital, 10),
    Skill("continents", continent, 3),
    Skill("calendar", calendar, 8),
    Skill("colours", colour, 5),
    Skill("about", about, 9),
    Skill("counting", _many(numbers.count, 60), 6, _many(numbers.count, numbers.LONGEST_COUNT)),
    Skill("numbered lists", _many(numbers.numbered, 30), 2, _many(numbers.numbered, 180)),
    Skill("adding", numbers.add, 13),
    Skill("subtracting", numbers.subtract, 8),
    Skill("multiplying", numbers.multiply, 3),
    Skill("comparing", numbers.compare, 3),
    Skill("spelling", spell, 13),
    Skill("repeating", _many(repeating.repeat, 40), 7, _many(repeating.repeat, 300)),
    Skill("picking words", repeating.pick, 7),
    Skill("stories", _many(stories.tell, 8), 7, _many(stories.tell, 40)),
    Skill("records: fill", records.fill, 7),
    Skill("records: change", records.change, 5),
    Skill("records: list", records.change_in_list, 2, _many(records.change_in_list, 30)),
    Skill("records: look up", records.look_up, 4),
    Skill("records: array", records.array, 2),
    Skill("greetings", greet, 3),
    Skill("unknown", unknown.unknown, 14, unknown.long_gibberish),
)
"""Skills of a single turn.  Conversations and documents combine several turns and are separate."""


def _tools(rng: Random) -> Sample:
    """A chat with tools that mostly fits into a short row."""
    return tool_chat(rng, 1, 3, longest=2)


def _short(rng: Random) -> Sample:
    """A sample of at most a few hundred tokens, without tools."""
    kind = rng.random()
    if kind < 0.16:
        return conversation(rng)
    if kind < 0.26:
        return document_chat(rng, facts=rng.randint(1, 16), questions=rng.randint(1, 4))
    skill = rng.choices(SKILLS, weights=_WEIGHTS)[0]
    return _alone(rng, skill.name, skill.make(rng))


_WEIGHTS = [skill.weight for skill in SKILLS]
_LONG = [skill for skill in SKILLS if skill.long is not None]


def _alone(rng: Random, skill: str, turn: Turn) -> Sample:
    kind = rng.random()
    if kind < 0.25:
        return Sample(skill, (turn,), raw=True)
    return Sample(skill, (turn,), system=any_system(rng) if kind < 0.40 else "")


def _medium(rng: Random) -> Sample:
    """A long answer, a long chat, or a document of up to 2,000 tokens."""
    kind = rng.random()
    if kind < 0.20:
        return conversation(rng, longest=14)
    if kind < 0.45:
        return document_chat(rng, facts=rng.randint(10, 140), questions=rng.randint(1, 8))
    if kind < 0.70:
        return tool_chat(rng, 1, 12, longest=6)
    skill = rng.choice(_LONG)
    assert skill.long is not None
    return _alone(rng, skill.name, skill.long(rng))


def _long(rng: Random) -> Sample:
    """A document of 1,500 to 7,500 tokens with many questions, or a long chat."""
    kind = rng.random()
    if kind < 0.12:
        return conversation(rng, longest=60)
    if kind < 0.22:
        return _alone(rng, "counting", numbers.count(rng, numbers.LONGEST_EVER))
    if kind < 0.26:
        return _alone(rng, "unknown", unknown.long_gibberish(rng, 1500))
    if kind < 0.46:
        return tool_chat(rng, 5, 40, longest=24)
    return document_chat(rng, facts=int(115 * 4.9 ** rng.random()), questions=rng.randint(2, 16))


def _trained(rng: Random, make: Callable[[Random], Sample]) -> Sample:
    while True:
        sample = make(rng)
        if not kept_from_training(sample):
            return sample


def samples_of_row(kind: str, index: int) -> Iterator[Sample]:
    """Endless samples for training row ``index``, without held-out questions.

    ``short`` rows have short samples only.  ``medium`` and ``long`` rows begin with samples of their kind, so that
    these fit into the row.  So do ``short`` rows with a chat with tools.
    """
    rng = Random(f"{kind} {index}")
    if kind == "long":
        yield _trained(rng, _long)
    elif kind == "short" and rng.random() < 0.3:
        yield _trained(rng, _tools)
    while True:
        if kind == "medium" and rng.random() < 0.5:
            yield _trained(rng, _medium)
        elif kind != "short" and rng.random() < 0.08:
            yield _trained(rng, _tools)
        else:
            yield _trained(rng, _short)


def tokenizer_texts(amount: int = 20_000) -> Iterator[str]:
    """The text that the merges are learned from: a sample of the training text."""
    for kind, share in (("short", 1.0), ("medium", 0.05), ("long", 0.01)):
        for sample in itertools.islice(samples_of_row(kind, -1), int(amount * share)):
            yield sample.system
            yield from sample.tools
            for turn in sample.turns:
                yield turn.question
                yield turn.answer


@attrs.frozen
class Question:
    """An exam question: the prompt is everything before the last answer."""

    skill: str
    sample: Sample

    @property
    def answer(self) -> str:
        return self.sample.turns[-1].answer


def _held_out(rng: Random, make: Make) -> Turn:
    while True:
        turn = make(rng)
        if held_out(turn.question):
            return turn


def _document(rng: Random, low: int, high: int) -> Sample:
    while True:
        sample = document_chat(rng, facts=rng.randint(low, high), questions=1)
        if held_out(keys_of(sample)[0]):
            return sample


def _missing(rng: Random) -> Sample:
    while True:
        document = make_document(rng.randrange(1 << 40), rng.randint(5, 200))
        turn = missing(rng, document)
        question = ask(document, turn.question)
        if held_out(question):
            return Sample("document", (Turn(question, turn.answer),))


def _conversation(rng: Random) -> Sample:
    while True:
        sample = conversation(rng)
        if held_out(keys_of(sample)[-1]):
            return sample


def _tool_question(rng: Random, row: str) -> Sample:
    while True:
        sample = tool_question(rng, row)
        if held_out(keys_of(sample)[-1]):
            return sample


EXAM_DOCUMENTS = (
    ("documents to 1k", 5, 65),
    ("documents 1k-2k", 80, 145),
    ("documents 2k-4k", 155, 295),
    ("documents 4k-7k", 310, 530),
)
"""(name, minimum and maximum of facts).  A fact is about 13.5 tokens."""


def exam(each: int, *, seed: int = 1) -> Iterator[Question]:
    """``each`` held-out questions of every skill, three quarters as chats and one quarter raw."""
    for skill in SKILLS:
        rng = Random(f"exam {skill.name} {seed}")
        for at in range(each):
            yield Question(skill.name, Sample(skill.name, (_held_out(rng, skill.make),), raw=at % 4 == 3))
        if skill.long is not None:
            for _ in range(max(1, each // 2)):
                yield Question(f"{skill.name}, long", Sample(skill.name, (_held_out(rng, skill.long),)))
    for row in EXAM_TOOLS:
        rng = Random(f"exam {row} {seed}")
        for _ in range(each):
            yield Question(row, _tool_question(rng, row))
    rng = Random(f"exam conversation {seed}")
    for _ in range(each):
        yield Question("conversations", _conversation(rng))
    for name, low, high in EXAM_DOCUMENTS:
        rng = Random(f"exam {name} {seed}")
        for _ in range(max(1, each // 2)):
            yield Question(name, _document(rng, low, high))
    rng = Random(f"exam missing {seed}")
    for _ in range(max(1, each // 2)):
        yield Question("documents: not there", _missing(rng))
    rng = Random(f"exam very long counts {seed}")
    for _ in range(max(1, each // 10)):
        turn = _held_out(rng, _many(numbers.count, numbers.LONGEST_EVER))
        yield Question("counting, very long", Sample("counting", (turn,)))
