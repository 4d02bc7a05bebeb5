"""Sampling parameters as fields of HTTP requests, from the table of ``protocol/parameters.py``."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from uma_trio.protocol.parameters import PARAMETERS

T = TypeVar("T", bound=type[msgspec.Struct])


def sampled(cls: T) -> T:
    """Decorate the body of a request: it gets a field for each name of each sampling parameter."""
    fields = [
        (name, Annotated[row.type, Meta(description=row.help)] | None, None)
        for row in PARAMETERS
        for name in row.http_names
    ]
    namespace = {"__doc__": cls.__doc__}
    found: Any = msgspec.defstruct(
        cls.__name__, fields, bases=(cls,), module=cls.__module__, namespace=namespace, kw_only=True
    )
    return found  # type: ignore[no-any-return]


def sampling_fields(body: msgspec.Struct) -> dict[str, Any]:
    """The sampling parameters that ``body`` gives, in the socket protocol."""
    found = {}
    for row in PARAMETERS:
        values = (getattr(body, name) for name in row.http_names)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[row.name] = row.from_llama(value)
    return found
