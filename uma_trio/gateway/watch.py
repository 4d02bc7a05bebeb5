"""What the daemon does, as server-sent events: the data of the dashboard."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response

from uma_trio.client import Activity, Event
from uma_trio.gateway.answer import COMMENT, EVENT_STREAM, StreamedAnswer, sse
from uma_trio.gateway.daemon import Daemon
from uma_trio.gateway.dialects.starling import STARLING
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.messages import to_fields


async def watch(call: Call) -> Response:
    """Events named ``watch``, once every ``interval_ms``: 250 by default, 50 to 60000.  docs/PROTOCOL.md has their fields.

    The parameter ``model`` names the model to watch.
    """
    text = call.request.query_params.get("interval_ms", "250")
    if not text.isascii() or not text.isdigit():
        raise invalid("interval_ms must be a whole number", parameter="interval_ms")
    name = call.request.query_params.get("model")
    return StreamedAnswer(
        _events(call.daemon, int(text), None if name is None else (await call.daemon.model(name)).name),
        _Events(),
        refuse=call.refuse,
        keep_alive_s=call.config.http.keep_alive_s,
    )


async def _events(daemon: Daemon, interval_ms: int, model: str | None) -> AsyncIterator[list[Event]]:
    named = {} if model is None else {"model": model}
    async with daemon.connect() as client:
        async for event in client.watch(interval_ms=interval_ms, **named):
            yield [event]


class _Events:
    """Writes the events of a watch."""

    media_type = EVENT_STREAM
    keep_alive_frame = COMMENT

    def begin(self) -> bytes:
        """Nothing comes before the first event."""
        return b""

    def render(self, event: Event) -> bytes:
        """One event."""
        assert isinstance(event, Activity)
        fields = to_fields(event)
        del fields["event"]
        return sse(fields, event="watch")

    def fail(self, error: HttpError) -> bytes:
        """The daemon is gone."""
        return sse({"code": error.code, "message": error.message}, event="error")

    def end(self) -> bytes:
        """Nothing: the daemon stops."""
        return b""


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/watch",
        dialect=STARLING,
        answer=watch,
        summary="What the daemon does, again and again: metrics, ticks, requests, KV cache, sessions",
        media_types=(EVENT_STREAM,),
        needs_admin=True,
    ),
)
