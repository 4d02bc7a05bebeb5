"""What client and server can say to each other, as frozen records.

Clients send ``Generate``, ``Cancel``, ``MetricsQuery`` and ``SessionQuery``; ``Token``, ``Eos``, ``Failure``,
``Metrics`` and ``SessionList`` go back, and nothing else ever.  Bounds that hold for every
server stand here, in the types; bounds that a server is configured with are ``runner.admission``'s.

Source: docs/PROTOCOL.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec
from msgspec import Meta

from uma_trio.errors import BadRequest, UmaError

Priority = Literal["interactive", "normal", "background"]
Reason = Literal["stop", "length", "cancelled", "error"]

MAX_METADATA_BYTES: Final = 16 * 1024
"""Of ``metadata`` as JSON.  It is echoed, so a client decides how much the server sends."""

MAX_METADATA_DEPTH: Final = 32
"""Of ``metadata``: objects and lists inside each other, itself included."""

MAX_COMPLAINT: Final = 300
"""Characters of an error message about a field: it may quote what the client sent."""

Id = Annotated[str, Meta(min_length=1, max_length=256)]
SessionId = Annotated[str, Meta(min_length=1, max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TargetMs = Annotated[float, Meta(gt=0, le=3_600_000)]


@attrs.frozen(kw_only=True)
class Slo:
    """What the client hopes for; advice to the scheduler, never a reason to refuse."""

    target_ttft_ms: TargetMs | None = None
    """Time to first token."""
    target_tbt_ms: TargetMs | None = None
    """Time between tokens: the inter-token latency."""
    priority: Priority = "normal"


@attrs.frozen(kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@attrs.frozen(kw_only=True)
class Generate:
    """A request for text.  Exactly one of ``prompt`` and ``messages`` is set."""

    id: Id
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    """Rendered through the model's chat template."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """``None``: the server's default, or what the context has room for if that is less."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 is off."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """``None``: the server chooses one and tells it in ``eos``."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] = attrs.field(factory=list)
    ignore_eos: bool = False
    """Never sample an end-of-generation token: generate exactly ``max_tokens``."""
    stream: bool = True
    echo: bool = False
    """Send the prompt's text first."""
    keep_alive: bool = False
    """Keep the connection for further requests after this one's ``eos`` or ``error``."""
    cache_prompt: bool = True
    """Share computed tokens with requests of the same user that begin alike."""
    speculate: bool | None = None
    """Whether to check guesses at what follows; ``None``: where they pay.  The text is the same."""
    session_id: SessionId | None = None
    """Goes on with what was said in this session before, and is remembered in it."""
    n_keep: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Where prompt and answer do not fit into the context: the oldest tokens after so many may go.  ``None``: none."""
    slo: Slo = attrs.field(factory=Slo)
    metadata: dict[str, Any] | None = None
    """Echoed in ``eos`` and ``error``."""

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple, however it was spelled."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@attrs.frozen(kw_only=True)
class Cancel:
    """Stop a request.  Of an id that is not running: nothing to do, and nothing is answered."""

    id: Id


@attrs.frozen(kw_only=True)
class MetricsQuery:
    """Asks for one snapshot; the server closes afterwards unless ``keep_alive``."""

    id: Id | None = None
    keep_alive: bool = False


@attrs.frozen(kw_only=True)
class SessionQuery:
    """About the user's sessions: all of them, or one."""

    action: Literal["list", "describe", "close", "fork"] = "list"
    session_id: SessionId | None = None
    """Of all but ``list``."""
    new_id: SessionId | None = None
    """Of ``fork``: the name of the session that goes on from where the other one is."""
    id: Id | None = None
    keep_alive: bool = False


ClientMessage = Generate | Cancel | MetricsQuery | SessionQuery


@attrs.frozen(kw_only=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed."""
    dropped_tokens: int = 0
    """Tokens of what was said before that had to go, for the rest to fit; see ``n_keep``."""


@attrs.frozen(kw_only=True)
class SessionInfo:
    """What there is of one session."""

    session_id: str
    turns: int
    """Requests answered in it."""
    tokens: int
    """Of all that was said."""
    durable: bool
    """Its tokens are on disk: it survives the server."""
    busy: bool = False
    """It is answering."""
    created_at: float = 0.0
    """Seconds since 1970, as"""
    used_at: float = 0.0
    """when it was last used."""


@attrs.frozen(kw_only=True)
class SessionList:
    """The answer to a ``SessionQuery``."""

    sessions: list[SessionInfo]
    """All of the user's, the last used first; or the one that was asked about, forked or closed."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class Timings:
    """Where a request's time went, in milliseconds of the server's clock."""

    queue_ms: float
    """From arrival until a sequence was given to it."""
    ttft_ms: float | None
    """From arrival to the first token; ``None`` when there was none."""
    total_ms: float
    """From arrival to this event."""
    tokens_per_s: float | None
    """After the first token; ``None`` below two tokens."""


@attrs.frozen(kw_only=True)
class Token:
    """One sampled token and the text that can be shown since the last one.

    ``text`` holds whole characters only and may be empty: the token ended inside a character, or
    inside what may become a stop string.
    """

    id: str
    text: str
    token_id: int | None
    """``None`` for the echoed prompt."""
    echo: bool = False


@attrs.frozen(kw_only=True)
class Eos:
    """The end of a request that was served; nothing with its ``id`` follows."""

    id: str
    reason: Reason
    usage: Usage
    timings: Timings
    text: str | None = None
    """The whole text, if ``stream`` was false."""
    stop: str | None = None
    """The stop string that was found, if one was."""
    seed: int | None = None
    session: SessionInfo | None = None
    """Of a request with a ``session_id``, after it."""
    metadata: dict[str, Any] | None = None


@attrs.frozen(kw_only=True)
class Failure:
    """Something went wrong with request ``id``, or with the connection if there is no ``id``."""

    code: str
    message: str
    id: str | None = None
    retry_after_ms: int | None = None
    metadata: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: UmaError, *, metadata: dict[str, Any] | None = None) -> Failure:
        return cls(
            code=error.code,
            message=str(error),
            id=error.request_id,
            retry_after_ms=error.retry_after_ms,
            metadata=metadata,
        )


@attrs.frozen(kw_only=True)
class Metrics:
    """A snapshot; docs/METRICS.md names its fields."""

    snapshot: Mapping[str, Any]
    id: str | None = None


ServerEvent = Token | Eos | Failure | Metrics | SessionList

_EVENT_NAMES: Final = {Token: "token", Eos: "eos", Failure: "error", Metrics: "metrics", SessionList: "sessions"}


def parse(fields: dict[str, Any]) -> ClientMessage:
    """Read one client message from its decoded payload.

    Unknown fields are ignored, so that a newer client can talk to an older server.

    Raises:
        BadRequest: naming the field; with ``request_id`` where the payload has a usable one.
    """
    try:
        return _parse(fields)
    except msgspec.ValidationError as error:
        complaint = str(error).replace("`$.", "`").replace("`$", "`request")
        wrong = BadRequest(_shortened(complaint))
    except BadRequest as error:
        wrong = error
    claimed = fields.get("id")
    if isinstance(claimed, str) and 0 < len(claimed) <= 256:
        wrong.request_id = claimed
    raise wrong


def _parse(fields: dict[str, Any]) -> ClientMessage:
    event, kind = fields.get("event"), fields.get("type")
    if event is not None:
        if event != "cancel":
            raise BadRequest("the only event that a client sends is 'cancel'")
        return msgspec.convert(fields, Cancel)
    if kind == "metrics":
        return msgspec.convert(fields, MetricsQuery)
    if kind == "sessions":
        return _parse_session_query(fields)
    if kind not in (None, "generate"):
        raise BadRequest("type must be 'generate', 'metrics' or 'sessions'")
    request = msgspec.convert(fields, Generate)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("give exactly one of prompt and messages")
    if request.metadata is not None:
        _check_metadata(request.metadata)
    return request


def _parse_session_query(fields: dict[str, Any]) -> SessionQuery:
    query = msgspec.convert(fields, SessionQuery)
    if (query.session_id is None) != (query.action == "list"):
        raise BadRequest("give session_id to describe, close or fork a session, and not to list all")
    if (query.new_id is None) != (query.action != "fork"):
        raise BadRequest("give new_id to fork a session, and only then")
    return query


def _shortened(complaint: str) -> str:
    """Its beginning, which says what is wrong, and its end, which says where."""
    if len(complaint) <= MAX_COMPLAINT:
        return complaint
    half = MAX_COMPLAINT // 2
    return f"{complaint[:half]} ... {complaint[-half:]}"


def _check_metadata(metadata: dict[str, Any]) -> None:
    """What is echoed must be small, shallow and the same in both encodings."""
    level: list[Any] = [metadata]
    for _ in range(MAX_METADATA_DEPTH):
        items = [item for found in level for item in (found.values() if isinstance(found, dict) else found)]
        if any(isinstance(item, bytes) or (isinstance(item, float) and not math.isfinite(item)) for item in items):
            raise BadRequest("metadata must be expressible in JSON: no bytes, no NaN, no Infinity")
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            break
    else:
        raise BadRequest(f"metadata is nested more than {MAX_METADATA_DEPTH} deep")
    size = len(msgspec.json.encode(metadata))
    if size > MAX_METADATA_BYTES:
        raise BadRequest(f"metadata has {size} bytes; at most {MAX_METADATA_BYTES} are echoed")


def to_fields(event: ServerEvent) -> dict[str, Any]:
    """The payload of an event, as plain values; what is ``None`` is left out."""
    if type(event) is Token:  # the one on every token's path
        fields: dict[str, Any] = {"id": event.id, "event": "token", "text": event.text}
        if event.token_id is not None:
            fields["token_id"] = event.token_id
        if event.echo:
            fields["echo"] = True
        return fields
    fields = {"id": event.id, "event": _EVENT_NAMES[type(event)]}
    if isinstance(event, Metrics):
        fields.update(event.snapshot)
    else:
        fields.update(_plain(event))
    return {key: value for key, value in fields.items() if value is not None}


def _plain(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Unlike ``attrs.asdict``, does not go into ``metadata``: it is plain already, and not ours to walk."""
    found = {field.name: getattr(record, field.name) for field in attrs.fields(type(record))}
    return {
        name: _plain(value)
        if attrs.has(type(value))
        else [_plain(item) for item in value]
        if name == "sessions"
        else value
        for name, value in found.items()
        if value is not None
    }
