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

BANNED: Final = -100.0
"""A bias that means never."""

Id = Annotated[str, Meta(min_length=1, max_length=256)]
SessionId = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=BANNED, le=100)]], Meta(max_length=300)]
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
    parse_special: bool = True
    """Read control tokens that ``prompt`` spells out; else they are text.  In ``messages`` they always are."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """``None``: the server's default, or what the context has room for if that is less."""
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    """Answers to the one prompt, each with a seed of its own and told by its ``index``."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 is off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """0 is off."""
    repetition_penalty: Annotated[float, Meta(ge=0.1, le=10)] = 1.0
    """1 is off."""
    repeat_last_n: Annotated[int, Meta(ge=0, le=4096)] = 64
    """Tokens that ``repetition_penalty`` looks at, of prompt and answer together."""
    frequency_penalty: Penalty = 0.0
    """Of the answer's tokens, for each time; 0 is off."""
    presence_penalty: Penalty = 0.0
    """Of the answer's tokens; 0 is off."""
    logit_bias: LogitBias = attrs.field(factory=dict)
    """Added to the model's logits, by token id; ``BANNED`` keeps a token out."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Tell how likely each token was, and so many of the most likely ones."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """``None``: the server chooses one and tells it in ``eos``."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] = attrs.field(factory=list)
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = attrs.field(factory=list)
    """End the answer as the model's own end-of-generation tokens do."""
    ignore_eos: bool = False
    """Never sample an end-of-generation token: generate exactly ``max_tokens``."""
    stream: bool = True
    echo: bool = False
    """Send the prompt's text first."""
    return_full_text: bool = False
    """The same, by another name."""
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
class Logprob:
    """How likely the model found a token, whatever was asked of the sampler."""

    token_id: int
    text: str
    """U+FFFD stands for what is no whole character by itself."""
    bytes: list[int]
    """The token's own; ``text`` of the event may be held back, and more or less than that."""
    logprob: float
    """Natural logarithm of the probability."""


@attrs.frozen(kw_only=True)
class Logprobs(Logprob):
    """Of a token of the answer."""

    top_logprobs: list[Logprob]
    """The most likely tokens there, likeliest first."""


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
    index: int | None = None
    """Of the answer, from 0; ``None`` where there is only one."""
    logprob: float | None = None
    """This and what follows where it was asked for: as in ``Logprobs``."""
    bytes: list[int] | None = None
    top_logprobs: list[Logprob] | None = None

    @classmethod
    def of(
        cls,
        id: str,
        text: str,
        token_id: int | None,
        told: Logprobs | None,
        *,
        echo: bool = False,
        index: int | None = None,
    ) -> Token:
        if told is None:
            return cls(id=id, text=text, token_id=token_id, echo=echo, index=index)
        return cls(
            id=id,
            text=text,
            token_id=token_id,
            echo=echo,
            index=index,
            logprob=told.logprob,
            bytes=told.bytes,
            top_logprobs=told.top_logprobs,
        )


@attrs.frozen(kw_only=True)
class Eos:
    """The end of a request that was served, or of one of its answers; nothing of it follows."""

    id: str
    reason: Reason
    usage: Usage
    timings: Timings
    index: int | None = None
    """Of the answer, where there are several."""
    text: str | None = None
    """The whole text, if ``stream`` was false."""
    logprobs: list[Logprobs] | None = None
    """Of each token that would have been an event, if they were asked for and ``stream`` was false."""
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
    index: int | None = None
    """Of the answer, where there are several and only this one is meant."""
    retry_after_ms: int | None = None
    metadata: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: UmaError, *, metadata: dict[str, Any] | None = None, index: int | None = None) -> Failure:
        return cls(
            code=error.code,
            message=str(error),
            id=error.request_id,
            index=index,
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
    request = msgspec.convert(fields, Generate, str_keys=True)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("give exactly one of prompt and messages")
    if request.session_id is not None and request.n > 1:
        raise BadRequest("n must be 1 with session_id: a session goes on from one answer; fork it for several")
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
        if event.index is not None:
            fields["index"] = event.index
        if event.logprob is not None:
            fields["logprob"] = event.logprob
            fields["bytes"] = event.bytes
            fields["top_logprobs"] = [_logprob_fields(found) for found in event.top_logprobs or ()]
        return fields
    fields = {"id": event.id, "event": _EVENT_NAMES[type(event)]}
    if isinstance(event, Metrics):
        fields.update(event.snapshot)
    else:
        fields.update(_plain(event))
    return {key: value for key, value in fields.items() if value is not None}


def _logprob_fields(found: Logprob) -> dict[str, Any]:
    """Up to twenty with a token, so not by ``_plain``."""
    return {
        "token_id": found.token_id,
        "text": found.text,
        "bytes": found.bytes,
        "logprob": found.logprob,
    }


def _plain(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Unlike ``attrs.asdict``, does not go into ``metadata``: it is plain already, and not ours to walk."""
    found = {field.name: getattr(record, field.name) for field in attrs.fields(type(record))}
    return {name: _plain_value(value) for name, value in found.items() if value is not None}


def _plain_value(value: Any) -> Any:
    if attrs.has(type(value)):
        return _plain(value)
    if isinstance(value, list) and value and attrs.has(type(value[0])):
        return [_plain(one) for one in value]
    return value
