"""Shapes of answers in the native API, which docs/PROTOCOL-REFERENCE.md describes."""

from __future__ import annotations

from types import NoneType
from typing import Any, Union, get_args, get_type_hints

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from uma_trio.gateway.dialects.common.shapes import Object, Warned
from uma_trio.protocol.answers import SessionInfo, Steered
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.events import Eos
from uma_trio.protocol.usage import Explanation


def shape_of(event: type, name: str, *more: Any, is_optional: bool = False) -> Any:
    """The shape of an event as ``to_fields`` writes it: without ``id``, and without what is ``None``.

    Args:
        more: further fields, as ``msgspec.defstruct`` has them.
        is_optional: all fields of the event may be missing.
    """
    types, fields = get_type_hints(event, include_extras=True), [*more]
    for attribute in attrs.fields(event):
        kinds = get_args(types[attribute.name]) if attribute.default is None else [types[attribute.name]]
        if is_optional or attribute.default is None:
            fields.append((attribute.name, Union[*(kind for kind in kinds if kind is not NoneType), UnsetType], UNSET))
        else:
            fields.append((attribute.name, *kinds))
    fields = [field for field in fields if field[0] not in ("id", *Warned.__struct_fields__)]
    return msgspec.defstruct(name, fields, bases=(Warned,), namespace={"__doc__": event.__doc__}, kw_only=True)


Answer = shape_of(Eos, "Answer", ("request_id", str), ("answers", list[Object] | UnsetType, UNSET), is_optional=True)
"""The fields of ``eos``; with several answers ``answers``, a list of them."""
SteeredAnswer = shape_of(Steered, "SteeredAnswer")
ExplainedPrompt = shape_of(Explanation, "ExplainedPrompt")


class Event(msgspec.Struct):
    """An event of docs/PROTOCOL-REFERENCE.md, named by the server-sent event or by its field ``event``."""

    event: str | UnsetType = UNSET
    id: str | UnsetType = UNSET


class Tokenized(Warned):
    """Tokens, and where they begin in the text; or the text of tokens."""

    tokens: list[int]
    offsets: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET


class SessionPage(msgspec.Struct):
    """Sessions, the most recently used first."""

    sessions: list[SessionInfo]


class SessionContent(Warned):
    """A session with its messages, or with the text of plain prompts and their answers."""

    session: SessionInfo
    messages: list[ChatMessage] | UnsetType = UNSET
    text: str | UnsetType = UNSET


class OneSession(Warned):
    """A session as it is now."""

    session: SessionInfo


class Closed(Warned):
    """A session that is forgotten."""

    session_id: str
    closed: bool
    tokens: int


class Stopped(Warned):
    """An answer that was ended."""

    session_id: str
    stopped: bool
