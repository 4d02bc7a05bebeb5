"""Requests to parts of the gateway that are called without what is around them."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Send

from uma_trio.gateway.request_record import RequestRecord
from uma_trio.gateway.request_state import RequestState


async def _ignore(_: Message) -> None:
    """Send nothing."""


def begin_request(scope: dict[str, Any], send: Send = _ignore) -> RequestState:
    """Begin a request, as ``ResponseHeaders`` does."""
    state = RequestState(RequestRecord("r", "POST", []), send)
    state.attach(scope)
    return state
