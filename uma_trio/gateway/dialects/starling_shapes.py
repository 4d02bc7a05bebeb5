"""Shapes of answers in Starling's API, which docs/PROTOCOL-REFERENCE.md describes."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from uma_trio.gateway.dialects.shapes import Object, Warned
from uma_trio.protocol.answers import SessionInfo
from uma_trio.protocol.chat import ChatMessage, ToolCall
from uma_trio.protocol.events import Logprobs
from uma_trio.protocol.usage import Change, FinishReason, Loss, Reason, Timings, Usage


class Answer(Warned, kw_only=True):
    """The fields of ``eos``; with several answers ``answers``, a list of them."""

    request_id: str
    answers: list[Object] | UnsetType = UNSET
    reason: FinishReason | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    index: int | UnsetType = UNSET
    text: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    constraint_complete: bool | UnsetType = UNSET
    logprobs: list[Logprobs] | UnsetType = UNSET
    stop: str | UnsetType = UNSET
    waits_for: list[str] | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    session: SessionInfo | UnsetType = UNSET
    metadata: Object | UnsetType = UNSET


class Event(msgspec.Struct):
    """An event of docs/PROTOCOL-REFERENCE.md, named by the server-sent event or by its field ``event``."""

    event: str | UnsetType = UNSET
    id: str | UnsetType = UNSET


class Tokenized(Warned):
    """Tokens, and where they begin in the text; or the text of tokens."""

    tokens: list[int]
    offsets: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET


class SteeredAnswer(Warned):
    """What was changed of a running request, and after how many of its tokens."""

    request_id: str
    after_tokens: int
    inserted_tokens: int
    reasoning_ended: bool
    max_tokens: int
    stop: Literal["now", "sentence"] | UnsetType = UNSET


class ExplainedPrompt(msgspec.Struct):
    """Which tokens of a prompt were computed although an earlier prompt began alike, and why."""

    request_id: str
    reason: Reason
    prompt_tokens: int
    cached_tokens: int
    common_tokens: int
    again_tokens: int
    cost_ms: float
    change: Change | UnsetType = UNSET
    loss: Loss | UnsetType = UNSET


class SessionPage(msgspec.Struct):
    """Sessions, the most recently used first."""

    sessions: list[SessionInfo]


class SessionContent(Warned):
    """A session with its messages, or with the text of plain prompts and their answers."""

    session: SessionInfo
    messages: list[ChatMessage] | UnsetType = UNSET
    text: str | UnsetType = UNSET


class OneSession(Warned):
    """A session as it is now."""

    session: SessionInfo


class Closed(Warned):
    """A session that is forgotten."""

    session_id: str
    closed: bool
    tokens: int


class Stopped(Warned):
    """An answer that was ended."""

    session_id: str
    stopped: bool
