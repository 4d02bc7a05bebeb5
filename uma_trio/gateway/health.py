"""Whether the daemon is there, and whether it can take requests: for load balancers and people."""

from __future__ import annotations

from starlette.responses import Response

import uma_trio
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.openai import OPENAI
from uma_trio.gateway.endpoint import Call, Endpoint


async def healthz(call: Call) -> Response:
    """The gateway is up, whatever the daemon does."""
    return json_response({"status": "ok", "version": uma_trio.__version__})


ENDPOINTS = (
    Endpoint(method="GET", path="/healthz", dialect=OPENAI, answer=healthz, summary="Whether the gateway is up"),
)
