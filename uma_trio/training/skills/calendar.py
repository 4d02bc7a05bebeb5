"""Days, months, seasons: the next one, the previous one, how many there are."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn, in_passing

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
SEASONS = ("spring", "summer", "autumn", "winter")
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
)

_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")


def in_words(number: int) -> str:
    """A number from 1 to 99 in words.

    >>> in_words(42)
    'forty-two'
    """
    if number < 20:
        return (*NUMBERS, *_TEENS)[number - 1]
    tens = _TENS[number // 10 - 2]
    return f"{tens}-{NUMBERS[number % 10 - 1]}" if number % 10 else tens


_AMOUNTS = {
    ("days", "a week"): "A week has 7 days.",
    ("months", "a year"): "A year has 12 months.",
    ("weeks", "a year"): "A year has 52 weeks.",
    ("days", "a year"): "A year has 365 days, and 366 in a leap year.",
    ("hours", "a day"): "A day has 24 hours.",
    ("minutes", "an hour"): "An hour has 60 minutes.",
    ("seconds", "a minute"): "A minute has 60 seconds.",
    ("seasons", "a year"): "A year has 4 seasons.",
}


def _neighbour(rng: Random, names: tuple[str, ...], kind: str) -> Turn:
    at = rng.randrange(len(names))
    name = names[at]
    if rng.random() < 0.5:
        ask = rng.choice(
            (
                "What {0} comes after {1}?",
                "Which {0} comes after {1}?",
                "Which {0} follows {1}?",
                "What is the {0} after {1}?",
                "Name the {0} after {1}.",
                "What {0} is next after {1}?",
                "What {0} is after {1}?",
                "{1} comes before which {0}?",
            )
        )
        answer = f"{names[(at + 1) % len(names)]} comes after {name}."
    else:
        ask = rng.choice(
            (
                "What {0} comes before {1}?",
                "Which {0} comes before {1}?",
                "What is the {0} before {1}?",
                "Name the {0} before {1}.",
                "Which {0} is just before {1}?",
            )
        )
        answer = f"{names[at - 1]} comes before {name}."
    return Turn(in_passing(rng, ask.format(kind, name)), answer[0].upper() + answer[1:])


def _days_away(rng: Random) -> Turn:
    at, count, back = rng.randrange(7), rng.randint(1, 10), rng.random() < 0.4
    far = f"{NUMBERS[count - 1]} day{'s' if count > 1 else ''} {'before' if back else 'after'} {DAYS[at]}"
    ask = rng.choice(("What day is it {}?", "Which day is {}?", "What day is {}?", "Tell me the day {}."))
    day = DAYS[(at - count if back else at + count) % 7]
    return Turn(in_passing(rng, ask.format(far)), f"{far.capitalize().replace(DAYS[at].lower(), DAYS[at])} is {day}.")


def _from_today(rng: Random) -> Turn:
    at = rng.randrange(7)
    step, word = rng.choice(((1, "tomorrow"), (-1, "yesterday")))
    ask = rng.choice(
        (
            "If today is {0}, what is {1}?",
            "Today is {0}. What day {2} {1}?",
            "Suppose it is {0} today. What day {2} {1}?",
        )
    )
    verb = "is" if step > 0 else "was"
    question = ask.format(DAYS[at], word, verb)
    return Turn(in_passing(rng, question), f"If today is {DAYS[at]}, {word} {verb} {DAYS[(at + step) % 7]}.")


def _month_length(rng: Random) -> Turn:
    at = rng.randrange(12)
    ask = rng.choice(
        ("How many days does {} have?", "How many days are in {}?", "How long is {}?", "How many days has {}?")
    )
    answer = f"{MONTHS[at]} has {_LENGTHS[at]} days."
    if at == 1:
        answer = "February has 28 days, and 29 in a leap year."
    return Turn(in_passing(rng, ask.format(MONTHS[at])), answer)


def _nth(rng: Random) -> Turn:
    names, kind, whole = rng.choice(((DAYS, "day", "week"), (MONTHS, "month", "year")))
    at = rng.randrange(len(names))
    if rng.random() < 0.15:
        word, at = rng.choice((("last", -1), ("first", 0)))
        ask = rng.choice(
            ("What is the {0} {1} of the {2}?", "Which {1} is the {0} of the {2}?", "Name the {0} {1} of the {2}.")
        )
        return Turn(in_passing(rng, ask.format(word, kind, whole)), f"The {word} {kind} of the {whole} is {names[at]}.")
    if rng.random() < 0.6:
        ask = rng.choice(
            ("What is the {0} {1} of the {2}?", "Which {1} is the {0} of the {2}?", "Name the {0} {1} of the {2}.")
        )
        return Turn(
            in_passing(rng, ask.format(ORDINALS[at], kind, whole)),
            f"The {ORDINALS[at]} {kind} of the {whole} is {names[at]}.",
        )
    ask = rng.choice(("Which number is {0} in the {1}?", "What number in the {1} is {0}?", "Where in the {1} is {0}?"))
    return Turn(
        in_passing(rng, ask.format(names[at], whole)), f"{names[at]} is the {ORDINALS[at]} {kind} of the {whole}."
    )


def _whole_list(rng: Random) -> Turn:
    names, what = rng.choice(
        ((DAYS, "days of the week"), (MONTHS, "months of the year"), (SEASONS, "seasons of the year"))
    )
    ask = rng.choice(
        (
            "Name the {}.",
            "List the {}.",
            "What are the {}?",
            "Tell me the {}.",
            "Say the {} in order.",
            "Can you list the {}?",
        )
    )
    listed = ", ".join(names)
    return Turn(in_passing(rng, ask.format(what)), f"The {what} are {listed}.")


def _amount(rng: Random) -> Turn:
    (what, whole), answer = rng.choice(tuple(_AMOUNTS.items()))
    ask = rng.choice(
        (
            "How many {0} are in {1}?",
            "How many {0} are there in {1}?",
            "How many {0} does {1} have?",
            "{1} has how many {0}?",
        )
    )
    question = ask.format(what, whole)
    return Turn(in_passing(rng, question[0].upper() + question[1:]), answer)


def calendar(rng: Random) -> Turn:
    """A question about days, months or seasons."""
    kind = rng.choices(range(9), weights=(5, 4, 1, 6, 4, 3, 4, 1, 2))[0]
    if kind == 0:
        return _neighbour(rng, DAYS, "day")
    if kind == 1:
        return _neighbour(rng, MONTHS, "month")
    if kind == 2:
        return _neighbour(rng, SEASONS, "season")
    return (_days_away, _from_today, _month_length, _nth, _whole_list, _amount)[kind - 3](rng)
