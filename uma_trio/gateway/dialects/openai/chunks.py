"""Completions of OpenAI's API, streamed or whole: what those of chats and those of texts have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import attrs
from msgspec import UNSET

from uma_trio.client import Eos, Event, PrefillProgress, Reasoning, Token, ToolCallDelta
from uma_trio.gateway.answer import PLACE, PreparedEvent, sse
from uma_trio.gateway.dialects.openai.dialect import OpenAIRenderer
from uma_trio.gateway.dialects.openai.extras import Extras
from uma_trio.gateway.dialects.openai.shapes import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionDetails,
    PromptDetails,
    Usage,
)
from uma_trio.protocol.messages import to_fields

FINISH_REASONS: Final = {"cancelled": "stop", "error": "stop"}
"""Where the protocol's reason has no counterpart in OpenAI's API."""


def usage_of(ends: Sequence[Eos], n: int) -> Usage:
    """The usage of all answers of a request.  A prompt counts once; it has ``n`` answers, which follow each other."""
    all_of, firsts = [eos.usage for eos in ends], [eos.usage for eos in ends[::n]]
    prompt, completion = (
        sum(answer.prompt_tokens for answer in firsts),
        sum(answer.completion_tokens for answer in all_of),
    )
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(answer.cached_tokens for answer in firsts)),
    )
    if any(answer.reasoning_tokens is not None for answer in all_of):
        reasoning = sum(answer.reasoning_tokens or 0 for answer in all_of)
        usage.completion_tokens_details = CompletionDetails(reasoning_tokens=reasoning)
    if any(answer.energy_j is not None for answer in all_of):
        usage.energy_j = round(sum(answer.energy_j or 0.0 for answer in all_of), 3)
    if (explanation := firsts[0].explanation) is not None:
        usage.explanation = {
            name: value for name, value in to_fields(explanation).items() if name not in ("event", "id")
        }
    return usage


def finish_reason(eos: Eos) -> str:
    """Why an answer ended, in OpenAI's words."""
    return FINISH_REASONS.get(eos.reason, eos.reason)


class Chunks(OpenAIRenderer):
    """Writes completions.

    Args:
        head: fields of each chunk.
        extras: further fields of chunks.
        n: answers of each prompt.
        has_usage: whether the last chunk of a stream has the usage.
        warnings: for the first chunk, which ``begin`` writes, maybe after events were rendered.
    """

    shape: type[ChatChunk | Completion]
    whole_shape: type[ChatCompletion | Completion]

    def __init__(
        self, head: dict[str, Any], request_id: str, extras: Extras, *, n: int, has_usage: bool, warnings: list[str]
    ) -> None:
        super().__init__(request_id)
        self._head = head
        self._extras = extras
        self._n = n
        self._usage = {"usage": None} if has_usage else {}
        self._warnings = warnings
        self._ends: list[Eos] = []
        self._offsets: dict[int, int] = {}
        self._prepared: dict[tuple[int | None, type], PreparedEvent] = {}

    @abstractmethod
    def choice(self, event: Event) -> Any:
        """What is new of an answer."""

    @abstractmethod
    def whole_choice(self, event: Eos) -> Any:
        """All of an answer."""

    def render(self, event: Event) -> bytes:
        """One chunk for each event that has something new."""
        more = self._extras.of(event)
        match event:
            case Token() | Reasoning() if event.logprob is None and not event.text:
                return b""
            case Token() | Reasoning() if event.logprob is None and not more:
                key = (event.index, type(event))
                if key not in self._prepared:
                    chunk = self._chunk([self.choice(attrs.evolve(event, text=PLACE))])
                    self._prepared[key] = PreparedEvent(chunk)
                return self._prepared[key].of(event.text)
            case PrefillProgress() if not more:
                return b""
            case Token() | Reasoning() | ToolCallDelta() | PrefillProgress():
                return sse(self._chunk([self.choice(event)], more))
            case Eos():
                self._ends.append(event)
                return sse(self._chunk([self.choice(event)], {} if self._usage else self._extras.at_end([event])))
        return b""

    def end(self) -> bytes:
        """The usage, if it is wanted, and the mark of the end."""
        usage = b""
        if self._usage:
            ends = sorted(self._ends, key=lambda eos: eos.index or 0)
            usage = sse(self._chunk([], {**self._extras.at_end(ends), "usage": usage_of(ends, self._n)}))
        return usage + b"data: [DONE]\n\n"

    def whole(self, ends: Sequence[Eos]) -> object:
        """All answers."""
        choices, usage = [*map(self.whole_choice, ends)], usage_of(ends, self._n)
        fields = {**self._head, "warnings": self._warnings or UNSET, **self._extras.at_end(ends)}
        return self.whole_shape(**fields, choices=choices, usage=usage)

    def _chunk(self, choices: list[Any], more: dict[str, Any] | None = None) -> object:
        return self.shape(**{**self._head, **self._usage, **(more or {})}, choices=choices)
