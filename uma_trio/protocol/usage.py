"""What an answer took: tokens, times, and why it ended."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
from msgspec import Meta

FinishReason = Literal["stop", "length", "tool_calls", "deadlock", "cancelled", "error"]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=2**53)]


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
