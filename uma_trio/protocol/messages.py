"""Messages of the socket protocol as frozen records: which there are, and how they become plain values and back.

Clients send a request (``Generate``), a ``Cancel`` or a query.  The daemon answers with events: those of a request are
``Token``, ``Reasoning``, ``ToolCallDelta``, ``Inserted``, ``PrefillProgress``, ``LoadProgress``, ``Forecast``, ``Eos`` and ``Failure``, and each query has its own.

===============  ==============================================
``requests``     ``Generate``, ``Embed``, ``Rerank``, ``Cancel``
``queries``      questions next to a request, ``WatchQuery`` and ``AttachQuery``
``controllers``  queries and events about controllers
``events``       events of a request
``answers``      answers to queries
===============  ==============================================

The types hold the bounds that every daemon enforces, and no other module repeats them.  Limits that an operator can
set are checked later, when the scheduler takes a request.

Source: docs/PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

import attrs
import msgspec

from uma_trio.errors import BadRequest
from uma_trio.protocol import payload
from uma_trio.protocol.answers import (
    Activity,
    AnswerList,
    Health,
    Metrics,
    ModelList,
    SessionList,
    Steered,
    TokenList,
    Transcript,
)
from uma_trio.protocol.controllers import (
    Backtrack,
    ControllerOutput,
    Controllers,
    ControllersQuery,
    Fork,
)
from uma_trio.protocol.controllers import parse_query as parse_controllers_query
from uma_trio.protocol.events import (
    Embeddings,
    Eos,
    Failure,
    Forecast,
    Generated,
    Inserted,
    LoadProgress,
    Logprob,
    PrefillProgress,
    Ranking,
    Reasoning,
    Token,
    ToolCallDelta,
    UnknownEvent,
)
from uma_trio.protocol.field_errors import convert
from uma_trio.protocol.lease import LeaseQuery, OfferQuery, SessionLease, SessionOffer
from uma_trio.protocol.passed_files import put_in
from uma_trio.protocol.queries import (
    AnswersQuery,
    AttachQuery,
    ExplainQuery,
    HealthQuery,
    MetricsQuery,
    ModelsQuery,
    SessionQuery,
    SteerQuery,
    TokenizeQuery,
    WatchQuery,
    parse_answers_query,
    parse_models_query,
    parse_session_query,
    parse_steer_query,
    parse_tokenize_query,
)
from uma_trio.protocol.requests import Cancel, Embed, Generate, Rerank, parse_generate
from uma_trio.protocol.types import is_name
from uma_trio.protocol.usage import Explanation

Query = (
    MetricsQuery
    | SessionQuery
    | LeaseQuery
    | OfferQuery
    | AnswersQuery
    | SteerQuery
    | ExplainQuery
    | TokenizeQuery
    | ModelsQuery
    | HealthQuery
    | ControllersQuery
)
"""A question that is answered next to a running request."""

Request = Generate | Embed | Rerank | WatchQuery | AttachQuery
"""What a connection runs one at a time."""

ClientMessage = Request | Cancel | Query


Answer = (
    Metrics
    | SessionList
    | SessionLease
    | SessionOffer
    | Transcript
    | AnswerList
    | Steered
    | Explanation
    | TokenList
    | ModelList
    | Health
    | Activity
    | Controllers
)
"""What a query is answered with."""

ControllerEvent = Fork | ControllerOutput | Backtrack
"""What only a request with a controller causes."""

ServerEvent = (
    Token
    | Reasoning
    | ToolCallDelta
    | Inserted
    | Eos
    | Failure
    | PrefillProgress
    | LoadProgress
    | Forecast
    | Embeddings
    | Ranking
    | ControllerEvent
    | Answer
)


Event = ServerEvent | UnknownEvent
"""Everything that a client can receive."""

_EVENT_NAMES: Final = {
    Token: "token",
    Reasoning: "reasoning",
    ToolCallDelta: "tool_call",
    Inserted: "inserted",
    Eos: "eos",
    Failure: "error",
    PrefillProgress: "progress",
    LoadProgress: "loading",
    Forecast: "forecast",
    Metrics: "metrics",
    SessionList: "sessions",
    SessionLease: "lease",
    SessionOffer: "offer",
    Embeddings: "embeddings",
    Ranking: "ranking",
    Transcript: "transcript",
    AnswerList: "answers",
    Steered: "steered",
    Explanation: "explanation",
    TokenList: "tokens",
    ModelList: "models",
    Health: "health",
    Activity: "watch",
    Controllers: "controllers",
    Fork: "fork",
    ControllerOutput: "controller",
    Backtrack: "backtrack",
}
_EVENT_TYPES: Final[Mapping[str, type[ServerEvent]]] = {name: cls for cls, name in _EVENT_NAMES.items()}


_PARSERS: Final[Mapping[str, Callable[[dict[str, Any]], ClientMessage]]] = {
    "generate": parse_generate,
    "embed": partial(convert, cls=Embed),
    "rerank": partial(convert, cls=Rerank),
    "attach": partial(convert, cls=AttachQuery),
    "answers": parse_answers_query,
    "steer": parse_steer_query,
    "explain": partial(convert, cls=ExplainQuery),
    "sessions": parse_session_query,
    "lease": partial(convert, cls=LeaseQuery),
    "offer": partial(convert, cls=OfferQuery),
    "tokenize": parse_tokenize_query,
    "models": parse_models_query,
    "health": partial(convert, cls=HealthQuery),
    "metrics": partial(convert, cls=MetricsQuery),
    "watch": partial(convert, cls=WatchQuery),
    "controllers": parse_controllers_query,
}
"""By the ``type`` of a message; one without a type is a ``generate``."""


def parse(fields: dict[str, Any], files: list[bytes] | None = None) -> ClientMessage:
    """Convert the decoded payload of a client's message.

    Unknown fields are ignored, so that a newer client can talk to an older daemon.

    Args:
        files: those that came as descriptors.  The message takes what it names.

    Raises:
        BadRequest: names the field, and carries ``request_id`` if the payload has a usable one.
    """
    try:
        put_in(fields, [] if files is None else files)
        return _parse(fields)
    except BadRequest as error:
        claimed = fields.get("id")
        if is_name(claimed):
            error.request_id = claimed
        raise


class _PlainEvent(msgspec.Struct, forbid_unknown_fields=True):
    """Most events: a token, and nothing more about it."""

    id: str
    event: Literal["token", "reasoning"]
    text: str
    token_id: int
    index: int | None = None


_plain_events: Final = msgspec.json.Decoder(_PlainEvent)


def decode_event(data: bytes) -> Event:
    """``parse_event`` of a payload; quick for tokens in JSON.

    Raises:
        BadRequest, InvalidJson, InvalidCbor: it is not an event.
    """
    if b',"event":"token","text"' in data or b',"event":"reasoning","text"' in data:
        try:
            plain = _plain_events.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            """It has more fields, or is wrong, which ``parse_event`` says."""
        else:
            cls = Token if plain.event == "token" else Reasoning
            return cls(id=plain.id, text=plain.text, token_id=plain.token_id, index=plain.index)
    return parse_event(payload.decode(data, payload.encoding_of(data)))


def parse_event(fields: dict[str, Any]) -> Event:
    """Convert the decoded payload of a daemon's event.

    Unknown fields are ignored, so that an older client can talk to a newer daemon.

    Raises:
        BadRequest: a field of a known event is missing or has the wrong type.
    """
    name = fields.get("event")
    cls = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        return UnknownEvent(fields)
    if cls is Metrics:  # the snapshot's fields stand in the payload itself
        snapshot = {key: value for key, value in fields.items() if key not in ("event", "id", "warnings")}
        return Metrics(snapshot=snapshot, id=fields.get("id"))
    try:
        return convert(fields, cls)
    except BadRequest as error:
        raise BadRequest(f"event {name!r}: {error}") from None


def _parse(fields: dict[str, Any]) -> ClientMessage:
    event, kind = fields.get("event"), fields.get("type")
    if event is not None:
        if event != "cancel":
            raise BadRequest("the only event that a client may send is 'cancel'", field="event")
        return convert(fields, Cancel)
    kind = "generate" if kind is None else kind
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        raise BadRequest(f"type must be one of {', '.join(map(repr, _PARSERS))}", field="type")
    return parser(fields)


def to_fields(event: ServerEvent) -> dict[str, Any]:
    """Convert an event to a payload of plain values, without the fields that are ``None``."""
    if isinstance(event, Generated):  # spelled out, because this runs once a token
        fields: dict[str, Any] = {"id": event.id, "event": _EVENT_NAMES[type(event)], "text": event.text}
        if event.token_id is not None:
            fields["token_id"] = event.token_id
        if isinstance(event, Token):
            if event.echo:
                fields["echo"] = True
            if event.inserted:
                fields["inserted"] = True
        if event.index is not None:
            fields["index"] = event.index
        if event.number is not None:
            fields["number"] = event.number
        if event.logprob is not None:
            fields["logprob"] = event.logprob
            fields["bytes"] = event.bytes
            fields["top_logprobs"] = [_logprob_fields(logprob) for logprob in event.top_logprobs or ()]
        return fields
    fields = {"id": event.id, "event": _EVENT_NAMES[type(event)]}
    if isinstance(event, Metrics):
        fields.update(event.snapshot)
    else:
        fields.update(_plain(event))
    return {key: value for key, value in fields.items() if value is not None}


def _logprob_fields(logprob: Logprob) -> dict[str, Any]:
    """Spelled out like a token's fields: up to twenty of these come with each token."""
    return {
        "token_id": logprob.token_id,
        "text": logprob.text,
        "bytes": logprob.bytes,
        "logprob": logprob.logprob,
    }


def _plain(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Like ``attrs.asdict`` without ``None``, but leaves ``metadata`` as it is: its values are plain already."""
    values = {field.name: getattr(record, field.name) for field in attrs.fields(type(record))}
    return {name: _plain_value(value) for name, value in values.items() if value is not None}


def _plain_value(value: Any) -> Any:
    if attrs.has(type(value)):
        return _plain(value)
    if isinstance(value, list) and value and attrs.has(type(value[0])):
        return [_plain(one) for one in value]
    return value
