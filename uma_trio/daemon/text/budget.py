"""A bound for reasoning: after so many tokens of it, the markers that end it follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs

from uma_trio.daemon.text.regions import RegionAssembler
from uma_trio.daemon.text.tool_calls import ToolCalling
from uma_trio.models.markers import ReasoningMarkers

MAX_DELAY: Final = 8
"""Tokens.  Reasoning is not ended inside a character or inside its own end, which may take this many more."""


@attrs.frozen(kw_only=True)
class ReasoningLimit:
    """How many tokens of reasoning an answer may have, and how the model ends reasoning."""

    n_tokens: int
    """Tokens of all reasoning in the answer, without the markers that begin and end it."""
    end: Sequence[int]
    """Tokens that end reasoning."""
    markers: ReasoningMarkers

    def budget(self, prompt: str, calling: ToolCalling | None) -> ReasoningBudget:
        """The budget of an answer to ``prompt``, which may call tools."""
        return ReasoningBudget(self, calling, is_open=self.markers.is_opened_by(prompt))


class ReasoningBudget:
    """What is left of a ``ReasoningLimit`` in one answer.

    It depends on the tokens of the answer alone.  So speculation, preemption and a restart of the engine change nothing.
    """

    def __init__(self, limit: ReasoningLimit, calling: ToolCalling | None, *, is_open: bool) -> None:
        self.n_left = limit.n_tokens
        """Tokens; negative after a delay."""
        self._limit, self._calling = limit, calling
        self.begin_message(is_open=is_open)

    def begin_message(self, *, is_open: bool) -> None:
        """The output begins anew, because a message of the user was inserted.

        Args:
            is_open: it begins inside reasoning.
        """
        self._regions = RegionAssembler((), self._limit.markers, self._calling, is_open=is_open)

    @property
    def n_free(self) -> float:
        """How many tokens may be sampled before the end of reasoning may have to follow.  At least 1; infinite if no
        reasoning can come any more."""
        return max(1, self._regions.tokens_to_reasoning + max(0, self.n_left))

    def replay(self, tokens: Sequence[int], token_to_bytes: Callable[[int], bytes]) -> None:
        """Count the tokens of an answer that goes on, including the tokens with which reasoning was ended."""
        n_ending = 0
        for token in tokens:
            if n_ending:
                n_ending -= 1
            else:
                n_ending = len(self.end_after((token,), token_to_bytes))

    def end_after(self, tokens: Sequence[int], token_to_bytes: Callable[[int], bytes]) -> Sequence[int]:
        """Count new tokens of the answer, at most ``n_free``; return the tokens that must follow, if any."""
        for token in tokens:
            was_reasoning = self._regions.in_reasoning
            self._regions.feed(token, token_to_bytes(token))
            self.n_left -= was_reasoning and self._regions.in_reasoning
        if self.n_left > 0 or not self._regions.in_reasoning:
            return ()
        if self._regions.is_undecided and self.n_left > -MAX_DELAY:
            return ()
        return self.close(token_to_bytes)

    def close(self, token_to_bytes: Callable[[int], bytes]) -> Sequence[int]:
        """End the reasoning that the output is in, if it is; returns the tokens that must follow."""
        if not self._regions.in_reasoning:
            return ()
        for token in self._limit.end:
            self._regions.feed(token, token_to_bytes(token))
        return self._limit.end
