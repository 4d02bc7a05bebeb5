"""For whom a request is served."""

from __future__ import annotations

import attrs


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
    """Requests in flight at a time, waiting ones included; ``None``: no limit of its own."""


ANONYMOUS = Principal("uid:unknown")
"""Where the system does not say who the peer is."""
