"""What an answer took: tokens, times, and why it ended."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import attrs
from msgspec import Meta

FinishReason = Literal["stop", "length", "tool_calls", "deadlock", "cancelled", "error"]
Reason = Literal["cached", "new", "changed", "lost", "not_shared", "private"]
"""Why tokens of a prompt were computed, or not."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=2**53)]


ChangeKind = Literal["number", "date", "tools_order", "tools", "template", "text", "shorter"]
"""What has changed: digits only; digits of a date or a time; the order of the tools; which tools there are, or how they
are described; text that is no message's, such as a variable of the template; any other text; the prompt ends where the earlier
one goes on."""

LossCause = Literal["room", "limit", "continued", "engine"]
"""Why tokens left the KV cache: another request needed their place; idle sequences had more than their share of the cells;
another request that begins alike went on from a part of them; the engine was started again."""


Obstacle = Literal["short", "checkpoint", "computing"]
"""Why a request could not take tokens that were there: they are so few that computing them is faster than copying the
sequence that has them; the model's memory goes back to checkpoints only, and there is none; a request was still computing
them, and this one did not wait for it or waited in vain."""


@attrs.frozen(kw_only=True)
class Change:
    """The first difference of a prompt to an earlier one."""

    kind: ChangeKind
    before: str
    """Text in front of it, which both have."""
    was: str
    """What the earlier prompt has there, and this one; both as far as they differ, and at most 80 characters."""
    now: str
    message_index: Count | None = None
    """The message that differs, from 0; ``None``: none, or it is not known which."""
    role: str | None = None
    """Its role."""


@attrs.frozen(kw_only=True)
class Loss:
    """Why tokens are no longer in the KV cache."""

    cause: LossCause
    ago_ms: Count
    """How long before the explanation that was."""
    claimant: Literal["you", "another"] | None = None
    """Whether a request of the same principal needed the place; ``None``: no request did."""


@attrs.frozen(kw_only=True)
class Explanation:
    """Which tokens of a prompt were computed although an earlier prompt began alike, and why."""

    request_id: str
    reason: Reason
    prompt_tokens: Count
    cached_tokens: Count
    common_tokens: Count
    """How many tokens it has in common with the earlier prompt that is most alike, so this is the index of the first that
    differs."""
    again_tokens: Count = 0
    """Tokens that were computed again where the earlier prompt had some already."""
    cost_ms: Amount = 0
    """What they took, by the cost model."""
    change: Change | None = None
    """With ``changed``: what."""
    loss: Loss | None = None
    """With ``lost``: why."""
    obstacle: Obstacle | None = None
    """With ``not_shared``: why."""
    id: str | None = None
    """The id of the query."""


@attrs.frozen(kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    """Generated tokens, an end-of-generation token included."""
    cached_tokens: Count = 0
    """Prompt tokens whose KV cache existed already."""
    dropped_tokens: Count = 0
    """Earlier tokens that were dropped to make the prompt fit; see ``Generate.n_keep``."""
    reasoning_tokens: Count | None = None
    """Generated tokens of reasoning and its markers, with ``Generate.separate_reasoning``."""
    sampled_tokens: Count | None = None
    """Generated tokens that the model chose.  This and the next field come with ``Generate.controller``."""
    inserted_tokens: Count | None = None
    """Generated tokens that the controller chose."""
    energy_j: Amount | None = None
    """Joules that the processor and the cards took for it: its part of each step, by tokens.  ``None``: nobody counts."""
    explanation: Explanation | None = None
    """Why tokens of the prompt were computed again; with ``Generate.explain``."""


@attrs.frozen(kw_only=True)
class Timings:
    """Durations of a request in milliseconds, on the daemon's clock."""

    queue_ms: Amount
    """From arrival until the request got a sequence."""
    ttft_ms: Amount | None = None
    """From arrival to the first token; ``None`` without one."""
    total_ms: Amount
    """From arrival to this event."""
    tokens_per_s: Amount | None = None
    """Rate after the first token; ``None`` below two tokens."""


@attrs.frozen(kw_only=True)
class Insertion:
    """Tokens that the client of a running answer has added to it."""

    kind: Literal["text", "message", "end_of_reasoning"]
    """``text`` goes on the answer; a ``message`` of the user interrupts it."""
    after_tokens: Count
    """Tokens of the answer before it."""
    tokens: Count
    """How many it has, with those that the chat template puts around a message."""
    text: str = ""
    """The text, or that of the message."""


@attrs.frozen(kw_only=True)
class Generation:
    """How an answer was generated, as its ``eos`` says."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    insertions: list[Insertion] | None = None
    """What the client has added to the answer while it was generated."""

    def after(self, begun: Generation) -> Generation:
        """How an answer was generated that was begun in one way, and continued in this one."""
        usage, earlier = self.usage, begun.usage
        moved = [
            attrs.evolve(insertion, after_tokens=earlier.completion_tokens + insertion.after_tokens)
            for insertion in self.insertions or ()
        ]
        return Generation(
            reason=self.reason,
            usage=attrs.evolve(
                earlier,
                completion_tokens=earlier.completion_tokens + usage.completion_tokens,
                reasoning_tokens=_sum(earlier.reasoning_tokens, usage.reasoning_tokens),
                energy_j=_sum(earlier.energy_j, usage.energy_j),
            ),
            timings=Timings(
                queue_ms=begun.timings.queue_ms + self.timings.queue_ms,
                ttft_ms=self.timings.ttft_ms if begun.timings.ttft_ms is None else begun.timings.ttft_ms,
                total_ms=begun.timings.total_ms + self.timings.total_ms,
                tokens_per_s=_common_rate(begun, self),
            ),
            insertions=[*(begun.insertions or ()), *moved] or None,
        )


_N = TypeVar("_N", int, float)


def _sum(a: _N | None, b: _N | None) -> _N | None:
    return b if a is None else a if b is None else a + b


def _common_rate(*parts: Generation) -> float | None:
    """Tokens a second of several answers, one after another; ``None`` if none has a rate."""
    rates = [(part.usage.completion_tokens - 1, part.timings.tokens_per_s) for part in parts]
    seconds = sum(n / rate for n, rate in rates if rate)
    return sum(n for n, rate in rates if rate) / seconds if seconds else None
