"""What tools return, and the sentence about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random

from uma_trio.training.skills import records, repeating
from uma_trio.training.skills.tool_kinds import Value
from uma_trio.training.tool_format import written
from uma_trio.training.words import ADJECTIVES, CITIES, OBJECTS, any_name, made_up, sentence


def _field(rng: Random, name: str) -> object:
    choices: dict[str, Callable[[], object]] = {
        "sky": lambda: rng.choice(("sunny", "cloudy", "rain", "snow", "clear", "windy", "fog")),
        "status": lambda: rng.choice(("ok", "done", "sent", "set", "saved", "accepted")),
        "currency": lambda: rng.choice(("EUR", "USD", "GBP")),
        "title": lambda: sentence(rng, rng.randint(1, 4)),
        "text": lambda: sentence(rng, rng.randint(1, 8)),
        "name": lambda: any_name(rng),
        "city": lambda: rng.choice(CITIES),
        "capital": lambda: rng.choice(CITIES) if rng.random() < 0.5 else made_up(rng, 2).capitalize(),
        "time": lambda: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
        "date": lambda: f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "flight": lambda: f"{rng.choice('ABCDEFGHIJK')}{rng.choice('LMNOPQRS')}{rng.randint(10, 999)}",
    }
    return (
        choices[name]()
        if name in choices
        else rng.randint(0, 99)
        if rng.random() < 0.7
        else rng.randint(-500, 9999) / 10
    )


def returned(rng: Random, names: str, arguments: Mapping[str, Value]) -> str:
    """What a tool returns: JSON or text.

    Args:
        names: fields of it, separated by spaces; ``list`` for a list, and empty for anything.
        arguments: those of the call.  The result may repeat one of them.
    """
    kind = rng.random()
    if kind < 0.06:
        return written(
            {"error": rng.choice((sentence(rng, rng.randint(1, 5)), "not found", "no such place", "timeout"))}
        )
    fields = names.split()
    if fields == ["list"] and kind < 0.8:
        return written(
            [rng.choice((any_name(rng), rng.choice(OBJECTS), made_up(rng, 2))) for _ in range(rng.randint(1, 6))]
        )
    if fields and fields != ["list"] and kind < 0.6:
        kept = rng.sample(fields, rng.randint(1, len(fields)))
        record: dict[str, object] = {name: _field(rng, name) for name in kept}
        if arguments and rng.random() < 0.3:
            record = {**dict([rng.choice(tuple(arguments.items()))]), **record}
        return written(record)
    if kind < 0.75:
        return written(records.free(rng))
    if kind < 0.85:
        return written(_field(rng, ""))
    words = sentence(rng, rng.randint(1, 10)) if rng.random() < 0.6 else " ".join(repeating.any_words(rng, 10))
    return rng.choice((
        words,
        f"{words.capitalize()}.",
        f"{rng.randint(-20, 40)} degrees and {rng.choice(('sunny', 'cloudy', 'windy', rng.choice(ADJECTIVES)))}",
        rng.choice(("Done.", "OK", "done", "Sent.", "Saved.", "It is done.")),
    ))  # fmt: skip


def answer_to(result: str) -> str:
    """The sentence about a tool's result.  Follows from the result alone.

    >>> answer_to('{"temperature": 21, "sky": "clear"}')
    'The temperature is 21 and the sky is clear.'
    """
    try:
        value = json.loads(result)
    except ValueError:
        return result
    if isinstance(value, dict) and "error" in value:
        return f"The call failed: {_shown(value['error'])}."
    if isinstance(value, dict):
        parts = [f"the {key.replace('_', ' ')} is {_shown(one)}" for key, one in value.items()]
        return f"T{_joined(parts)[1:]}." if parts else "There is no result."
    if isinstance(value, list) and len(value) != 1:
        return f"The results are {_joined([_shown(one) for one in value])}." if value else "There is no result."
    return f"The result is {_shown(value[0] if isinstance(value, list) else value)}."


def _shown(value: object) -> str:
    return value if isinstance(value, str) else written(value)


def _joined(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
