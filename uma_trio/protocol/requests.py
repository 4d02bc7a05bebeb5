"""Requests for text and for embeddings, with the bounds of their fields that every daemon enforces."""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import attrs
from msgspec import Meta

from uma_trio.errors import BadRequest
from uma_trio.principal import PrincipalLimit, PrincipalWeight
from uma_trio.protocol.chat import (
    MAX_TOOLS,
    Messages,
    NamedTool,
    TemplateKwargs,
    Tool,
    ToolChoice,
    check_final_message,
    check_json,
    check_messages,
    check_template_kwargs,
    check_tools,
)
from uma_trio.protocol.controllers import check_controller
from uma_trio.protocol.field_errors import convert
from uma_trio.protocol.parameters import MAX_INT32, ROWS, Field, Parameter, PlainFields, with_fields
from uma_trio.protocol.types import Name, PromptTokens, Question, TokenId

Priority = Literal["interactive", "normal", "background"]
MAX_METADATA_BYTES: Final = 16 * 1024
"""Size of ``metadata`` as JSON.  The daemon echoes it, so this bounds what a client can make it send."""

MAX_METADATA_DEPTH: Final = 32
"""Nesting of objects and lists in ``metadata``, itself included."""

BANNED: Final = -100.0
"""The ``logit_bias`` that excludes a token, as in the OpenAI API."""

MAX_BIASES: Final = 300
"""Tokens of ``logit_bias``."""

LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=BANNED, le=100)]], Meta(max_length=MAX_BIASES)]
TargetMs = Annotated[float, Meta(gt=0, le=3_600_000)]


@attrs.frozen(kw_only=True)
class Slo:
    """Latency targets of a request.  The scheduler takes them as advice; a request is never refused for them."""

    target_ttft_ms: TargetMs | None = None
    """Time to first token."""
    target_itl_ms: TargetMs | None = None
    """Inter-token latency: the time between tokens."""
    priority: Priority = "normal"


MAX_TEXTS: Final = 2048
"""Texts of one request to embed or to rank."""

MAX_REQUEST_ADAPTERS: Final = 8
"""LoRA adapters of one request."""


@attrs.frozen(kw_only=True)
class AdapterChoice:
    """A LoRA adapter that a request names."""

    name: Name
    scale: Annotated[float, Meta(ge=-16, le=16)] | None = None
    """Factor of its weights.  ``None`` is the daemon's setting for the adapter, and 0 leaves it out."""


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

    @property
    def has_own_start(self) -> bool:
        """Whether it says itself where it begins, so that separate reasoning cannot come before it."""
        return any(rules is not None for rules in (self.lark, self.gbnf, self.after))


CONSTRAINT_KINDS: Final = ("json_schema", "json_object", "regex", "lark", "gbnf", "choice")
"""Fields of ``Constraint`` of which exactly one is set."""


def constraint_kind(constraint: Constraint) -> str:
    """The one of ``CONSTRAINT_KINDS`` that is set.

    Raises:
        BadRequest: none is, or several are.
    """
    given = [name for name in CONSTRAINT_KINDS if getattr(constraint, name) not in (None, False)]
    if len(given) != 1:
        raise BadRequest(
            f"constraint must have exactly one of {', '.join(CONSTRAINT_KINDS)}; it has {', '.join(given) or 'none'}",
            field="constraint",
        )
    return given[0]


MAX_INFILL_FILES: Final = 256
"""Further files of a gap."""


@attrs.frozen(kw_only=True)
class InfillFile:
    """A piece of another file that tells the model more."""

    text: str
    filename: Annotated[str, Meta(max_length=1024)] = "tmp"


@attrs.frozen(kw_only=True)
class Infill:
    """The text around a gap.  The answer fills it; a ``prompt`` is how the missing text begins."""

    prefix: str = ""
    """What stands before the gap."""
    suffix: str = ""
    """What stands after it."""
    files: Annotated[list[InfillFile], Meta(max_length=MAX_INFILL_FILES)] = attrs.field(factory=list)
    """The most important one last: the first ones go if there is no room."""


def _field(row: Field) -> Any:
    """The field of a row.  A sampling parameter that is ``None`` has the default of the daemon or of the model."""
    value: Any = Annotated[row.type, Meta(**row.bounds)]
    several: Any = Annotated[list[value], Meta(max_length=row.most)]
    kinds = [several if typing.get_origin(kind) is list else value for kind in row.kinds]
    default = None if isinstance(row, Parameter) else row.default
    kind: Any = functools.reduce(operator.or_, kinds if default is not None else [*kinds, None])
    described: Any = Annotated[kind, Meta(description=row.plain_help)]
    return attrs.field(default=default, type=described)


@with_fields(ROWS, _field)
@attrs.frozen(kw_only=True)
class Generate(PlainFields):
    """A request for text: these fields, and those of the table in ``protocol/parameters.py``.

    Exactly one of ``prompt``, ``messages`` and ``controller`` is set, or ``infill``, with which ``prompt`` may be, too.
    """

    id: Name
    model: Name | None = None
    """Which of the served models answers.  ``None`` is the default model."""
    adapters: Annotated[list[AdapterChoice], Meta(max_length=MAX_REQUEST_ADAPTERS)] = attrs.field(factory=list)
    """LoRA adapters that the answer is computed with."""
    prompt: str | PromptTokens | None = None
    """A text to continue, or its tokens."""
    infill: Infill | None = None
    """A text with a gap, which the answer fills."""
    messages: Messages | None = None
    """A chat, rendered with the model's chat template."""
    continue_final_message: bool = False
    """The answer continues the text of the last message, which is the assistant's, instead of being a new message."""
    add_generation_prompt: bool = True
    """The chat template ends ``messages`` with the beginning of a message of the assistant."""
    controller: Name | None = None
    """A controller that controls the answer token by token: its module id, or a tag.  There is no prompt then."""
    controller_arg: Any = None
    """The controller's argument, such as a program: a text, or any other JSON value."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = attrs.field(factory=list)
    """What the model may call, instead of an answer or after it."""
    tool_choice: ToolChoice = "auto"
    """``auto``: the model decides.  ``none``: as without ``tools``.  ``required``, or a tool: the answer is a call."""
    chat_template_kwargs: TemplateKwargs = attrs.field(factory=dict)
    """Variables for the chat template, such as ``enable_thinking``.  A template ignores those that it does not know."""
    logit_bias: LogitBias = attrs.field(factory=dict)
    """Token id to a number that is added to its logit.  ``BANNED`` excludes the token."""
    constraint: Constraint | None = None
    """Only tokens that it allows are sampled."""
    session_id: Name | None = None
    """Session that this request continues, or begins."""
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


@attrs.frozen(kw_only=True)
class PoolingRequest(Question):
    """What requests for embeddings and to rank have; its fields are as in ``Generate``."""

    model: Name | None = None
    adapters: Annotated[list[AdapterChoice], Meta(max_length=MAX_REQUEST_ADAPTERS)] = attrs.field(factory=list)
    principal_weight: PrincipalWeight = 1.0
    principal_max_requests: PrincipalLimit | None = None


@attrs.frozen(kw_only=True)
class Embed(PoolingRequest):
    """A request for the embeddings of texts."""

    input: Annotated[list[str | PromptTokens], Meta(min_length=1, max_length=MAX_TEXTS)]
    """Texts, or their tokens."""
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    """Return only this many dimensions of each embedding, with length 1 again."""


@attrs.frozen(kw_only=True)
class Rerank(PoolingRequest):
    """A request to rank documents by how well they answer a query."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    """Return only this many of the best documents."""


@attrs.frozen(kw_only=True)
class Cancel:
    """Cancels the running request ``id``.  Cancelling any other id is a no-op and gets no answer."""

    id: Name


def without_effect(fields: Mapping[str, Any], request: Generate) -> list[str]:
    """A warning if the client may expect the answer to continue its last message.

    Args:
        fields: those that the client has sent.
    """
    is_chosen = fields.keys() & {"continue_final_message", "add_generation_prompt"}
    last = request.messages[-1] if request.messages else None
    if is_chosen or last is None or last.role != "assistant" or last.tool_calls:
        return []
    return [NEW_MESSAGE]


NEW_MESSAGE: Final = (
    "the answer is a new message after the last one, which is the assistant's; with continue_final_message: true it "
    "continues that one"
)


def parse_generate(fields: dict[str, Any]) -> Generate:
    """Convert the fields of a request.

    Raises:
        BadRequest: a field is missing, has the wrong type, is out of bounds, or does not go with another one.
    """
    request = convert(fields, Generate, str_keys=True)  # JSON has token ids as text in logit_bias
    if request.controller is not None:
        check_controller(request.controller_arg, _conflicts_with_controller(request))
    elif request.controller_arg is not None:
        raise BadRequest(
            "controller_arg goes with controller, the name of the controller that gets it", field="controller_arg"
        )
    elif request.infill is not None:
        _check_infill(request)
    elif (request.prompt is None) == (request.messages is None):
        raise BadRequest("give exactly one of prompt, messages, infill and controller")
    check_messages(request.messages or ())
    if request.continue_final_message:
        check_final_message(request.messages)
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
    if request.detached and request.n > 1:
        raise BadRequest("n must be 1 with detached: send a request for each answer", field="n")
    if request.constraint is not None:
        _check_constraint(request.constraint, ignore_eos=request.ignore_eos)
    if request.metadata is not None:
        check_json(request.metadata, "metadata", MAX_METADATA_DEPTH, MAX_METADATA_BYTES)  # the daemon echoes it
    return request


def _check_infill(request: Generate) -> None:
    if request.messages is not None or isinstance(request.prompt, list):
        raise BadRequest(
            "infill goes with no messages, and with a prompt only if that is a text: how the missing text begins",
            field="infill",
        )
    if request.session_id is not None:
        raise BadRequest("infill goes with no session_id: a filled gap is no conversation", field="infill")


_UNCONTROLLED: Final = (
    *("prompt", "infill", "messages", "tools", "constraint", "session_id"),
    *(row.name for row in ROWS if not row.goes_with_controller),
)
"""Fields that a request with a controller cannot have: the controller makes the prompt, and ends the answer."""


def _conflicts_with_controller(request: Generate) -> list[str]:
    least = Generate(id=request.id)
    return [name for name in _UNCONTROLLED if getattr(request, name) != getattr(least, name)]


def _check_constraint(constraint: Constraint, *, ignore_eos: bool) -> None:
    constraint_kind(constraint)
    if ignore_eos:
        raise BadRequest(
            "ignore_eos does not go with constraint: an answer ends where the constraint allows no more",
            field="ignore_eos",
        )
