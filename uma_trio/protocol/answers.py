"""Answers to queries: sessions, tokens, models, health, metrics and what a watch reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal

import attrs

from uma_trio.protocol.chat import ChatMessage


def bare_name(name: str) -> str:
    """The name of a model as it is listed: requests may write it with ``.gguf``."""
    return name.removesuffix(".gguf")


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
    title: str = ""
    """What it was renamed to; otherwise the first words of the first question."""


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


AnswerState = Literal["queued", "running", "completed", "cancelled", "failed"]


@attrs.frozen(kw_only=True)
class AnswerInfo:
    """State of one detached answer."""

    answer_id: str
    """The ``id`` of its request."""
    state: AnswerState
    events: int
    """Events so far: the number of the last one."""
    durable: bool
    """Whether it is on disk, so that it goes on after the daemon was started again."""
    created_at: float
    """Seconds since 1970."""
    ended_at: float | None = None
    """Seconds since 1970; ``None`` before its end."""
    reason: str | None = None
    """Why it has failed: the code and the message of the error."""
    client_state: str | None = None
    """As in its request; not in lists."""
    messages: list[ChatMessage] | None = None
    """Those of its request, if they were asked for; not in lists."""


@attrs.frozen(kw_only=True)
class AnswerList:
    """Answer to an ``AnswersQuery``, and to a detached request, which has one.  Its event is called ``answers``."""

    answers: list[AnswerInfo]
    """All answers of the principal, the latest first; or the one that was accepted, described, cancelled or deleted."""
    more: bool = False
    """Whether another event follows, with the next answers."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class Steered:
    """Answer to a ``SteerQuery``, when the change is made."""

    request_id: str
    after_tokens: int
    """Tokens that the answer had before the change."""
    inserted_tokens: int
    """Tokens that were appended: the end of the reasoning, and the text."""
    reasoning_ended: bool
    """Whether tokens that end reasoning are among them.  Where the model cannot be interrupted yet, they follow within
    eight tokens, and this is false."""
    max_tokens: int
    """Tokens that the answer may have in all now."""
    stop: Literal["now", "sentence"] | None = None
    """As in the query."""
    id: str | None = None


TOKENS_PER_EVENT: Final = 4096
"""A longer list of tokens takes several events."""


@attrs.frozen(kw_only=True)
class TokenList:
    """Answer to a ``TokenizeQuery``.  Its event is called ``tokens``.  A long answer takes several events."""

    tokens: list[int]
    offsets: list[int] | None = None
    """For each token of a text, how many characters of the text come before it.  ``None`` for ``messages`` and
    ``tokens``, and if the vocabulary normalises the text."""
    text: str | None = None
    """The text of ``tokens``, or the rendered ``messages``."""
    bytes: list[list[int]] | None = None
    """The bytes of each token, if the query asks for them."""
    byte_ranges: list[list[int]] | None = None
    """With ``bytes``: start and end of each token in the text's UTF-8; ``None`` where ``offsets`` is."""
    more: bool = False
    """Whether another event follows, with the next tokens."""
    id: str | None = None

    def divided(self) -> Iterator[TokenList]:
        """This answer as events that take a few milliseconds each to encode and to decode."""
        for start in range(0, max(1, len(self.tokens)), TOKENS_PER_EVENT):
            end = start + TOKENS_PER_EVENT
            lists: dict[str, Any] = {name: values and values[start:end] for name, values in self._lists().items()}
            text = None if start else self.text
            yield attrs.evolve(self, **lists, text=text, more=end < len(self.tokens))

    @staticmethod
    def joined(events: Sequence[TokenList]) -> TokenList:
        """The answer that came as ``events``."""
        lists: dict[str, Any] = {
            name: values if values is None else [*chain.from_iterable(event._lists()[name] or () for event in events)]
            for name, values in events[0]._lists().items()
        }
        return attrs.evolve(events[0], **lists, more=False)

    def _lists(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "offsets": self.offsets,
            "bytes": self.bytes,
            "byte_ranges": self.byte_ranges,
        }


Capability = Literal["completion", "chat", "tools", "reasoning", "infill", "vision", "audio", "embedding", "rerank"]

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
    sampling: dict[str, int | float] = attrs.field(factory=dict)
    """Sampling parameters of requests that give none, by name, while it is loaded; ``seed`` only if there is a setting."""
    eog_tokens: list[int] = attrs.field(factory=list)
    """Tokens that end an answer, while it is loaded."""
    created_at: float = 0.0
    """Seconds since 1970, when the model file was last written."""
    aliases: list[str] = attrs.field(factory=list)
    """Further names."""
    state: ModelState = "ready"
    """``unloaded``: the first request loads it.  Until it has been loaded once, the fields above say what its file says."""
    progress: float | None = None
    """Loaded share of the weights, from 0 to 1, while it is loading."""
    reason: str | None = None
    """Why it could not be loaded, for ``failed``."""
    pinned: bool = False
    """Never unloaded to make room for another model."""
    memory_bytes: int | None = None
    """Weights and KV cache, while it is loaded."""
    path: str | None = None
    """Its file; only for the user that runs the daemon."""
    unloads_in_s: float | None = None
    """When it is unloaded if nobody uses it, while it is loaded; ``None``: it stays."""

    @property
    def names(self) -> list[str]:
        """The names that requests may give: of the model, and of the model with each of its adapters."""
        return [self.name, *[f"{self.name}:{adapter.name}" for adapter in self.adapters]]

    def is_called(self, name: str) -> bool:
        """Whether requests may give this name, which may be an alias."""
        others = [f"{alias}:{adapter.name}" for alias in self.aliases for adapter in self.adapters]
        return bare_name(name) in self.names or name in (*self.aliases, *others)


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
