"""What daemons ask each other about sessions, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec
from msgspec import Meta

from uma_trio.protocol.lease import Epoch, State
from uma_trio.protocol.types import Name

PATH: Final = "/v1/peer"
SIGNATURE: Final = "x-uma-peer"
CHUNK_BYTES: Final = 4 << 20
"""Most bytes of an answer."""

FileKind = Literal["turns", "state"]


class FileOffer(msgspec.Struct):
    """A file of a session that was given."""

    kind: FileKind
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\.[a-z]{1,16}$")]
    n_bytes: Annotated[int, Meta(ge=1, le=1 << 46)]


class PeerQuestion(msgspec.Struct):
    """What a daemon asks another one: the lease of a session, or a part of a file of a session that was given; or whether
    it takes a session over."""

    action: Literal["ask", "give", "confirm", "read", "offer"]
    session_id: Name
    to: Annotated[str, Meta(max_length=256)] = ""
    """The peer that is asked.  Another one refuses, however the question came to it: a wrong address, a proxy, or somebody
    who passes it on.  Its answer would count as that of the peer that holds the session."""
    stamp: Annotated[str, Meta(max_length=64)] = ""
    """What the peer has said last; see ``signatures.Reception``."""
    model: Name | None = None
    principal: Name | None = None
    """Whose session it is; ``None``: that of the user who runs the daemon."""
    node: Annotated[str, Meta(max_length=64)] = ""
    content: Annotated[str, Meta(max_length=4096)] = ""
    url: Annotated[str, Meta(max_length=256)] = ""
    """What the daemon that asks is called."""
    seen: Epoch = 0
    epoch: Epoch = 0
    kind: FileKind = "turns"
    offset: Annotated[int, Meta(ge=0, le=1 << 46)] = 0


class PeerAnswer(msgspec.Struct):
    """What the daemon says of the lease."""

    state: State
    epoch: Epoch = 0
    given_to: str = ""
    busy: bool = False
    content: str = ""
    files: list[FileOffer] = []


class StampAnswer(msgspec.Struct):
    """The stamp that a question must have."""

    stamp: Annotated[str, Meta(max_length=64)]


@attrs.frozen
class Session:
    """The session that a request names."""

    id: str
    model: str | None
    principal: str | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Session | None:
        """The session of a request for the daemon; ``None`` if it has none."""
        name = fields.get("session_id")
        return cls(name, fields.get("model"), fields.get("principal")) if isinstance(name, str) else None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a query that name the session, next to its id."""
        return {"model": self.model, "principal": self.principal}
