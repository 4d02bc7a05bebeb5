"""Counting, arithmetic, comparing."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn, in_passing
from uma_trio.training.skills.calendar import in_words
from uma_trio.training.words import OBJECTS, made_up

LONGEST_COUNT = 300
"""Maximum of numbers in a count.  With three digits each, the answer has about 1,500 tokens."""
LONGEST_EVER = 990
"""The same in long rows.  The answer has nearly 5,000 tokens."""


def count_answer(first: int, last: int, step: int = 1, *, lines: bool = False) -> str:
    """``1, 2, 3.`` or one number per line.  Counts down if ``last`` is smaller.

    >>> count_answer(3, 1)
    '3, 2, 1.'
    """
    numbers = range(first, last + 1, step) if last >= first else range(first, last - 1, -step)
    return "\n".join(map(str, numbers)) if lines else ", ".join(map(str, numbers)) + "."


def _how_many(rng: Random, longest: int) -> int:
    """The length of a count: mostly short, sometimes up to ``longest``.  Very long ones are uniform."""
    if longest > LONGEST_COUNT:
        return rng.randint(LONGEST_COUNT, longest)
    kind = rng.random()
    if kind < 0.5:
        return rng.randint(2, min(20, longest))
    if kind < 0.8:
        return rng.randint(2, min(80, longest))
    return rng.randint(2, longest)


def count(rng: Random, longest: int = 60) -> Turn:
    """Count up or down, in steps, on one line or one number per line."""
    amount = _how_many(rng, longest)
    kind = rng.random()
    if kind < 0.3:
        first, last, step = 1, amount, 1
    elif kind < 0.6:
        first, step = rng.randint(0, 999 - amount), 1
        last = first + amount - 1
    elif kind < 0.75:
        last, step = rng.randint(0, 1) if rng.random() < 0.5 else rng.randint(0, 999 - amount), 1
        first = last + amount - 1
    else:
        step = rng.choice((2, 3, 5, 10))
        amount = min(amount, 900 // step)
        first = rng.choice((0, step, rng.randint(0, 990 - step * amount) if step * amount < 990 else 0))
        last = first + (amount - 1) * step
    down = last < first
    if first == 1 and not down and step == 1 and rng.random() < 0.4:
        ask = rng.choice(("Count to {1}", "Count up to {1}", "Please count to {1}", "Can you count to {1}?"))
    elif down:
        ask = rng.choice(
            ("Count down from {0} to {1}", "Count backwards from {0} to {1}", "Count from {0} down to {1}")
        )
    else:
        ask = rng.choice(
            (
                "Count from {0} to {1}",
                "Count up from {0} to {1}",
                "Please count from {0} to {1}",
                "Say the numbers from {0} to {1}",
                "List the numbers from {0} to {1}",
            )
        )
    if down and last == 1 and rng.random() < 0.5:
        ask = rng.choice(("Count down from {0}", "Count backwards from {0}", "Count down from {0} to 1"))
    if 0 < first < 100 and 0 < last < 100 and rng.random() < 0.2:
        question = ask.format(in_words(first), in_words(last)).rstrip("?")
    else:
        question = ask.format(first, last).rstrip("?")
    if step > 1:
        question += rng.choice((f" in steps of {step}", f" by {step}s"))
    lines = rng.random() < 0.25
    if lines:
        question += rng.choice((", one number per line", ", one per line", ", each on its own line"))
    question += "?" if ask.endswith("?") else "."
    return Turn(in_passing(rng, question), count_answer(first, last, step, lines=lines))


def numbered(rng: Random, longest: int = 30) -> Turn:
    """``Write the word lamp 3 times, numbered.``: a long answer whose length is in the prompt."""
    word = rng.choice(OBJECTS) if rng.random() < 0.6 else made_up(rng, rng.randint(1, 3))
    amount = _how_many(rng, longest)
    ask = rng.choice(
        (
            "Write the word {} {} times, numbered.",
            "Make a numbered list with the word {} {} times.",
            "Write {} {} times as a numbered list.",
        )
    )
    return Turn(in_passing(rng, ask.format(word, amount)), "\n".join(f"{at}. {word}" for at in range(1, amount + 1)))


def _digits(rng: Random) -> int:
    return rng.randint(0, rng.choice((9, 99, 999, 999, 999, 999, 9999)))


def add_answer(one: int, other: int) -> str:
    return f"{one} + {other} = {one + other}."


def add(rng: Random) -> Turn:
    """Add two or three numbers, mostly of up to three digits."""
    one, other = _digits(rng), _digits(rng)
    if rng.random() < 0.05:
        one, other = rng.randint(1, 12), rng.randint(1, 12)
        ask = rng.choice(("What is {} plus {}?", "Add {} and {}.", "How much is {} plus {}?"))
        return Turn(in_passing(rng, ask.format(in_words(one), in_words(other))), add_answer(one, other))
    if rng.random() < 0.15:
        most = rng.choice((9, 20, 99))
        three = [rng.randint(1, most) for _ in range(3)]
        ask = rng.choice(("What is {} + {} + {}?", "{} + {} + {}", "Add {}, {} and {}.", "{}+{}+{}"))
        return Turn(in_passing(rng, ask.format(*three)), f"{three[0]} + {three[1]} + {three[2]} = {sum(three)}.")
    ask = rng.choice(
        (
            "{}+{}",
            "What is {}+{}?",
            "{}+{}=",
            "What is {} + {}?",
            "What is {} plus {}?",
            "Add {} and {}.",
            "How much is {} + {}?",
            "{} + {} = ?",
            "{} + {}",
            "Calculate {} + {}.",
            "What is the sum of {} and {}?",
            "How much is {} plus {}?",
        )
    )
    return Turn(in_passing(rng, ask.format(one, other)), add_answer(one, other))


def subtract(rng: Random) -> Turn:
    """Subtract the smaller number from the larger one."""
    other, one = sorted((_digits(rng), _digits(rng)))
    ask = rng.choice(
        (
            "What is {} - {}?",
            "What is {} minus {}?",
            "{} - {}",
            "{}-{}",
            "How much is {} - {}?",
            "Calculate {} - {}.",
            "How much is {} minus {}?",
        )
    )
    return Turn(in_passing(rng, ask.format(one, other)), f"{one} - {other} = {one - other}.")


def multiply(rng: Random) -> Turn:
    """Multiply numbers from one to twelve."""
    one, other = rng.randint(1, 12), rng.randint(1, 12)
    ask = rng.choice(
        (
            "What is {} x {}?",
            "What is {} times {}?",
            "{} * {}",
            "What is {} * {}?",
            "{}*{}",
            "How much is {} times {}?",
            "Multiply {} and {}.",
        )
    )
    return Turn(in_passing(rng, ask.format(one, other)), f"{one} x {other} = {one * other}.")


def compare(rng: Random) -> Turn:
    one, other = _digits(rng), _digits(rng)
    if one == other:
        other = one + 1
    if rng.random() < 0.5:
        word, result = rng.choice(("bigger", "larger")), max(one, other)
    else:
        word, result = "smaller", min(one, other)
    ask = rng.choice(
        (
            "Which is {}, {} or {}?",
            "What is {}, {} or {}?",
            "Which number is {}, {} or {}?",
            "Which number is {}: {} or {}?",
        )
    )
    return Turn(in_passing(rng, ask.format(word, one, other)), f"{result} is {word} than {one + other - result}.")
