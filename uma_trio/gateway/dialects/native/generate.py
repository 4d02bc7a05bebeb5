"""``POST /v1/generate``, ``POST /v1/tokenize``, and what begins with ``/v1/requests``.

Their fields and events are those of docs/PROTOCOL-REFERENCE.md, and the daemon checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec
from msgspec import UNSET
from starlette.responses import Response

from uma_trio.client import FIELDS, Eos, Event, UnknownEvent
from uma_trio.gateway.answer import COMMENT, EVENT_STREAM, JSON, NDJSON, AnswerRenderer, json_line, json_response, sse
from uma_trio.gateway.dialects.common.fields import ModelQuery
from uma_trio.gateway.dialects.native.dialect import NATIVE, error_body
from uma_trio.gateway.dialects.native.shapes import Answer, ExplainedPrompt, SteeredAnswer, Tokenized
from uma_trio.gateway.dialects.native.shapes import Event as NativeEvent
from uma_trio.gateway.endpoint import Call, without_effect
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.messages import to_fields
from uma_trio.protocol.queries import SteerQuery
from uma_trio.protocol.requests import Generate

OF_THE_CONNECTION: Final = frozenset(
    {
        "id",
        "keep_alive",
        "principal",
        "principal_weight",
        "principal_max_requests",
        "detached",
        "admit_now",
        "client_state",
    }
)
"""Fields of the socket protocol that the gateway sets itself."""

OF_THE_PATH: Final = OF_THE_CONNECTION | {"request_id"}
"""Fields of a steer query that the gateway sets itself."""


async def generate(call: Call) -> Response:
    """Generate text: as server-sent events, as lines of JSON, or whole."""
    fields, warnings = await read_request(call)
    wants = call.request.headers.get("accept", "")
    as_lines = NDJSON in wants or (JSON in wants and EVENT_STREAM not in wants)
    if not isinstance(is_streamed := fields.pop("stream", True), bool):
        raise invalid("stream must be true or false", parameter="stream")
    events = Events(call.id, warnings, as_lines=as_lines)
    return await call.answers(fields, renderer=events, is_streamed=is_streamed)


async def read_request(call: Call) -> tuple[dict[str, Any], list[str]]:
    """A request for the daemon, and a warning for each field that is not known.

    Raises:
        HttpError: the body is not a JSON object.
    """
    given, warnings = await _read_known(call, [name for name in FIELDS if name not in OF_THE_CONNECTION])
    fields = call.for_daemon(**given)
    _split_stop(fields)
    return fields, warnings


async def _read_known(call: Call, known: list[str]) -> tuple[dict[str, Any], list[str]]:
    given = await call.read_fields()
    warnings = without_effect([name for name in given if name not in known], "parameter", known)
    return {name: value for name, value in given.items() if name in known}, warnings


async def steer(call: Call) -> Response:
    """Change the running request ``id`` of the same client: the ``x-request-id`` of its response, or the id of its answer."""
    known = [field.name for field in attrs.fields(SteerQuery) if field.name not in OF_THE_PATH]
    changes, warnings = await _read_known(call, known)
    name = call.request.path_params["id"]
    work = call.ask(lambda client: client.steer(name, **changes), counts=True)
    done = await call.unless_disconnected(work)
    return json_response(SteeredAnswer(**_without_names(to_fields(done))), warnings=warnings)


async def explain(call: Call) -> Response:
    """Why tokens of the prompt of the request ``id`` of the same client were computed again."""
    name, model = call.request.path_params["id"], call.query(ModelQuery).model
    explanation = await call.ask(lambda client: client.explain(name, model=model), counts=True)
    return json_response(ExplainedPrompt(**_without_names(to_fields(explanation))))


def _split_stop(fields: dict[str, Any]) -> None:
    """Let ``stop`` have token ids as well as texts."""
    stop, ids_before = fields.get("stop"), fields.get("stop_token_ids", [])
    if isinstance(stop, list) and isinstance(ids_before, list) and any(isinstance(item, int) for item in stop):
        fields["stop"] = [item for item in stop if type(item) is not int]
        fields["stop_token_ids"] = [*ids_before, *[item for item in stop if type(item) is int]]


def _without_names(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ("id", "event")}


class Events(AnswerRenderer):
    """Writes the events of the socket protocol.

    Args:
        warnings: for the first event, which is called ``warnings``.
        as_lines: one line of JSON an event, instead of server-sent events.
    """

    def __init__(self, request_id: str, warnings: list[str], *, as_lines: bool) -> None:
        self._request_id = request_id
        self._warnings = warnings
        self._as_lines = as_lines
        self.media_type = NDJSON if as_lines else EVENT_STREAM
        self.keep_alive_frame = b"" if as_lines else COMMENT

    def begin(self) -> bytes:
        """The warnings, if there are any."""
        return self.write({"event": "warnings", "warnings": self._warnings}) if self._warnings else b""

    def render(self, event: Event) -> bytes:
        """One event, with the names of docs/PROTOCOL-REFERENCE.md."""
        fields = dict(event.fields) if isinstance(event, UnknownEvent) else to_fields(event)
        if isinstance(event, Eos):
            fields["request_id"] = self._request_id
        return self.write(fields)

    def fail(self, error: HttpError) -> bytes:
        """An error after the beginning."""
        return self.write({"event": "error", **error_body(error, self._request_id)["error"]})

    def whole(self, ends: Sequence[Eos]) -> object:
        """The fields of the last event; of several answers, a list of these."""
        answers = [_without_names(to_fields(eos)) for eos in ends]
        warnings = [*self._warnings, *(warning for answer in answers for warning in answer.pop("warnings", []))]
        body = answers[0] if len(answers) == 1 else {"answers": answers}
        return Answer(request_id=self._request_id, **body, warnings=warnings or UNSET)

    def write(self, fields: dict[str, Any]) -> bytes:
        """An event of these fields."""
        if self._as_lines:
            return json_line(fields)
        name = fields.pop("event")
        return sse(fields, event=name)


class TokenizeRequest(msgspec.Struct):
    """Text to tokens, or tokens to text."""

    text: str | None = None
    tokens: list[int] | None = None
    model: str | None = None
    add_special: bool = True
    parse_special: bool = True


async def tokenize(call: Call) -> Response:
    """Tokens of a text, or the text of tokens."""
    request, warnings = await call.read(TokenizeRequest)
    if (request.text is None) == (request.tokens is None):
        raise invalid("give exactly one of text and tokens")
    tokens = await call.ask(lambda client: client.tokenize(**msgspec.structs.asdict(request)), counts=True)
    offsets = UNSET if tokens.offsets is None else tokens.offsets
    text = UNSET if tokens.text is None else tokens.text
    return json_response(Tokenized(tokens=tokens.tokens, offsets=offsets, text=text), warnings=warnings)


ENDPOINTS = (
    NATIVE.post(
        "/v1/generate",
        generate,
        Generate,
        Answer,
        event_shape=NativeEvent,
        field_names={"stop_token_ids": ("stop_token_ids", "stop")},
        hidden_fields=OF_THE_CONNECTION,
        media_types=(EVENT_STREAM, NDJSON, JSON),
    ),
    NATIVE.post("/v1/tokenize", tokenize, TokenizeRequest, Tokenized),
    NATIVE.post(
        "/v1/requests/{id}/steer", steer, SteerQuery, SteeredAnswer, needs_owner=True, hidden_fields=OF_THE_PATH
    ),
    NATIVE.get("/v1/requests/{id}/explain", explain, ExplainedPrompt, needs_owner=True, query=ModelQuery),
)
