"""Fields of HTTP requests that the table of ``protocol/parameters.py`` has, under the names that a dialect gives them."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from uma_trio.gateway.errors import FieldNames
from uma_trio.protocol.parameters import ROWS, Field


class ModelQuery(msgspec.Struct, kw_only=True):
    """Parameters of a query that is about a model."""

    model: Annotated[str | None, Meta(description="A model; without it, the daemon's first.")] = None


T = TypeVar("T", bound=type[msgspec.Struct])


def with_fields_of(dialect: str) -> Callable[[T], T]:
    """Decorate the body of a request: it gets the fields of ``dialect`` that it does not declare itself.

    The daemon checks their bounds.
    """

    def extend(cls: T) -> T:
        fields = [
            (name, Annotated[typing.Union[*row.kinds, None], Meta(description=row.plain_help)], None)
            for row in ROWS
            for name in row.names_in(dialect)
            if name not in cls.__struct_fields__
        ]
        namespace = {"__doc__": cls.__doc__}
        extended: Any = msgspec.defstruct(
            cls.__name__, fields, bases=(cls,), module=cls.__module__, namespace=namespace, kw_only=True
        )
        return extended  # type: ignore[no-any-return]

    return extend


def fields_of(body: msgspec.Struct, dialect: str) -> dict[str, Any]:
    """The fields that ``body`` gives, in the socket protocol.  One that is ``None`` is not limited, or left to chance."""
    fields: dict[str, Any] = {}
    for row, name in _rows_by_name(dialect):
        value = getattr(body, name)
        if value is not None and row.name not in fields:
            fields[row.name] = row.from_client(value)
    return fields


@functools.cache
def _rows_by_name(dialect: str) -> list[tuple[Field, str]]:
    """Each name of each row in ``dialect``."""
    return [(row, name) for row in ROWS for name in row.names_in(dialect)]


def names_of(dialect: str) -> FieldNames:
    """What the fields are called in ``dialect``, where that is something else."""
    names = {row.name: row.names_in(dialect) for row in ROWS}
    return {
        ours: theirs[0] if len(theirs) == 1 else theirs for ours, theirs in names.items() if theirs not in ((), (ours,))
    }
