"""Training samples: questions, each with its only right answer.

A skill is a pure function ``(rng) -> Turn`` or ``(rng) -> Sample``.  The answer follows from the question alone, or
from the turns before it, so tests can compare a model's answer word for word.
"""

from __future__ import annotations

import hashlib
from random import Random

import attrs

HELD_OUT_ONE_IN = 20


@attrs.frozen
class Turn:
    """A question and its only right answer."""

    question: str
    answer: str
    follows: bool = False
    """Depends on earlier turns, such as ``And of Italy?``."""


@attrs.frozen
class Sample:
    """A chat, or a single bare question if ``raw``."""

    skill: str
    turns: tuple[Turn, ...]
    system: str = ""
    raw: bool = False
    """Plain text without the chat template: question, line break, answer."""
    tools: tuple[str, ...] = ()
    """The tools of the chat, each as JSON.  Calls are answers, and their results questions: see ``skills/tools.py``."""


def held_out(question: str) -> bool:
    """Whether ``question`` is held out from training: one in twenty, chosen by a hash of the text."""
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


def keys_of(sample: Sample) -> list[str]:
    """The key by which each turn is held out: its question, and all text before it if the turn depends on that."""
    said = [turn.question for turn in sample.turns]
    before = [sample.system, *sample.tools]
    return [
        "\n".join([*before, *said[: at + 1]]) if turn.follows else turn.question for at, turn in enumerate(sample.turns)
    ]


def kept_from_training(sample: Sample) -> bool:
    """Whether one of the turns is held out, which holds out the whole sample."""
    return any(held_out(key) for key in keys_of(sample))


_OPENINGS = ("Please tell me: ", "Tell me: ", "Quick question: ", "Hi! ", "Hello! ", "A question: ", "OK. ", "Now: ")
_CLOSINGS = (" Thanks!", " Thank you.", " Please.", " Answer briefly.")


def in_passing(rng: Random, question: str) -> str:
    """Vary a question the way people type: politely, carelessly, or unchanged."""
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
