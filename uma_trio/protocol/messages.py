"""Messages of the socket protocol, as frozen records.

Clients send a request (``Generate``), a ``Cancel`` or a query.  The daemon answers with events: those of a request are
``Token``, ``Reasoning``, ``ToolCallDelta``, ``PrefillProgress``, ``LoadProgress``, ``Eos`` and ``Failure``, and each query has its own.
Those about controllers are in ``uma_trio.protocol.controllers``.

The types hold the bounds that every daemon enforces, and no other module repeats them.  Limits that an operator can
set are checked later, when a request is admitted.

Source: docs/PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import attrs
import msgspec
from msgspec import Meta

from uma_trio.errors import BadRequest, UmaError
from uma_trio.protocol.chat import (
    MAX_TOOLS,
    ChatMessage,
    NamedTool,
    TemplateKwargs,
    Tool,
    ToolCall,
    ToolChoice,
    check_json,
    check_messages,
    check_template_kwargs,
    check_tools,
)
from uma_trio.protocol.controllers import (
    Backtrack,
    ControllerOutput,
    Controllers,
    ControllersQuery,
    Fork,
    check_controller,
    parse_query,
)
from uma_trio.protocol.field_errors import convert
from uma_trio.protocol.types import MAX_INT32, MAX_NAME_CHARS, Name

Priority = Literal["interactive", "normal", "background"]
FinishReason = Literal["stop", "length", "tool_calls", "deadlock", "cancelled", "error"]

MAX_SEED: Final = 2**63 - 1
"""Largest signed 64-bit integer, which every client's language can hold."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Size of ``metadata`` as JSON.  The daemon echoes it, so this bounds what a client can make it send."""

MAX_METADATA_DEPTH: Final = 32
"""Nesting of objects and lists in ``metadata``, itself included."""

BANNED: Final = -100.0
"""The ``logit_bias`` that excludes a token, as in the OpenAI API."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=BANNED, le=100)]], Meta(max_length=300)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 20)]
PromptTokens = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)]
PrincipalWeight = Annotated[float, Meta(ge=0.01, le=100)]
PrincipalLimit = Annotated[int, Meta(ge=1, le=1_000_000)]
TargetMs = Annotated[float, Meta(gt=0, le=3_600_000)]


@attrs.frozen(kw_only=True)
class Slo:
    """Latency targets of a request.  The scheduler takes them as advice; a request is never refused for them."""

    target_ttft_ms: TargetMs | None = None
    """Time to first token."""
    target_tbt_ms: TargetMs | None = None
    """Time between tokens, also called inter-token latency."""
    priority: Priority = "normal"


MAX_ADAPTERS: Final = 8
"""LoRA adapters of one request."""


@attrs.frozen(kw_only=True)
class AdapterChoice:
    """A LoRA adapter that a request names."""

    name: Name
    scale: Annotated[float, Meta(ge=-16, le=16)] | None = None
    """Factor of its weights.  ``None`` is the daemon's setting for the adapter, and 0 leaves it out."""


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
Source = Annotated[str, Meta(min_length=1, max_length=65536)]


@attrs.frozen(kw_only=True)
class Constraint:
    """What an answer must look like.  Exactly one of the fields but ``after`` is set."""

    json_schema: dict[str, Any] | None = None
    """The answer is JSON that this schema describes, with one space after commas and colons."""
    json_object: bool = False
    """The answer is a JSON object."""
    regex: Source | None = None
    """The whole answer matches it."""
    lark: Source | None = None
    """A grammar in llguidance's dialect of Lark; it begins with the rule ``start``."""
    gbnf: Source | None = None
    """A grammar in llama.cpp's notation; it begins with the rule ``root``."""
    choice: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=512)] | None = None  # fmt: skip
    """The answer is one of these texts."""
    after: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """The constraint applies after the first occurrence of this text in the answer, such as ``</think>``."""


@attrs.frozen(kw_only=True)
class Generate:
    """A request for text.  Exactly one of ``prompt``, ``messages`` and ``controller`` is set."""

    id: Name
    model: Name | None = None
    """Which of the served models answers.  ``None`` is the default model."""
    adapters: Annotated[list[AdapterChoice], Meta(max_length=MAX_ADAPTERS)] = attrs.field(factory=list)
    """LoRA adapters that the answer is computed with."""
    prompt: str | PromptTokens | None = None
    """A text to continue, or its tokens."""
    messages: Messages | None = None
    """A chat, rendered with the model's chat template."""
    controller: Name | None = None
    """A controller that steers the answer token by token: its module id, or a tag.  There is no prompt then."""
    controller_arg: Any = None
    """The controller's argument, such as a program: a text, or any other JSON value."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = attrs.field(factory=list)
    """What the model may call, instead of an answer or after it."""
    tool_choice: ToolChoice = "auto"
    """``auto``: the model decides.  ``none``: as without ``tools``.  ``required``, or a tool: the answer is a call."""
    parallel_tool_calls: bool = True
    """Whether one answer may have several calls."""
    chat_template_kwargs: TemplateKwargs = attrs.field(factory=dict)
    """Variables for the chat template, such as ``enable_thinking``.  A template ignores those that it does not know."""
    parse_special: bool = True
    """Whether text in ``prompt`` that spells a control token becomes that token.  In ``messages`` it never does."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    """``None`` is the daemon's default, or the room left in the context if that is less."""
    fit_max_tokens: bool = False
    """Whether a ``max_tokens`` for which there is no room counts as ``None``, instead of being refused."""
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    """Number of answers to the prompt.  Each has its own ``index`` and its own seed."""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy.  ``None``, here and in the next seven fields, is the default of the daemon or of the model."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """1 is off."""
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    """0 is off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """0 is off."""
    repetition_penalty: Annotated[float, Meta(ge=0.1, le=10)] | None = None
    """1 is off."""
    repeat_last_n: Annotated[int, Meta(ge=0, le=4096)] | None = None
    """Window of ``repetition_penalty``: the last tokens of prompt and answer together."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit for each time that the answer contains it.  0 is off."""
    presence_penalty: Penalty | None = None
    """Subtracted once from the logit of a token that the answer contains.  0 is off."""
    logit_bias: LogitBias = attrs.field(factory=dict)
    """Token id to a number that is added to its logit.  ``BANNED`` excludes the token."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Report the log probability of each token and of this many most likely alternatives."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """``None``: the daemon chooses a seed and reports it in ``eos``."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] = attrs.field(factory=list)
    """Strings that end the answer.  They are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = attrs.field(factory=list)
    """Tokens that end the answer, like the model's own end-of-generation tokens."""
    constraint: Constraint | None = None
    """Only tokens that it allows are sampled."""
    ignore_eos: bool = False
    """Never sample an end-of-generation token: generate exactly ``max_tokens``."""
    stream: bool = True
    """Whether each token is sent as an event."""
    echo: bool = False
    """Send the prompt's text before the answer."""
    return_full_text: bool = False
    """Alias of ``echo``."""
    keep_alive: bool = False
    """Keep the connection open for further requests after this one's ``eos`` or ``error``."""
    separate_reasoning: bool = False
    """Send the model's reasoning in events of its own, without its markers, instead of as text."""
    cache_prompt: bool = True
    """Share the KV cache of common prefixes with other requests of the same principal."""
    speculate: bool | None = None
    """Whether to use speculative decoding.  ``None`` is the daemon's setting.  The text does not depend on it."""
    progress: bool = False
    """Whether to send ``progress`` events during prefill."""
    session_id: Name | None = None
    """Session that this request continues, or begins."""
    history: Literal["continue", "replace"] = "continue"
    """``continue``: the request comes after what the session has.  ``replace``: it is the whole conversation."""
    drop_messages: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    """How many of the session's last messages the request replaces: the session forgets them."""
    n_keep: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    """If the context is too small, drop the oldest tokens after the first ``n_keep``.  ``None``: drop nothing."""
    slo: Slo = attrs.field(factory=Slo)
    principal: Name | None = None
    """Principal on whose behalf the request is made.  This and the next two are for the user that runs the daemon."""
    principal_weight: PrincipalWeight = 1.0
    """Share of the model against other principals: with 2, twice as much."""
    principal_max_requests: PrincipalLimit | None = None
    """Refuse the request if the principal would have more answers in flight."""
    metadata: dict[str, Any] | None = None
    """Echoed in ``eos`` and ``error``."""

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whether it was sent as one string or as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@attrs.frozen(kw_only=True)
class Embed:
    """A request for the embeddings of texts."""

    input: Annotated[list[str | PromptTokens], Meta(min_length=1, max_length=2048)]
    """Texts, or their tokens."""
    model: Name | None = None
    adapters: Annotated[list[AdapterChoice], Meta(max_length=MAX_ADAPTERS)] = attrs.field(factory=list)
    """This field and the one before are as in ``Generate``."""
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    """Return only this many dimensions of each embedding, with length 1 again."""
    id: Name | None = None
    keep_alive: bool = False
    principal: Name | None = None
    principal_weight: PrincipalWeight = 1.0
    principal_max_requests: PrincipalLimit | None = None
    """This field and the two before are as in ``Generate``."""


@attrs.frozen(kw_only=True)
class Cancel:
    """Cancels the running request ``id``.  Cancelling any other id is a no-op and gets no answer."""

    id: Name


@attrs.frozen(kw_only=True)
class MetricsQuery:
    """Asks for one metrics snapshot.  The daemon closes the connection afterwards unless ``keep_alive`` is set."""

    id: Name | None = None
    keep_alive: bool = False
    principal: Name | None = None


@attrs.frozen(kw_only=True)
class SessionQuery:
    """Lists, describes, reads, closes or forks sessions of the principal."""

    action: Literal["list", "describe", "read", "close", "fork"] = "list"
    session_id: Name | None = None
    """The session to act on; set for every action except ``list``."""
    new_id: Name | None = None
    """Name of the new session; set for ``fork`` alone."""
    model: Name | None = None
    """The model whose sessions these are; ``None``: the daemon's first."""
    id: Name | None = None
    keep_alive: bool = False
    principal: Name | None = None
    """Principal whose sessions these are.  Honoured only from the user that runs the daemon."""


@attrs.frozen(kw_only=True)
class TokenizeQuery:
    """Asks for the tokens of a text or of a chat, or for the text of tokens.  Exactly one of the three is set."""

    text: str | None = None
    messages: Messages | None = None
    """A chat, rendered with the model's chat template: its tokens are those that a request would prefill."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = attrs.field(factory=list)
    """Tools of the chat, as in ``Generate.tools``."""
    chat_template_kwargs: TemplateKwargs = attrs.field(factory=dict)
    tokens: TokenIds | None = None
    model: Name | None = None
    add_special: bool = True
    """Add the tokens that the model expects around a text, such as BOS, as in ``Generate.prompt``."""
    parse_special: bool = True
    """Whether text that spells a control token becomes that token, and whether control tokens become text."""
    id: Name | None = None
    keep_alive: bool = False
    principal: Name | None = None


@attrs.frozen(kw_only=True)
class ModelsQuery:
    """Asks which models are served, or loads, unloads or reloads one.  Only the user that runs the daemon may do so."""

    action: Literal["list", "load", "unload", "reload"] = "list"
    """The answer to the others comes when it is done, and has the one model."""
    model: Name | None = None
    """The model to act on; set for every action except ``list``."""
    id: Name | None = None
    keep_alive: bool = False
    principal: Name | None = None


@attrs.frozen(kw_only=True)
class HealthQuery:
    """Asks whether the daemon can serve another request now."""

    id: Name | None = None
    keep_alive: bool = False
    principal: Name | None = None


@attrs.frozen(kw_only=True)
class WatchQuery:
    """Asks what the daemon does, again and again until the client leaves or cancels it.  Takes the place of a request."""

    interval_ms: Annotated[int, Meta(ge=50, le=60_000)] = 250
    """Time between two events."""
    model: Name | None = None
    """The model to watch; ``None``: the daemon's first."""
    id: Name | None = None
    """Also the ``id`` of the ``Cancel`` that ends it."""
    keep_alive: bool = False
    principal: Name | None = None


Query = MetricsQuery | SessionQuery | TokenizeQuery | ModelsQuery | HealthQuery | ControllersQuery
"""A question that is answered next to a running request."""

Request = Generate | Embed | WatchQuery
"""What a connection runs one at a time."""

ClientMessage = Request | Cancel | Query


@attrs.frozen(kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens, an end-of-generation token included."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache existed already."""
    dropped_tokens: int = 0
    """Earlier tokens that were dropped to make the prompt fit; see ``Generate.n_keep``."""
    reasoning_tokens: int | None = None
    """Generated tokens of reasoning and its markers, with ``Generate.separate_reasoning``."""
    sampled_tokens: int | None = None
    """Generated tokens that the model chose.  This and the next field come with ``Generate.controller``."""
    inserted_tokens: int | None = None
    """Generated tokens that the controller chose."""


@attrs.frozen(kw_only=True)
class SessionInfo:
    """State of one session."""

    session_id: str
    turns: int
    """Answered requests."""
    tokens: int
    """Length of the conversation so far."""
    durable: bool
    """Whether all of its tokens are on disk, so that it survives the daemon."""
    busy: bool = False
    """Whether a request of it is running."""
    created_at: float = 0.0
    """Seconds since 1970."""
    used_at: float = 0.0
    """Seconds since 1970, when its last answer ended."""


@attrs.frozen(kw_only=True)
class SessionList:
    """Answer to a ``SessionQuery`` with any action but ``read``.  A long list takes several events."""

    sessions: list[SessionInfo]
    """All sessions of the principal, the most recently used first; or the one that was described, closed or created by a fork."""
    more: bool = False
    """Whether another event follows, with the next sessions."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class Transcript:
    """What a session contains, or a part of it.  A long session takes several events; each has the next part."""

    session: SessionInfo
    messages: list[ChatMessage] = attrs.field(factory=list)
    """Messages of a chat, oldest first."""
    text: str | None = None
    """Prompts and answers of a session of plain prompts, as one text.  ``None`` for a chat."""
    more: bool = False
    """Whether another event follows."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class TokenList:
    """Answer to a ``TokenizeQuery``.  Its event is called ``tokens``."""

    tokens: list[int]
    offsets: list[int] | None = None
    """For each token of a text, how many characters of the text come before it.  ``None`` for ``messages`` and
    ``tokens``, and if the vocabulary normalises the text."""
    text: str | None = None
    """The text of ``tokens``, or the rendered ``messages``."""
    id: str | None = None


Capability = Literal["completion", "chat", "tools", "reasoning", "embedding"]

ModelState = Literal["unloaded", "loading", "ready", "draining", "failed"]


@attrs.frozen(kw_only=True)
class AdapterDescription:
    """A LoRA adapter of a model."""

    name: str
    """For the ``adapters`` field of requests.  ``MODEL:NAME`` also names the model with this adapter."""
    scale: float
    """Scale for requests that give none."""
    rank: int
    """The largest of its matrices."""
    size_bytes: int
    """Size of its file."""


@attrs.frozen(kw_only=True)
class ModelDescription:
    """One model as it is served."""

    name: str
    """For the ``model`` field of requests."""
    description: str
    """llama.cpp's own words: architecture, size, quantization."""
    architecture: str
    quantization: str | None = None
    size_bytes: int
    """Size of the weights."""
    n_parameters: int
    context: int
    """Tokens that the KV cache holds, for all requests together."""
    context_per_request: int
    """Prompt and answer of one request, at most."""
    parallel: int
    """Answers that are generated at a time."""
    capabilities: list[Capability]
    embedding_length: int
    chat_template: str | None = None
    """Jinja source.  It may come from the model file: render it in a sandbox only."""
    adapters: list[AdapterDescription] = attrs.field(factory=list)
    created_at: float = 0.0
    """Seconds since 1970, when the model file was last written."""
    aliases: list[str] = attrs.field(factory=list)
    """Further names."""
    state: ModelState = "ready"
    """``unloaded``: the first request loads it.  Until it has been loaded once, the fields above say what its file says."""
    reason: str | None = None
    """Why it could not be loaded, for ``failed``."""
    pinned: bool = False
    """Never unloaded to make room for another model."""
    memory_bytes: int | None = None
    """Weights and KV cache, while it is loaded."""
    unloads_in_s: float | None = None
    """When it is unloaded if nobody uses it, while it is loaded; ``None``: it stays."""

    @property
    def names(self) -> list[str]:
        """The names that requests may give: of the model, and of the model with each of its adapters."""
        return [self.name, *[f"{self.name}:{adapter.name}" for adapter in self.adapters]]

    def is_called(self, name: str) -> bool:
        """Whether requests may give this name, which may be an alias."""
        others = [f"{alias}:{adapter.name}" for alias in self.aliases for adapter in self.adapters]
        return name.removesuffix(".gguf") in self.names or name in (*self.aliases, *others)


@attrs.frozen(kw_only=True)
class ModelList:
    """Answer to a ``ModelsQuery``.  Its event is called ``models``."""

    models: list[ModelDescription]
    """The first one is the default."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class HealthCheck:
    """One condition of readiness."""

    name: Literal["model", "engine", "queue", "memory", "draining"]
    ok: bool
    reason: str
    """What was found, for people."""
    model: str | None = None
    """Which model; ``None`` for the daemon as a whole."""


@attrs.frozen(kw_only=True)
class Health:
    """Answer to a ``HealthQuery``."""

    ready: bool
    """Whether all checks are ok."""
    checks: list[HealthCheck]
    id: str | None = None


@attrs.frozen(kw_only=True)
class Timings:
    """Durations of a request in milliseconds, on the daemon's clock."""

    queue_ms: float
    """From arrival until the request got a sequence."""
    ttft_ms: float | None = None
    """From arrival to the first token; ``None`` without one."""
    total_ms: float
    """From arrival to this event."""
    tokens_per_s: float | None = None
    """Rate after the first token; ``None`` below two tokens."""


@attrs.frozen(kw_only=True)
class Logprob:
    """Log probability of one token, as the model computed it: before biases, penalties, temperature and filters."""

    token_id: int
    text: str
    """The token by itself; U+FFFD stands for bytes that are no whole character."""
    bytes: list[int]
    """The token's bytes.  The text of an event can differ from them, because incomplete characters are held back."""
    logprob: float
    """Natural logarithm of the probability."""


@attrs.frozen(kw_only=True)
class Logprobs(Logprob):
    """Log probability of a token of the answer, and of its most likely alternatives."""

    top_logprobs: list[Logprob]
    """Most likely first."""


@attrs.frozen(kw_only=True)
class Generated:
    """One generated token, with the text that became complete with it: a ``Token`` or ``Reasoning``.

    ``text`` holds whole characters only.  It is empty when the token ends inside a character, or inside something that
    may become a stop string.
    """

    id: str
    text: str
    token_id: int | None = None
    """``None`` for the echoed prompt, and for text whose token has another event."""
    index: int | None = None
    """Which answer this belongs to, from 0; ``None`` if the request asked for one."""
    logprob: float | None = None
    """This field and the following ones are as in ``Logprobs``, if the request asked for them."""
    bytes: list[int] | None = None
    top_logprobs: list[Logprob] | None = None

    @classmethod
    def of(
        cls,
        id: str,
        text: str,
        token_id: int | None,
        logprobs: Logprobs | None,
        *,
        index: int | None = None,
    ) -> Self:
        """Build the event of a token, with ``logprobs`` flattened into it."""
        if logprobs is None:
            return cls(id=id, text=text, token_id=token_id, index=index)
        return cls(
            id=id,
            text=text,
            token_id=token_id,
            index=index,
            logprob=logprobs.logprob,
            bytes=logprobs.bytes,
            top_logprobs=logprobs.top_logprobs,
        )


@attrs.frozen(kw_only=True)
class Token(Generated):
    """A token of the answer."""

    echo: bool = False
    """Whether this is the echoed prompt."""
    inserted: bool = False
    """Whether the controller chose the token, not the model."""


@attrs.frozen(kw_only=True)
class Reasoning(Generated):
    """A token of the reasoning, which is not part of the answer; see ``Generate.separate_reasoning``."""


@attrs.frozen(kw_only=True)
class ToolCallDelta:
    """A part of a tool call; its event is called ``tool_call``.

    The first event of a call has ``call_id`` and ``name``, the following ones have ``arguments``.  A call counts when
    ``Eos.tool_calls`` has it: one that was cut, or goes wrong after it has begun, comes again as text.
    """

    id: str
    call: int
    """Which call of the answer, from 0."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """The next piece of the arguments, as JSON text."""
    index: int | None = None
    """Which answer this belongs to, from 0; ``None`` if the request asked for one."""


@attrs.frozen(kw_only=True)
class Eos:
    """End of an answer.  It is the last event of the answer, and of the request when all its answers have ended."""

    id: str
    reason: FinishReason
    """``deadlock``: all answers of the request have waited for each other."""
    usage: Usage
    timings: Timings
    index: int | None = None
    """Which answer has ended, from 0; ``None`` if the request asked for one and has no controller."""
    text: str | None = None
    """The whole text, if ``stream`` was false."""
    reasoning: str | None = None
    """The reasoning, if there was some and ``stream`` was false; see ``Generate.separate_reasoning``."""
    tool_calls: list[ToolCall] | None = None
    """The complete calls, if there are some, whether or not they were streamed."""
    constraint_complete: bool | None = None
    """Whether the answer has ended by itself, where its constraint allows it.  ``None`` without a constraint."""
    logprobs: list[Logprobs] | None = None
    """One entry a token, if the request asked for them and ``stream`` was false."""
    stop: str | None = None
    """The stop string that ended the answer."""
    waits_for: list[str] | None = None
    """With reason ``deadlock``: the variables that the controller waited for, if it says so."""
    seed: int | None = None
    """The seed; ``None`` if nothing was drawn at random."""
    session: SessionInfo | None = None
    """The session after this request, if it has one."""
    metadata: dict[str, Any] | None = None


@attrs.frozen(kw_only=True)
class Failure:
    """An error of request ``id``, or of the connection if ``id`` is ``None``.  Its event is called ``error``."""

    code: str
    message: str
    id: str | None = None
    index: int | None = None
    """Which answer has failed, if the others go on."""
    retry_after_ms: int | None = None
    field: str | None = None
    """The field of the request that is wrong, as in ``messages[0].role``, if it is one."""
    metadata: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: UmaError, *, metadata: dict[str, Any] | None = None, index: int | None = None) -> Failure:
        """Build the event that reports ``error``."""
        return cls(
            code=error.code,
            message=str(error),
            id=error.request_id,
            index=index,
            retry_after_ms=error.retry_after_ms,
            field=error.field,
            metadata=metadata,
        )


@attrs.frozen(kw_only=True)
class Metrics:
    """A metrics snapshot; docs/METRICS.md lists its fields."""

    snapshot: Mapping[str, Any]
    id: str | None = None


@attrs.frozen(kw_only=True)
class SequenceInfo:
    """One sequence of the KV cache."""

    seq_id: int
    state: Literal["prefill", "decode", "cached"]
    """``cached``: its request has ended, and its tokens are kept for later ones."""
    cells_used: int
    """Cells that hold a token."""
    cells_reserved: int
    """Cells that no other sequence can use."""
    principal: str
    request_id: str | None = None
    """This field and the next ones are absent for ``cached``."""
    session_id: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Generated so far."""


@attrs.frozen(kw_only=True)
class Activity:
    """Answer to a ``WatchQuery``, once every interval.  Its event is called ``watch``."""

    at_s: float
    """Seconds since the watch began, on the clock of the records."""
    metrics: dict[str, Any]
    """A snapshot, as in ``Metrics``."""
    checks: list[HealthCheck]
    """As in ``Health``."""
    sequences: list[SequenceInfo]
    """What the KV cache holds, by ``seq_id``."""
    sessions: list[SessionInfo]
    """The most recently used ones, of all principals."""
    records: list[dict[str, Any]]
    """Ticks and finished requests since the previous event, as in the perf log; docs/PERF_LOG.md lists their fields."""
    dropped_records: int = 0
    """Records that were left out since the previous event, because there were too many of them."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class PrefillProgress:
    """How far the prefill of a prompt is.  Its event is called ``progress``, and comes only if the request asks for it."""

    id: str
    prefilled_tokens: int
    """Tokens of the prompt that are in the KV cache; those that were found there are included."""
    prompt_tokens: int
    index: int | None = None
    """Which answer this belongs to, from 0; ``None`` if the request asked for one."""


@attrs.frozen(kw_only=True)
class LoadProgress:
    """A request waits for its model.  Its event is called ``loading``, and comes only if the request asks for progress."""

    id: str
    model: str
    state: ModelState
    """``loading``; or ``draining``, while the requests of a copy that is replaced end."""
    progress: float
    """Loaded share of the weights, from 0 to 1."""


@attrs.frozen(kw_only=True)
class Embeddings:
    """Embeddings of an ``Embed`` request, in the order of its texts.  A long answer takes several events."""

    embeddings: list[list[float]]
    """The next embeddings: all of length 1."""
    usage: Usage
    """Tokens up to here."""
    more: bool = False
    """Whether another event follows."""
    id: str | None = None


Answer = Metrics | SessionList | Transcript | TokenList | ModelList | Health | Activity | Controllers
"""What a query is answered with."""

ControllerEvent = Fork | ControllerOutput | Backtrack
"""What only a request with a controller causes."""

ServerEvent = (
    Token
    | Reasoning
    | ToolCallDelta
    | Eos
    | Failure
    | PrefillProgress
    | LoadProgress
    | Embeddings
    | ControllerEvent
    | Answer
)


@attrs.frozen
class UnknownEvent:
    """An event of a newer daemon that this version does not know."""

    fields: Mapping[str, Any]

    @property
    def id(self) -> str | None:
        """The request that the event belongs to, if it names one."""
        return self.fields.get("id")


Event = ServerEvent | UnknownEvent
"""Everything that a client can receive."""

_EVENT_NAMES: Final = {
    Token: "token",
    Reasoning: "reasoning",
    ToolCallDelta: "tool_call",
    Eos: "eos",
    Failure: "error",
    PrefillProgress: "progress",
    LoadProgress: "loading",
    Metrics: "metrics",
    SessionList: "sessions",
    Embeddings: "embeddings",
    Transcript: "transcript",
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


def parse(fields: dict[str, Any]) -> ClientMessage:
    """Convert the decoded payload of a client's message.

    Unknown fields are ignored, so that a newer client can talk to an older daemon.

    Raises:
        BadRequest: names the field, and carries ``request_id`` if the payload has a usable one.
    """
    try:
        return _parse(fields)
    except BadRequest as error:
        claimed = fields.get("id")
        if isinstance(claimed, str) and 0 < len(claimed) <= MAX_NAME_CHARS:
            error.request_id = claimed
        raise


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
        snapshot = {key: value for key, value in fields.items() if key not in ("event", "id")}
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
    if kind == "metrics":
        return convert(fields, MetricsQuery)
    if kind == "sessions":
        return _parse_session_query(fields)
    if kind == "tokenize":
        return _parse_tokenize_query(fields)
    if kind == "models":
        return _parse_models_query(fields)
    if kind == "health":
        return convert(fields, HealthQuery)
    if kind == "embed":
        return convert(fields, Embed)
    if kind == "watch":
        return convert(fields, WatchQuery)
    if kind == "controllers":
        return parse_query(fields)
    if kind not in (None, "generate"):
        raise BadRequest(
            "type must be 'generate', 'embed', 'sessions', 'tokenize', 'models', 'health', 'metrics', 'watch' or "
            "'controllers'",
            field="type",
        )
    request = convert(fields, Generate, str_keys=True)  # JSON has token ids as text in logit_bias
    if request.controller is not None:
        check_controller(request.controller_arg, _conflicts_with_controller(request))
    elif request.controller_arg is not None:
        raise BadRequest(
            "controller_arg goes with controller, the name of the controller that gets it", field="controller_arg"
        )
    elif (request.prompt is None) == (request.messages is None):
        raise BadRequest("give exactly one of prompt, messages and controller")
    check_messages(request.messages or ())
    check_template_kwargs(request.chat_template_kwargs)
    check_tools(request.tools, request.tool_choice)
    if request.tools and request.messages is None:
        raise BadRequest(
            "tools go with messages, not with a prompt: the chat template tells the model about them", field="tools"
        )
    if request.chat_template_kwargs and request.messages is None:
        raise BadRequest(
            "chat_template_kwargs go with messages: a prompt has no template", field="chat_template_kwargs"
        )
    if request.must_call and request.ignore_eos:
        raise BadRequest(
            "ignore_eos does not go with this tool_choice: an answer ends after its calls", field="ignore_eos"
        )
    if request.session_id is not None and request.n > 1:
        raise BadRequest(
            "n must be 1 with session_id: a session continues one answer; fork it to get several", field="n"
        )
    if request.constraint is not None:
        _check_constraint(request.constraint, ignore_eos=request.ignore_eos)
    if request.metadata is not None:
        _check_metadata(request.metadata)
    return request


_UNCONTROLLED: Final = (
    "prompt",
    "messages",
    "tools",
    "n",
    "stop",
    "stop_token_ids",
    "constraint",
    "ignore_eos",
    "echo",
    "return_full_text",
    "separate_reasoning",
    "session_id",
    "n_keep",
)
"""Fields that a request with a controller cannot have: the controller makes the prompt, and ends the answer."""


def _conflicts_with_controller(request: Generate) -> list[str]:
    least = Generate(id=request.id)
    return [name for name in _UNCONTROLLED if getattr(request, name) != getattr(least, name)]


def _check_constraint(constraint: Constraint, *, ignore_eos: bool) -> None:
    kinds = ("json_schema", "json_object", "regex", "lark", "gbnf", "choice")
    given = [name for name in kinds if getattr(constraint, name) not in (None, False)]
    if len(given) != 1:
        raise BadRequest(
            f"constraint must have exactly one of {', '.join(kinds)}; it has {', '.join(given) or 'none'}",
            field="constraint",
        )
    if ignore_eos:
        raise BadRequest(
            "ignore_eos does not go with constraint: an answer ends where the constraint allows no more",
            field="ignore_eos",
        )


def _parse_session_query(fields: dict[str, Any]) -> SessionQuery:
    query = convert(fields, SessionQuery)
    if (query.session_id is None) != (query.action == "list"):
        raise BadRequest(
            "session_id is required for every action except list, and not allowed to list sessions", field="session_id"
        )
    if (query.new_id is None) != (query.action != "fork"):
        raise BadRequest("new_id is required to fork a session, and not allowed otherwise", field="new_id")
    return query


def _parse_models_query(fields: dict[str, Any]) -> ModelsQuery:
    query = convert(fields, ModelsQuery)
    if (query.model is None) != (query.action == "list"):
        raise BadRequest(
            "model is required to load, unload or reload one, and not allowed to list models", field="model"
        )
    return query


def _parse_tokenize_query(fields: dict[str, Any]) -> TokenizeQuery:
    query = convert(fields, TokenizeQuery)
    if sum(given is not None for given in (query.text, query.messages, query.tokens)) != 1:
        raise BadRequest("give exactly one of text, messages and tokens")
    check_messages(query.messages or ())
    check_template_kwargs(query.chat_template_kwargs)
    check_tools(query.tools, "auto")
    if query.tools and query.messages is None:
        raise BadRequest("tools go with messages: the chat template tells the model about them", field="tools")
    return query


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Require metadata that is small, shallow and the same in both encodings, because the daemon echoes it."""
    check_json(metadata, "metadata", MAX_METADATA_DEPTH)
    size = len(msgspec.json.encode(metadata))
    if size > MAX_METADATA_BYTES:
        raise BadRequest(f"metadata has {size} bytes; the limit is {MAX_METADATA_BYTES}", field="metadata")


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
    """Spelled out like a token's fields: up to twenty of these come with each token."""
    return {
        "token_id": found.token_id,
        "text": found.text,
        "bytes": found.bytes,
        "logprob": found.logprob,
    }


def _plain(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Like ``attrs.asdict`` without ``None``, but leaves ``metadata`` as it is: its values are plain already."""
    found = {field.name: getattr(record, field.name) for field in attrs.fields(type(record))}
    return {name: _plain_value(value) for name, value in found.items() if value is not None}


def _plain_value(value: Any) -> Any:
    if attrs.has(type(value)):
        return _plain(value)
    if isinstance(value, list) and value and attrs.has(type(value[0])):
        return [_plain(one) for one in value]
    return value
