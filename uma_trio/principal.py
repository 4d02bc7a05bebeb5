"""For whom a request is served."""

from __future__ import annotations

from typing import Annotated

import attrs
from msgspec import Meta

PrincipalWeight = Annotated[float, Meta(ge=0.01, le=100)]
PrincipalLimit = Annotated[int, Meta(ge=1, le=1_000_000)]
"""Bounds of ``Principal.max_requests``."""


@attrs.frozen
class Principal:
    """One party that shares the daemon with others: a Unix user, or a tenant with an API key.

    KV cache contents and sessions belong to a principal, and the scheduler shares time among principals.
    """

    name: str
    """``uid:1000`` from the credentials of a socket's peer; otherwise what a door says."""
    weight: float = 1.0
    """Share of prefill time against other principals: with 2, twice as much."""
    max_requests: int | None = None
    """Answers in flight at a time, waiting ones included; ``None``: no limit of its own."""


UNIX_USER = "uid:"
"""How the names of Unix users begin, and no other ones."""

ANONYMOUS = Principal(f"{UNIX_USER}unknown")
"""Where the system does not say who the peer is."""
