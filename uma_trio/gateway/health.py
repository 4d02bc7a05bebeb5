"""Whether the gateway is up, and whether the daemon could serve another request: for load balancers and people."""

from __future__ import annotations

from typing import Final

import anyio
from msgspec import UNSET, UnsetType
from starlette.responses import Response

import uma_trio
from uma_trio.client import Health
from uma_trio.errors import ShuttingDown
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.common.shapes import Shape
from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import NO_DAEMON, HttpError

READY_TIMEOUT_S: Final = 2.0
"""A daemon that does not answer in this time is not ready."""


class Healthy(Shape):
    """The gateway is up."""

    status: str
    version: str


class Check(Shape):
    """A condition of being ready."""

    name: str
    ok: bool
    reason: str
    model: str | UnsetType = UNSET


class Readiness(Shape):
    """Whether the daemon could serve another request."""

    ready: bool
    checks: list[Check]


async def health_of_daemon(call: Call) -> Health:
    """What the daemon says of itself.

    Raises:
        HttpError: it cannot be reached, or does not answer in time.
    """
    try:
        with anyio.fail_after(READY_TIMEOUT_S):
            return await call.ask(lambda client: client.health())
    except TimeoutError:
        message = f"the daemon did not answer within {READY_TIMEOUT_S:g} s"
        raise HttpError(NO_DAEMON, message) from None


async def healthz(call: Call) -> Response:
    """The gateway is up, whatever the daemon does."""
    return json_response(Healthy(status="ok", version=uma_trio.__version__))


async def readyz(call: Call) -> Response:
    """Whether the daemon could serve another request now, with a reason for each condition."""
    if call.is_draining:
        return _readiness([Check(name="draining", ok=False, reason=str(ShuttingDown()))])
    try:
        health = await health_of_daemon(call)
    except HttpError as error:
        return _readiness([Check(name="daemon", ok=False, reason=error.message)], error.headers)
    checks = [
        Check(name=check.name, ok=check.ok, reason=check.reason, model=check.model or UNSET) for check in health.checks
    ]
    return _readiness([Check(name="daemon", ok=True, reason="answers"), *checks])


def _readiness(checks: list[Check], headers: dict[str, str] | None = None) -> Response:
    ready = all(check.ok for check in checks)
    return json_response(Readiness(ready=ready, checks=checks), 200 if ready else 503, headers)


ENDPOINTS = (
    NATIVE.get("/healthz", healthz, Healthy, needs_key=False),
    NATIVE.get("/readyz", readyz, Readiness, needs_key=False),
)
