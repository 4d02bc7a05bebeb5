"""Events of a request: what it generates, how far it is, how it ends, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from uma_trio.errors import UmaError
from uma_trio.protocol.answers import ModelState, SessionInfo
from uma_trio.protocol.chat import ToolCall
from uma_trio.protocol.usage import FinishReason, Insertion, Timings, Usage


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


@attrs.define(kw_only=True)
class Generated:
    """One generated token, with the text that became complete with it: a ``Token`` or ``Reasoning``.  Nobody changes it; it is
    not frozen, because to make a frozen one takes four times as long.

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
    number: int | None = None
    """Number of the event in a detached answer, from 1; ``None`` in any other one."""

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


@attrs.define(kw_only=True)
class Token(Generated):
    """A token of the answer."""

    echo: bool = False
    """Whether this is the echoed prompt."""
    inserted: bool = False
    """Whether the controller chose the token, not the model."""


@attrs.define(kw_only=True)
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
    number: int | None = None
    """As in ``Generated``."""


@attrs.frozen(kw_only=True)
class Inserted:
    """The client has added tokens to the running answer, with a ``SteerQuery``.

    Events of the tokens of a text follow.  Those of a message have none: what follows answers it.
    """

    id: str
    insertion: Insertion
    index: int | None = None
    """Which answer this belongs to, from 0; ``None`` if the request asked for one."""
    number: int | None = None
    """As in ``Generated``."""


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
    warnings: list[str] | None = None
    """What had no effect: fields of the request that the daemon does not know."""
    metadata: dict[str, Any] | None = None
    number: int | None = None
    """As in ``Generated``."""


@attrs.frozen(kw_only=True)
class Failure:
    """An error of request ``id``, or of the connection if ``id`` is ``None``.  Its event is called ``error``."""

    code: str
    message: str
    id: str | None = None
    index: int | None = None
    """Which answer has failed, if the others go on."""
    retry_after_ms: int | None = None
    eta_ms: int | None = None
    """In how many milliseconds the answer would have been complete; with ``E_LIMIT_DEADLINE``."""
    field: str | None = None
    """The field of the request that is wrong, as in ``messages[0].role``, if it is one."""
    metadata: dict[str, Any] | None = None
    number: int | None = None
    """As in ``Generated``, if a detached answer has failed."""

    @classmethod
    def of(cls, error: UmaError, *, metadata: dict[str, Any] | None = None, index: int | None = None) -> Failure:
        """Build the event that reports ``error``."""
        return cls(
            code=error.code,
            message=str(error),
            id=error.request_id,
            index=index,
            retry_after_ms=error.retry_after_ms,
            eta_ms=error.eta_ms,
            field=error.field,
            metadata=metadata,
        )


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
class Forecast:
    """When a request is predicted to start and to end.  Its event is called ``forecast``, and comes only if asked for."""

    id: str
    queue_position: int
    """How many requests get places before it, and itself; 0: it has a place."""
    start_ms: float
    """Milliseconds until the first token."""
    end_ms: float
    """Milliseconds until the end."""
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


@attrs.frozen(kw_only=True)
class RankedDocument:
    """A document of a ``Rerank`` request."""

    index: int
    """Place in the request's ``documents``, from 0."""
    score: float
    """How well it answers the query: the model's own number, of which only the order has a meaning."""


@attrs.frozen(kw_only=True)
class Ranking:
    """The answer to a ``Rerank`` request."""

    results: list[RankedDocument]
    """The best document first.  Documents with the same score are in the order of the request."""
    usage: Usage
    id: str | None = None


@attrs.frozen
class UnknownEvent:
    """An event of a newer daemon that this version does not know."""

    fields: Mapping[str, Any]

    @property
    def id(self) -> str | None:
        """The request that the event belongs to, if it names one."""
        return self.fields.get("id")
