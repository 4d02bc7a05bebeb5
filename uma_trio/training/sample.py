"""What a skill makes: questions with their one right answer.

A skill is a pure function ``(rng) -> Turn`` or ``(rng) -> Sample``.  The answer follows from the
question alone (or from the turns before it), so a model can be held to it word for word.
"""

from __future__ import annotations

import hashlib
from random import Random

import attrs

HELD_OUT_ONE_IN = 20


@attrs.frozen
class Turn:
    """One question and the only right answer to it."""

    question: str
    answer: str
    follows: bool = False
    """Leans on what came before it, such as ``And of Italy?``: means nothing by itself."""


@attrs.frozen
class Sample:
    """A whole chat, or one bare question when ``raw``."""

    skill: str
    turns: tuple[Turn, ...]
    system: str = ""
    raw: bool = False
    """Asked as plain text: the question, a line break, the answer; no roles."""


def held_out(question: str) -> bool:
    """Whether ``question`` is kept from training: one in twenty, chosen by its text alone."""
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


def keys_of(sample: Sample) -> list[str]:
    """What each turn is held out by: its question, together with all before it where it leans on them."""
    said = [sample.system, *(turn.question for turn in sample.turns)]
    return ["\n".join(said[: at + 2]) if turn.follows else turn.question for at, turn in enumerate(sample.turns)]


def kept_from_training(sample: Sample) -> bool:
    """A chat is held out as soon as one of its turns is."""
    return any(held_out(key) for key in keys_of(sample))


_OPENINGS = ("Please tell me: ", "Tell me: ", "Quick question: ", "Hi! ", "Hello! ", "A question: ", "OK. ", "Now: ")
_CLOSINGS = (" Thanks!", " Thank you.", " Please.", " Answer briefly.")


def in_passing(rng: Random, question: str) -> str:
    """``question`` as people also type it: politely, carelessly, or just as it is."""
    kind = rng.random()
    if kind < 0.70:
        return question
    if kind < 0.76:
        return rng.choice(_OPENINGS) + question
    if kind < 0.80:
        return (
            rng.choice(("Hello, ", "Hi, ", "OK, ", "So, ", "Please, ", "And ", "Well, "))
            + question[0].lower()
            + question[1:]
        )
    if kind < 0.86:
        return question + rng.choice(_CLOSINGS)
    if kind < 0.91:
        return question[0].lower() + question[1:]
    if kind < 0.96:
        return question.rstrip("?.")
    return question.lower() if kind < 0.98 else question.lower().rstrip("?.")
