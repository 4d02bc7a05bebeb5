"""Questions that the daemon answers next to a running request; a watch and an attachment, which take the place of one."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import attrs
from msgspec import Meta

from uma_trio.errors import BadRequest
from uma_trio.protocol.chat import (
    MAX_TOOLS,
    Messages,
    TemplateKwargs,
    Tool,
    check_final_message,
    check_messages,
    check_template_kwargs,
    check_tools,
)
from uma_trio.protocol.field_errors import convert
from uma_trio.protocol.parameters import MAX_INT32
from uma_trio.protocol.types import MAX_TITLE, Name, Question, Title, TokenIds


@attrs.frozen(kw_only=True)
class MetricsQuery(Question):
    """Asks for one metrics snapshot."""


@attrs.frozen(kw_only=True)
class SessionQuery(Question):
    """Lists, describes, reads, closes, forks or renames sessions of the principal."""

    action: Literal["list", "describe", "read", "close", "fork", "rename"] = "list"
    session_id: Name | None = None
    """The session to act on; set for every action except ``list``."""
    new_id: Name | None = None
    """Name of the new session; set for ``fork`` alone."""
    title: Title | None = None
    """Set for ``rename`` alone.  An empty one brings the title back that the session had by itself."""
    contains: Annotated[str, Meta(max_length=MAX_TITLE)] | None = None
    """List only sessions with this text in their title or in a message, in any case; for ``list`` alone."""
    model: Name | None = None
    """The model whose sessions these are; ``None``: the daemon's first."""


@attrs.frozen(kw_only=True)
class AnswersQuery(Question):
    """Lists, describes, cancels or deletes detached answers of the principal."""

    action: Literal["list", "read", "cancel", "delete"] = "list"
    answer_id: Name | None = None
    """The answer to act on, by the ``id`` of its request; set for every action except ``list``."""
    with_messages: bool = False
    """Report the messages of its request."""


@attrs.frozen(kw_only=True)
class AttachQuery(Question):
    """Asks for the events of a detached answer, those to come as well.  Takes the place of a request.

    The events have the ``id`` of the answer.  A ``Cancel`` of it ends the attachment and not the answer.
    """

    id: Name
    after: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    """Send events with higher numbers only, and the last one in any case."""


MAX_STEER_CHARS: Final = 8192
"""Characters of a text that is appended to a running answer."""


API_PREFIXES: Final = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""What the APIs of OpenAI and Anthropic write in front of a request's id, as the id of its answer."""


def request_ids(given: str) -> set[str]:
    """The ids that a request may have whose id, or the id of whose answer, is ``given``."""
    return {given, *[given.removeprefix(prefix) for prefix in API_PREFIXES]}


@attrs.frozen(kw_only=True)
class SteerQuery(Question):
    """Changes a running answer of the principal.  At least one of the five changes is set."""

    request_id: Name
    """The ``id`` of the request, which has one answer, or of this answer (``chatcmpl-...``)."""
    text: Annotated[str, Meta(min_length=1, max_length=MAX_STEER_CHARS)] | None = None
    """Appended to the answer as if the model had written it."""
    message: Annotated[str, Meta(min_length=1, max_length=MAX_STEER_CHARS)] | None = None
    """A message of the user.  It interrupts the answer, which goes on as an answer to it.  Not with ``text``."""
    end_reasoning: bool = False
    """The tokens that end reasoning follow, if the model reasons.  From here on it cannot reason any more."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    """Tokens that the answer may have in all; never more than the request has room for."""
    stop: Literal["now", "sentence"] | None = None
    """End the answer at once, or at the end of its sentence."""


@attrs.frozen(kw_only=True)
class ExplainQuery(Question):
    """Asks which tokens of a prompt were computed although an earlier prompt began alike, and why."""

    request_id: Name
    """The ``id`` of a request of the principal that runs, or that is one of the last ones that ended, or of its answer
    (``chatcmpl-...``)."""
    model: Name | None = None
    """The model that answered; ``None``: the daemon's first."""


@attrs.frozen(kw_only=True)
class TokenizeQuery(Question):
    """Asks for the tokens of a text or of a chat, or for the text of tokens.  Exactly one of the three is set."""

    text: str | None = None
    messages: Messages | None = None
    """A chat, rendered with the model's chat template: its tokens are those that a request would prefill."""
    continue_final_message: bool = False
    """This and the next field are as in ``Generate``."""
    add_generation_prompt: bool = True
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = attrs.field(factory=list)
    """Tools of the chat, as in ``Generate.tools``."""
    chat_template_kwargs: TemplateKwargs = attrs.field(factory=dict)
    tokens: TokenIds | None = None
    model: Name | None = None
    add_special: bool = True
    """Add the tokens that the model expects around a text, such as BOS, as in ``Generate.prompt``."""
    parse_special: bool = True
    """Whether text that spells a control token becomes that token, and whether control tokens become text."""
    with_bytes: bool = False
    """Report the bytes of each token of ``text``, and where they are in its UTF-8."""


@attrs.frozen(kw_only=True)
class ModelsQuery(Question):
    """Asks which models are served, or changes what is loaded.  Only the user that runs the daemon may do so.

    ``release`` unloads a model only if nobody but the principal has used it since it was loaded.
    """

    action: Literal["list", "load", "unload", "release", "reload"] = "list"
    """The answer to the others comes when it is done, and has the one model."""
    model: Name | None = None
    """The model to act on, by any of its names.  ``list`` without it lists all."""


@attrs.frozen(kw_only=True)
class HealthQuery(Question):
    """Asks whether the daemon can serve another request now."""


@attrs.frozen(kw_only=True)
class WatchQuery(Question):
    """Asks what the daemon does, again and again until the client leaves or cancels it.  Takes the place of a request."""

    interval_ms: Annotated[int, Meta(ge=50, le=60_000)] = 250
    """Time between two events."""
    model: Name | None = None
    """The model to watch; ``None``: the daemon's first."""


def parse_session_query(fields: dict[str, Any]) -> SessionQuery:
    """
    Raises:
        BadRequest: a field is wrong, or does not go with the action.
    """
    query = convert(fields, SessionQuery)
    if (query.session_id is None) != (query.action == "list"):
        raise BadRequest(
            "session_id is required for every action except list, and not allowed to list sessions", field="session_id"
        )
    if (query.new_id is None) != (query.action != "fork"):
        raise BadRequest("new_id is required to fork a session, and not allowed otherwise", field="new_id")
    if (query.title is None) != (query.action != "rename"):
        raise BadRequest("title is required to rename a session, and not allowed otherwise", field="title")
    if query.contains is not None and query.action != "list":
        raise BadRequest("contains is allowed to list sessions only", field="contains")
    return query


def parse_answers_query(fields: dict[str, Any]) -> AnswersQuery:
    """
    Raises:
        BadRequest: a field is wrong, or does not go with the action.
    """
    query = convert(fields, AnswersQuery)
    if (query.answer_id is None) != (query.action == "list"):
        raise BadRequest(
            "answer_id is required for every action except list, and not allowed to list answers", field="answer_id"
        )
    return query


def parse_steer_query(fields: dict[str, Any]) -> SteerQuery:
    """
    Raises:
        BadRequest: a field is wrong, or nothing is to be changed.
    """
    query = convert(fields, SteerQuery)
    inserted = query.text or query.message
    if not (inserted or query.end_reasoning or query.max_tokens or query.stop):
        raise BadRequest("nothing to change: give at least one of text, message, end_reasoning, max_tokens and stop")
    if query.text and query.message:
        raise BadRequest("text goes on the answer, and a message interrupts it: send one of them", field="message")
    return query


def parse_models_query(fields: dict[str, Any]) -> ModelsQuery:
    """
    Raises:
        BadRequest: a field is wrong, or there is no model to act on.
    """
    query = convert(fields, ModelsQuery)
    if query.model is None and query.action != "list":
        raise BadRequest(f"model is missing; name the one to {query.action}", field="model")
    return query


def parse_tokenize_query(fields: dict[str, Any]) -> TokenizeQuery:
    """
    Raises:
        BadRequest: a field is wrong, or not exactly one of ``text``, ``messages`` and ``tokens`` is set.
    """
    query = convert(fields, TokenizeQuery)
    if sum(given is not None for given in (query.text, query.messages, query.tokens)) != 1:
        raise BadRequest("give exactly one of text, messages and tokens")
    check_messages(query.messages or ())
    if query.continue_final_message:
        check_final_message(query.messages)
    check_template_kwargs(query.chat_template_kwargs)
    check_tools(query.tools, "auto")
    if query.tools and query.messages is None:
        raise BadRequest("tools go with messages: the chat template tells the model about them", field="tools")
    return query
