"""What the gateway knows of an HTTP request while it serves it."""

from __future__ import annotations

from typing import Final, Self

import attrs
from starlette.types import Scope, Send

from uma_trio.gateway.body import Body
from uma_trio.gateway.request_record import RequestRecord
from uma_trio.gateway.tenants import Tenant

IS_OVERLOADED: Final = "is_overloaded"
"""Our server's word in ``scope["state"]``: as many requests as it may have are in flight already.  Others leave it out."""

_KEY: Final = "uma_trio.request"


@attrs.define
class RequestState:
    """One request, from its first look at the headers to its end.  Each part of the gateway fills in what it finds out.

    Args:
        server_send: the ``send`` of the server, without what is around the application.
    """

    record: RequestRecord
    server_send: Send
    is_overloaded: bool = False
    """Whether too many requests are in flight for this one."""

    # -- found by the guard --
    is_draining: bool = False
    """Whether the daemon stops."""
    body: Body = attrs.field(init=False)
    """From which an endpoint for files reads the body itself."""
    tenant: Tenant | None = None
    """Who sent the request; ``None`` if the gateway has no tenants, or if the path needs no key."""
    n_tenants: int | None = None
    """How many tenants there are; ``None`` without a file of tenants."""
    is_large: bool = False
    """Whether work on the body takes turns."""

    # -- found by the endpoint --
    given: frozenset[str] = frozenset()
    """Names of the body's fields."""

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """The state of the request with this scope."""
        state: Self = scope[_KEY]
        return state

    def attach(self, scope: Scope) -> None:
        """Make this the state of the request with this scope."""
        scope[_KEY] = self
