"""Small JSON records: fill one, read one, change one field."""

from __future__ import annotations

from random import Random

from uma_trio.training.sample import Turn
from uma_trio.training.tool_format import written
from uma_trio.training.words import (
    ADJECTIVES,
    CITIES,
    FOODS,
    OBJECTS,
    SURNAMES,
    accented,
    any_name,
    made_up,
    made_up_place,
)

Value = str | int | bool
Record = dict[str, Value]


def _text(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(OBJECTS)
    if kind < 0.75:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
    if kind < 0.93:
        return made_up(rng, rng.randint(1, 3))
    return accented(rng)


def person(rng: Random) -> Record:
    city = rng.choice(CITIES) if rng.random() < 0.6 else made_up_place(rng)
    return {"name": any_name(rng), "age": rng.randint(1, 99), "city": city, "likes": rng.choice(FOODS)}


def _book(rng: Random) -> Record:
    title = f"The {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
    return {
        "title": title,
        "author": f"{any_name(rng)} {rng.choice(SURNAMES)}",
        "pages": rng.randint(20, 999),
        "lent": rng.random() < 0.5,
    }


def _order(rng: Random) -> Record:
    return {"item": _text(rng), "count": rng.randint(1, 99), "price": rng.randint(1, 999), "paid": rng.random() < 0.5}


def _sensor(rng: Random) -> Record:
    return {
        "id": rng.randint(1, 999),
        "room": rng.choice(OBJECTS),
        "degrees": rng.randint(0, 99),
        "online": rng.random() < 0.5,
    }


def free(rng: Random) -> Record:
    keys = [rng.choice(OBJECTS) if rng.random() < 0.5 else made_up(rng, 2) for _ in range(rng.randint(1, 7))]
    return {key: rng.choice((_text(rng), _text(rng), rng.randint(0, 999), rng.random() < 0.5)) for key in keys}


_KINDS = {"person": person, "book": _book, "order": _order, "sensor": _sensor}


def _any(rng: Random) -> tuple[str, Record]:
    if rng.random() < 0.25:
        return "thing", free(rng)
    kind = rng.choice(tuple(_KINDS))
    record = _KINDS[kind](rng)
    if rng.random() < 0.25:
        kept = rng.sample(tuple(record), rng.randint(1, len(record)))
        record = {key: record[key] for key in kept}
    return kind, record


def _said(value: Value) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def fill(rng: Random) -> Turn:
    """Turn fields in words into a JSON record.  ``yes`` and ``no`` become true and false."""
    kind, record = _any(rng)
    if kind == "person" and len(record) == 4 and rng.random() < 0.5:
        ask = rng.choice(
            (
                "Make a JSON record for {name}, {age}, from {city}, who likes {likes}.",
                "Write JSON: {name} is {age} years old, lives in {city} and likes {likes}.",
                "{name} is {age}, comes from {city} and likes {likes}. Give me that as JSON.",
            )
        )
        return Turn(ask.format(**record), written(record))
    if kind == "order" and len(record) == 4 and rng.random() < 0.4:
        record["paid"] = rng.random() < 0.5
        state = "paid" if record["paid"] else "not paid"
        return Turn(
            f"Make a JSON record for an order: {record['count']} x {record['item']} at {record['price']}, {state}.",
            written(record),
        )
    link = rng.choice((" ", ": ", " = ", "="))
    said = [f"{key}{link}{_said(value)}" for key, value in record.items()]
    fields = ", ".join(said)
    if len(said) > 1 and rng.random() < 0.3:
        fields = f"{', '.join(said[:-1])} and {said[-1]}"
    if rng.random() < 0.3:
        ask = rng.choice(
            (
                "Give me a JSON object with {}.",
                "Write JSON with {}.",
                "Make JSON: {}.",
                "Return JSON with the fields {}.",
                "Write a JSON record with {}.",
            )
        )
        return Turn(ask.format(fields), written(record))
    a_kind = ("an " if kind == "order" else "a ") + kind
    ask = rng.choice(
        (
            "Make a JSON record for {}: {}.",
            "Write {} as JSON: {}.",
            "Fill a JSON record for {}: {}.",
            "Give me JSON for {} with {}.",
        )
    )
    return Turn(ask.format(a_kind, fields), written(record))


def change(rng: Random) -> Turn:
    """Change or remove one field of a record."""
    _, record = _any(rng)
    key = rng.choice(tuple(record))
    if len(record) > 2 and rng.random() < 0.2:
        ask = rng.choice(("Remove {} from this record: {}", "Delete the field {} in this record: {}"))
        return Turn(
            ask.format(key, written(record)), written({name: value for name, value in record.items() if name != key})
        )
    old = record[key]
    new: Value = (not old) if isinstance(old, bool) else rng.randint(0, 999) if isinstance(old, int) else _text(rng)
    ask = rng.choice(
        (
            "Change {} to {} in this record: {}",
            "Set {} to {} in this record: {}",
            "Write this record again with {} changed to {}: {}",
        )
    )
    return Turn(
        ask.format(key, _said(new) if not isinstance(new, bool) else written(new), written(record)),
        written({**record, key: new}),
    )


def _names(rng: Random, amount: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < amount:
        names[any_name(rng)] = None
    return list(names)


def change_in_list(rng: Random, longest: int = 6) -> Turn:
    """Repeat a list of people with one field of one person changed.  Mostly copying."""
    names = _names(rng, rng.randint(2, longest))
    people = [{**person(rng), "name": name} for name in names]
    at = rng.randrange(len(people))
    key = rng.choice(("age", "city", "likes"))
    new = person(rng)[key]
    ask = rng.choice(("In this list, change the {1} of {0} to {2}: {3}", "Set the {1} of {0} to {2} in this list: {3}"))
    changed = [{**one, key: new} if place == at else one for place, one in enumerate(people)]
    return Turn(ask.format(names[at], key, new, written(people)), written(changed))


def look_up(rng: Random) -> Turn:
    """Read one value from a record or a list."""
    if rng.random() < 0.5:
        _, record = _any(rng)
        key = rng.choice(tuple(record))
        ask = rng.choice(("What is the {} in {}?", "What is the {} in this record: {}", "Read the {} from {}"))
        return Turn(ask.format(key, written(record)), f"The {key} is {written(record[key]).strip(chr(34))}.")
    names = _names(rng, rng.randint(2, 6))
    people = [{**person(rng), "name": name} for name in names]
    one = rng.choice(people)
    key = rng.choice(("age", "city", "likes"))
    return Turn(
        f"What is the {key} of {one['name']} in this list: {written(people)}",
        f"The {key} of {one['name']} is {one[key]}.",
    )


def array(rng: Random) -> Turn:
    """Turn words into a JSON array, or repeat a record."""
    if rng.random() < 0.3:
        text = written(_any(rng)[1])
        return Turn(
            rng.choice(("Return this JSON: {}", "Repeat this JSON: {}", "Return JSON: {}", "Repeat: {}")).format(text),
            text,
        )
    words = [_text(rng) for _ in range(rng.randint(1, 12))]
    ask = rng.choice(("Write these as a JSON array: {}", "Make a JSON array of: {}", "Turn this into a JSON list: {}"))
    return Turn(ask.format(", ".join(words)), written(words))
