"""The parts of an answer: reasoning, text and tool calls, one after the other.

The APIs that have such parts announce each one, send its pieces and end it.  ``PartRenderer`` finds out when which of
that is due; a dialect writes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import msgspec

from uma_trio.client import Eos, Event, PrefillProgress, Reasoning, Token, ToolCallDelta
from uma_trio.gateway.answer import AnswerRenderer
from uma_trio.gateway.dialects.common.shapes import logprobs_of
from uma_trio.protocol.events import Logprobs


@attrs.define(kw_only=True)
class Part:
    """One part of an answer."""

    kind: Literal["reasoning", "text", "call"]
    position: int
    """In the answer, from 0."""
    text: str = ""
    """What has been generated of it; the arguments of a call, as JSON."""
    call_id: str = ""
    name: str = ""
    """The name of the tool that is called."""
    logprobs: list[Logprobs] = attrs.Factory(list)
    """One entry for each token of a text, if the request asked for them."""

    @property
    def is_complete(self) -> bool:
        """Whether it can be used: the arguments of a call that was cut are not valid JSON."""
        if self.kind != "call":
            return True
        try:
            return isinstance(msgspec.json.decode(self.text), dict)
        except (msgspec.DecodeError, RecursionError):
            return False


def parts_of(eos: Eos, *, has_reasoning: bool = True) -> list[Part]:
    """The parts of an answer that was not streamed, with its reasoning or without."""
    parts: list[Part] = []
    if eos.reasoning and has_reasoning:
        parts.append(Part(kind="reasoning", position=0, text=eos.reasoning))
    calls = eos.tool_calls or []
    if eos.text or not (parts or calls):
        parts.append(Part(kind="text", position=len(parts), text=eos.text or "", logprobs=eos.logprobs or []))
    for call in calls:
        text = msgspec.json.encode(call.arguments).decode()
        parts.append(Part(kind="call", position=len(parts), text=text, call_id=call.id or "", name=call.name))
    return parts


class PartRenderer(AnswerRenderer):
    """Writes a streamed answer as parts.  Keeps what it has written in ``parts``.

    Args:
        has_reasoning: whether the reasoning is written.
    """

    def __init__(self, *, has_reasoning: bool = True) -> None:
        self._has_reasoning = has_reasoning
        self.parts: list[Part] = []
        self.prompt_tokens: int | None = None
        """Known before the first token if the request has ``progress``."""
        self._is_open = False
        self.eos: Eos | None = None

    def render(self, event: Event) -> bytes:
        """What the client gets for one event."""
        match event:
            case Reasoning() if not self._has_reasoning:
                return b""
            case Token() | Reasoning():
                return b"".join(self._text(event))
            case ToolCallDelta():
                return b"".join(self._call(event))
            case PrefillProgress():
                self.prompt_tokens = event.prompt_tokens
            case Eos():
                self.eos = event
        return b""

    def end(self) -> bytes:
        """The end of the last part and of the answer."""
        assert self.eos is not None
        missing = [] if self.parts else [*self._begin_part("text")]
        return b"".join([*missing, *self._end_part(), self.render_last(self.eos)])

    def whole(self, ends: Sequence[Eos]) -> object:
        """The answer that was not streamed."""
        [eos] = ends
        self.eos, self.parts = eos, parts_of(eos, has_reasoning=self._has_reasoning)
        return self.complete(eos)

    def _text(self, event: Token | Reasoning) -> Iterator[bytes]:
        if not event.text and event.logprob is None:
            return
        kind: Literal["reasoning", "text"] = "text" if isinstance(event, Token) else "reasoning"
        if not self._is_open or self.parts[-1].kind != kind:
            yield from self._begin_part(kind)
        part = self.parts[-1]
        part.text += event.text
        logprobs = logprobs_of(event) if kind == "text" else None
        if logprobs is not None:
            part.logprobs.append(logprobs)
        yield self.render_piece(part, event.text, logprobs)

    def _call(self, event: ToolCallDelta) -> Iterator[bytes]:
        if event.call_id is not None:
            yield from self._begin_part("call", call_id=event.call_id, name=event.name or "")
        if event.arguments and self._is_open:
            self.parts[-1].text += event.arguments
            yield self.render_piece(self.parts[-1], event.arguments, None)

    def _begin_part(
        self, kind: Literal["reasoning", "text", "call"], *, call_id: str = "", name: str = ""
    ) -> Iterator[bytes]:
        yield from self._end_part()
        self.parts.append(Part(kind=kind, position=len(self.parts), call_id=call_id, name=name))
        self._is_open = True
        yield self.render_begin(self.parts[-1])

    def _end_part(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield self.render_end(self.parts[-1])

    @abstractmethod
    def render_begin(self, part: Part) -> bytes:
        """Announces a part, which is still empty."""

    @abstractmethod
    def render_piece(self, part: Part, text: str, logprobs: Logprobs | None) -> bytes:
        """The next piece of a part."""

    @abstractmethod
    def render_end(self, part: Part) -> bytes:
        """Ends a part."""

    @abstractmethod
    def render_last(self, eos: Eos) -> bytes:
        """Ends the answer."""

    @abstractmethod
    def complete(self, eos: Eos) -> object:
        """All of the answer, whose ``parts`` are known."""
