"""Chats of several turns.  Later turns may depend on earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from uma_trio.training.sample import Sample, Turn
from uma_trio.training.skills import numbers
from uma_trio.training.skills.about import about
from uma_trio.training.skills.calendar import DAYS, MONTHS, calendar
from uma_trio.training.skills.capitals import (
    COUNTRIES,
    capital,
    capital_answer,
    continent,
    continent_answer,
)
from uma_trio.training.skills.colours import colour
from uma_trio.training.skills.greetings import NAME_QUESTIONS, greet, introduce
from uma_trio.training.skills.records import array, change, fill
from uma_trio.training.skills.repeating import pick, repeat
from uma_trio.training.skills.spelling import spell, spelled
from uma_trio.training.skills.stories import tell
from uma_trio.training.skills.unknown import gibberish, unknown
from uma_trio.training.words import OBJECTS, any_name

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer in one sentence.",
    "Be brief.",
    "You are uma-trio.",
    "You are a friendly assistant. Answer the user's questions.",
    "Answer truthfully.",
    "Help the user.",
    "You are a test.",
    "Be kind and exact.",
    "You are a terse assistant.",
    "You answer questions.",
    "Be concise.",
    "You are an assistant in a terminal.",
    "Always be polite.",
    "You are a helpful assistant. Answer as concisely as possible.",
    "Be helpful, honest and harmless.",
    "You are running on a CPU.",
    "Follow the user's instructions.",
    "Think before you answer.",
    "You speak English.",
    "The user is a developer who tests a server.",
)
"""System messages.  None of them changes an answer."""


def _hello(rng: Random) -> Turn:
    return greet(rng, named=False)


_SINGLE: tuple[Callable[[Random], Turn], ...] = (
    capital,
    continent,
    calendar,
    colour,
    about,
    spell,
    numbers.add,
    numbers.subtract,
    numbers.compare,
    repeat,
    pick,
    _hello,
    unknown,
    fill,
    change,
    array,
    tell,
    numbers.count,
)


def any_system(rng: Random) -> str:
    """A system message that changes no answer: a common one, or random words."""
    return rng.choice(SYSTEMS) if rng.random() < 0.8 else gibberish(rng, rng.randint(2, 60))


def single(rng: Random) -> Turn:
    """A turn of any short skill, independent of other turns."""
    return rng.choice(_SINGLE)(rng)


def conversation(rng: Random, longest: int = 6) -> Sample:
    """A chat of two to ``longest`` turns.  About every third refers to an earlier one."""
    turns: list[Turn] = []
    system = any_system(rng) if rng.random() < 0.4 else ""
    name = ""
    if rng.random() < 0.15:
        name = any_name(rng)
        system = f"{system} The user is called {name}.".strip()
    wanted = rng.randint(2, longest)
    while len(turns) < wanted:
        kind = rng.random()
        if kind < 0.45:
            turns.extend(rng.choice(_FOLLOWED)(rng))
        elif kind < 0.55 and not name:
            name = any_name(rng)
            turns.append(introduce(name, rng))
        elif kind < 0.70 and name:
            turns.append(Turn(rng.choice(NAME_QUESTIONS), f"Your name is {name}.", follows=True))
        elif kind < 0.80 and turns and len(turns[-1].answer) < 200:
            ask = rng.choice(
                ("Say that again.", "Repeat your last answer.", "Can you say that again?", "Once more, please.")
            )
            turns.append(Turn(ask, turns[-1].answer, follows=True))
        else:
            turns.append(single(rng))
    return Sample("conversation", tuple(turns), system=system)


def _countries(rng: Random) -> list[Turn]:
    ask, answer = rng.choice(
        (("What is the capital of {}?", capital_answer), ("On which continent is {}?", continent_answer))
    )
    first, *others = rng.sample(tuple(COUNTRIES), rng.randint(2, 4))
    again = ("And of {}?", "And {}?", "What about {}?", "Now {}.")
    turns = [Turn(ask.format(first), answer(first))]
    turns += [Turn(rng.choice(again).format(other), answer(other), follows=True) for other in others]
    if answer is capital_answer and rng.random() < 0.3:
        turns.append(Turn("Spell it.", spelled(COUNTRIES[others[-1]][0]), follows=True))
    return turns


def _what_comes_next(rng: Random) -> list[Turn]:
    names, kind = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    at, amount = rng.randrange(len(names)), rng.randint(2, 4)
    turns = []
    for step in range(amount):
        before, after = names[(at + step) % len(names)], names[(at + step + 1) % len(names)]
        ask = (
            f"Which {kind} comes after {before}?"
            if step == 0
            else rng.choice(("And after that?", "And then?", "What comes next?"))
        )
        turns.append(Turn(ask, f"{after} comes after {before}.", follows=step > 0))
    return turns


def _running_sum(rng: Random) -> list[Turn]:
    total, first = rng.randint(1, 400), rng.randint(1, 200)
    turns = [Turn(f"What is {total} + {first}?", numbers.add_answer(total, first))]
    total += first
    for _ in range(rng.randint(1, 3)):
        more = rng.randint(1, 99)
        ask = rng.choice(("Add {} to that.", "And {} more?", "Plus {}?", "Now add {}."))
        turns.append(Turn(ask.format(more), numbers.add_answer(total, more), follows=True))
        total += more
    return turns


def _counting_on(rng: Random) -> list[Turn]:
    first = rng.randint(0, 200)
    last = first + rng.randint(3, 12)
    further = last + rng.randint(3, 12)
    ask = rng.choice(("Go on to {}.", "Continue to {}.", "Now go on to {}."))
    return [
        Turn(f"Count from {first} to {last}.", numbers.count_answer(first, last)),
        Turn(ask.format(further), numbers.count_answer(last + 1, further), follows=True),
    ]


def _spell_again(rng: Random) -> list[Turn]:
    one, other = rng.sample(OBJECTS, 2)
    ask = rng.choice(("And {}?", "Now {}.", "What about {}?"))
    return [Turn(f"Spell {one}.", spelled(one)), Turn(ask.format(other), spelled(other), follows=True)]


_FOLLOWED = (_countries, _countries, _what_comes_next, _running_sum, _counting_on, _spell_again)
