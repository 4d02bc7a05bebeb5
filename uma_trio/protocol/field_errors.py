"""Says in plain words what is wrong with a field: which one, what it may be, and what it was."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import attrs
import msgspec
from msgspec import inspect

from uma_trio.errors import BadRequest
from uma_trio.protocol.parameters import MAX_INT32, in_steps
from uma_trio.protocol.types import MAX_ERROR_CHARS, ONE_LINE

WORDS: Final = "words"
"""In ``Meta.extra`` of a type with a pattern: what it is, in words."""

MAX_SHOWN_CHARS: Final = 40
"""A longer text is not quoted."""

ERROR: Final = re.compile(r"(.*?)(?: - at (`key` in )?`\$([^`]*)`)?", re.DOTALL)
"""What msgspec says: what is wrong, and where."""
MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
OF_TYPES: Final = re.compile(r"Expected |Invalid enum value|Invalid value |\w+ value out of range|Number out of range")
"""Begins an error that the type of the field explains better."""
STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")

UNKNOWN: Final = object()

PLURALS: Final = {
    inspect.StrType: "texts",
    inspect.IntType: "whole numbers",
    inspect.FloatType: "numbers",
    inspect.StructType: "objects",
    inspect.DataclassType: "objects",
    inspect.DictType: "objects",
}


@attrs.frozen
class FieldError:
    """What is wrong with a field.

    Args:
        field: its place, as in ``messages[0].role``; ``None`` for the object as a whole.
        message: a sentence that names the field.
    """

    field: str | None
    message: str


T = TypeVar("T")


def convert(fields: dict[str, Any], cls: type[T], *, str_keys: bool = False) -> T:
    """Convert decoded fields to a message.

    Args:
        str_keys: the keys of objects are text, also where ``cls`` has numbers.

    Raises:
        BadRequest: names the field.
    """
    try:
        return msgspec.convert(fields, cls, str_keys=str_keys)
    except msgspec.ValidationError as error:
        wrong = explain(error, cls, fields)
        raise BadRequest(wrong.message[:MAX_ERROR_CHARS], field=wrong.field) from None


def explain(error: msgspec.ValidationError, cls: type, given: object) -> FieldError:
    """Explain why ``given`` could not be converted to ``cls``."""
    match = ERROR.fullmatch(str(error))
    assert match is not None
    what, is_key, path = match[1], match[2] is not None, match[3] or ""
    if missing := MISSING.fullmatch(what):
        path = f"{path}.{missing[1]}"
    steps = [step.groups() for step in STEP.finditer(path)]
    type_, value = _walk(_type_info(cls), steps), _value_at(given, steps)
    field = path.removesuffix("[...]").removeprefix(".") or None
    name = field or "the request"
    if missing:
        wanted = "one" if isinstance(_without_metadata(type_), inspect.AnyType) else _described(type_)
        return FieldError(field, f"{name} is missing; give {wanted}")
    if not OF_TYPES.match(what):
        return FieldError(field, f"{name}: {what}" if field else what)
    if is_key:
        allowed = _described(_without_metadata(type_).key_type) if _is_dict(type_) else "texts"
        return FieldError(field, f"each key of {name} must be {allowed}")
    if path.endswith("[...]"):
        return FieldError(field, f"each value of {name} must be {_described(type_)}")
    return FieldError(field, f"{name} must be {_described(type_, value)}, not {_shown(value)}")


# -- unknown fields -------------------------------------------------------------------------------------


MAX_NAMED: Final = 20
"""Unknown fields that warnings name."""


def unknown_fields(fields: Mapping[str, Any], cls: type) -> list[str]:
    """A warning for each of ``fields`` that a message of the type ``cls`` does not have, those inside objects included."""
    unknown = list(_unknown(fields, _type_info(cls), ""))
    shown = [
        f"the field {place + name[:100]!r} is not known and had no effect{did_you_mean(name, known, place)}"
        for place, name, known in unknown[:MAX_NAMED]
    ]
    more = len(unknown) - len(shown)
    return [*shown, f"{more} more of them are not known"] if more else shown


def did_you_mean(name: str, known: Iterable[str], place: str = "") -> str:
    """A question for the one of ``known`` that resembles ``name``, as the end of a sentence; empty if none does."""
    known = list(known)
    begin_so = [candidate for candidate in known if len(name) > 2 and candidate.startswith(name)]
    similar = begin_so or difflib.get_close_matches(name[:100], known, n=1)
    return f"; did you mean {place}{similar[0]}?" if similar else ""


def _unknown(fields: Mapping[str, Any], type_: inspect.Type, place: str) -> Iterator[tuple[str, str, list[str]]]:
    """Place, name and known names of each.  Does not look into lists: there may be a million of items."""
    types = [member for member in _members(type_) if isinstance(member, inspect.StructType | inspect.DataclassType)]
    if len(types) != 1:
        return
    known = {field.encode_name: field.type for field in types[0].fields}
    names = list(known)
    for name, value in fields.items():
        if name not in known:
            if place or name not in ("type", "event"):
                yield place, name, names
        elif isinstance(value, dict):
            yield from _unknown(value, known[name], f"{place}{name}.")


@functools.cache
def _type_info(cls: type) -> inspect.Type:
    return inspect.type_info(cls)


# -- places ---------------------------------------------------------------------------------------------


def _walk(type_: inspect.Type, steps: list[tuple[str | None, ...]]) -> inspect.Type:
    """The type at the end of ``steps``; any type, if they cannot be followed."""
    for name, _, _ in steps:
        members = [next_ for member in _members(type_) if (next_ := _next(member, name)) is not None]
        if not members:
            return inspect.AnyType()
        type_ = members[0]
    return type_


def _next(type_: inspect.Type, name: str | None) -> inspect.Type | None:
    """The type of a field, of the items of a list, or of the values of an object."""
    match type_:
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            return next((field.type for field in fields if field.encode_name == name), None)
        case inspect.ListType(item_type=item) | inspect.DictType(value_type=item) if name is None:
            return item
    return None


def _members(type_: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union; otherwise the type itself.  One that has ``WORDS`` keeps them."""
    if isinstance(type_, inspect.Metadata) and WORDS in (type_.extra or {}):
        yield type_
        return
    type_ = _without_metadata(type_)
    if isinstance(type_, inspect.UnionType):
        for member in type_.types:
            yield from _members(member)
    else:
        yield type_


def _without_metadata(type_: inspect.Type) -> Any:
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    return type_


def _is_dict(type_: inspect.Type) -> bool:
    return isinstance(_without_metadata(type_), inspect.DictType)


def _value_at(value: Any, steps: list[tuple[str | None, ...]]) -> object:
    for name, index, _ in steps:
        if name is not None and isinstance(value, dict) and name in value:
            value = value[name]
        elif index is not None and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return UNKNOWN
    return value


# -- words ----------------------------------------------------------------------------------------------


def _described(type_: inspect.Type, value: object = UNKNOWN) -> str:
    """What a value of this type is.  ``value`` is one that it is not."""
    descriptions = [
        _described_one(member, value) for member in _members(type_) if not isinstance(member, inspect.NoneType)
    ]
    return " or ".join(dict.fromkeys(descriptions)) or "null"


def _described_one(type_: inspect.Type, value: object) -> str:
    match type_:
        case inspect.Metadata(extra={"words": str(words)}):
            return words
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=int(least), le=int(most), multiple_of=int(step)):
            return in_steps(least, most, step)
        case inspect.IntType():
            return f"a whole number{_bounds(type_, value)}"
        case inspect.FloatType():
            return f"a number{_bounds(type_, value)}"
        case inspect.StrType():
            return f"a text{_lengths(type_, 'characters')}{_pattern(type_, value)}"
        case inspect.LiteralType(values=values):
            shown = [f"'{value}'" if isinstance(value, str) else str(value) for value in values]
            return f"one of {', '.join(shown)}" if len(shown) > 1 else shown[0]
        case inspect.ListType():
            items = " or ".join(
                dict.fromkeys(PLURALS.get(type(member), "items") for member in _members(type_.item_type))
            )
            lengths = _lengths(type_, items)
            return f"a list{lengths}" if lengths else f"a list of {items}"
        case inspect.DictType():
            return f"an object{_lengths(type_, 'fields')}"
        case inspect.StructType() | inspect.DataclassType():
            return "an object"
    return "another value"


def _bounds(of: inspect.IntType | inspect.FloatType, value: object) -> str:
    least, above, most = of.ge, of.gt, of.le
    if most is not None and most >= MAX_INT32 and not _exceeds(value, most):  # as good as none
        most = None
    to = "" if most is None else f"to {_number(most)}"
    if above is not None:
        return f" above {_number(above)}" + (f", up {to}" if to else "")
    if least is not None:
        return f" from {_number(least)} {to}" if to else f", {_number(least)} or more"
    return f" up {to}" if to else ""


def _exceeds(value: object, most: float) -> bool:
    """Whether ``value`` is a number above ``most``; in the query of a URL it is a text."""
    try:
        return isinstance(value, int | str) and float(value) > most
    except (ValueError, OverflowError):  # no number, or an integer of more than 308 digits
        return isinstance(value, int) and value > 0


def _number(value: float) -> str:
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def _lengths(of: inspect.StrType | inspect.ListType | inspect.DictType, unit: str) -> str:
    least, most = of.min_length, of.max_length
    if least and most:
        return f" of {least} to {most} {unit}"
    if most is not None:
        return f" of at most {most} {unit}"
    return f" of at least {least} {unit}" if least else ""


def _pattern(of: inspect.StrType, value: object) -> str:
    if of.pattern == ONE_LINE:
        fits = not isinstance(value, str) or re.search(ONE_LINE, value)
        return "" if fits else " without control characters"
    return "" if of.pattern is None else f" that matches {of.pattern.replace(chr(92) + 'Z', '$')}"


def _shown(value: object) -> str:
    """A value of JSON, short."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str() if not value or len(value) > MAX_SHOWN_CHARS:
            return f"a text of {len(value)} characters" if value else "an empty text"
        case str():
            return f"the text {value!r}"
        case int() if abs(value) > 10**MAX_SHOWN_CHARS:
            return "a number with many digits"
        case int() | float():
            return str(value)
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return f"an object of {len(value)} fields" if value else "an empty object"
    return "this"
