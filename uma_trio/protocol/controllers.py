"""Messages about controllers: Wasm modules that control an answer token by token (AICI).

``ControllersQuery`` uploads, tags and lists them, and ``Controllers`` answers it.  A request that names a controller has
three more events: ``Fork``, ``ControllerOutput`` and ``Backtrack``.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, Self

import attrs
from msgspec import Meta

from uma_trio.errors import BadRequest
from uma_trio.protocol.chat import check_json
from uma_trio.protocol.field_errors import convert
from uma_trio.protocol.types import Name, Question

MAX_ARG_BYTES: Final = 256 * 1024
"""Size of ``controller_arg`` as JSON: the largest program that a controller interprets."""

MAX_ARG_DEPTH: Final = 32
"""Nesting of objects and lists in ``controller_arg``, itself included."""

MAX_PARTS: Final = 4096
"""Messages that one upload may consist of."""

MAX_TAGS: Final = 64
"""Names that one query may give to a module."""

MAX_TAG_CHARACTERS: Final = 50

ModuleId = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 of the Wasm module, in hex."""


_TAG: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TAG_CHARACTERS - 1}}}")
_LOOKS_LIKE_ID: Final = re.compile(r"[0-9a-fA-F]{21,}")

TAG_RULE: Final = (
    f"a tag has 1 to {MAX_TAG_CHARACTERS} characters: the letters A to Z and a to z, digits, dots, dashes and "
    "underscores, the first a letter or a digit; it must not look like a module id"
)


def is_tag(text: str) -> bool:
    """Whether ``text`` can be the name of a module; ``TAG_RULE`` says which can."""
    return _TAG.fullmatch(text) is not None and not _LOOKS_LIKE_ID.fullmatch(text)


@attrs.frozen(kw_only=True)
class ControllersQuery(Question):
    """Uploads, tags, lists or deletes controllers."""

    action: Literal["list", "modules", "upload", "tag", "delete"] = "list"
    """``list`` asks for tags, ``modules`` for modules, also those without a tag."""
    binary: bytes | None = None
    """The Wasm module, or the next part of it; set for ``upload`` alone.  In JSON it is base64."""
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)] = 0
    """Which part of the module this is, from 0.  Parts come in order, on one connection."""
    of: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1
    """Number of parts."""
    module_id: ModuleId | None = None
    """The module that gets the tags, or is deleted."""
    tags: Annotated[list[Name], Meta(min_length=1, max_length=MAX_TAGS)] | None = None
    """Names for a module, or names that are deleted."""
    owner: Name | None = None
    """For ``modules`` and ``delete``, by an administrator: whose modules and tags these are."""
    model: Name | None = None
    """The model whose controllers these are; ``None``: the daemon's first."""
    principal_is_admin: bool = False
    """Whether the principal is an administrator.  The user that runs the daemon is one, if it names no
    principal, and only that user may set this."""


@attrs.frozen(kw_only=True)
class ControllerTag:
    """A name of a module."""

    tag: str
    module_id: str
    updated_at: float
    """Seconds since 1970."""
    updated_by: str
    """Principal that set the tag."""
    wasm_size: int
    """Bytes of the module."""
    compiled_size: int
    """Bytes of its machine code."""


@attrs.frozen(kw_only=True)
class ControllerModule:
    """A module that is stored."""

    module_id: str
    owner: str
    """Principal that has uploaded it."""
    wasm_size: int
    """Bytes of the module."""
    compiled_size: int
    """Bytes of its machine code."""
    used_at: float
    """When it was uploaded or run last, in seconds since 1970."""
    tags: list[str] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class Controllers:
    """Answer to a ``ControllersQuery``.  A long list takes several events."""

    tags: list[ControllerTag] | None = None
    """For ``list``: the tags that the principal can run, the most recently changed first.  For ``tag``: those that were
    set."""
    modules: list[ControllerModule] | None = None
    """For ``modules``: the principal's, and for an administrator all, the most recently used first."""
    deleted: list[str] | None = None
    """For ``delete``: modules and tags that are gone."""
    more: bool = False
    """Whether another event follows, with the next tags or modules."""
    received_bytes: int | None = None
    """For a part of an upload that is not the last one: size of all parts up to here."""
    module_id: str | None = None
    """For ``upload``, with its last part: name of the module.  The next fields come with it."""
    wasm_size: int | None = None
    compiled_size: int | None = None
    time_ms: float | None = None
    """Time to check and compile the module."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class Fork:
    """A new answer of a request with a controller.  It comes before all other events of the new answer.

    The text of the new answer begins with all that the parent's text was at that time.
    """

    id: str
    index: int
    """The new answer."""
    parent: int
    """The answer that it is a copy of."""


@attrs.frozen(kw_only=True)
class StorageWrite:
    """A variable that a controller has written, or tried to write."""

    name: str
    value: str
    encoding: Literal["text", "base64"] = "text"
    """``base64``: the value is not UTF-8."""
    op: Literal["set", "append"] = "set"
    when_version_is: int | None = None
    """Version of the variable for which alone the controller wanted to write it."""

    @classmethod
    def of(cls, name: str, value: bytes, op: Literal["set", "append"], when_version_is: int | None) -> Self:
        """Build the record of a write of ``value``."""
        try:
            return cls(name=name, value=value.decode(), op=op, when_version_is=when_version_is)
        except UnicodeDecodeError:
            text = base64.b64encode(value).decode()
            return cls(name=name, value=text, encoding="base64", op=op, when_version_is=when_version_is)

    @property
    def content(self) -> bytes:
        """The value as it was written."""
        return self.value.encode() if self.encoding == "text" else base64.b64decode(self.value)


@attrs.frozen(kw_only=True)
class ControllerOutput:
    """What the controller of an answer has printed and written.  Its event is called ``controller``."""

    id: str
    index: int
    logs: str | None = None
    """What it has printed since the last event of this kind."""
    storage: list[StorageWrite] | None = None
    """Writes of variables since the last event of this kind, in order."""
    error: str | None = None
    """Why it has failed; an ``error`` event follows."""


@attrs.frozen(kw_only=True)
class Backtrack:
    """The controller has removed the end of an answer."""

    id: str
    index: int
    tokens: int
    """Number of removed tokens."""
    text: str
    """The removed text: the end of all text that the answer had so far."""


def parse_query(fields: dict[str, Any]) -> ControllersQuery:
    """Convert the fields of a query.

    Raises:
        BadRequest: a field is missing, has the wrong type, is out of bounds, or does not belong to the action.
    """
    query = convert(fields, ControllersQuery)
    action = query.action
    if (query.binary is None) == (action == "upload"):
        raise BadRequest("binary is required to upload a controller, and not allowed otherwise", field="binary")
    n_named = (query.module_id is not None) + (query.tags is not None)
    if n_named != {"tag": 2, "delete": 1}.get(action, 0):
        raise BadRequest(
            "to tag a controller, give module_id and tags; to delete one, give module_id or tags; otherwise neither"
        )
    if query.owner is not None and action not in ("modules", "delete"):
        raise BadRequest("owner goes with the actions modules and delete only", field="owner")
    for tag in query.tags or ():
        if not is_tag(tag):
            raise BadRequest(f"{tag[:100]!r} cannot be a tag: {TAG_RULE}", field="tags")
    if query.part >= query.of:
        raise BadRequest(f"part is {query.part}, but there are {query.of} parts; the first one is 0", field="part")
    return query


def check_controller(arg: Any, conflicts: Iterable[str]) -> None:
    """Check the fields of a request with a controller.

    Args:
        arg: the request's ``controller_arg``.
        conflicts: fields that the request has and that a controller replaces.

    Raises:
        BadRequest: there are such fields, or ``arg`` is too large.
    """
    for name in conflicts:
        raise BadRequest(
            f"{name} does not go with controller: the controller decides what the answer is; omit {name}", field=name
        )
    if arg is None:
        return
    check_json(arg, "controller_arg", MAX_ARG_DEPTH, MAX_ARG_BYTES)
