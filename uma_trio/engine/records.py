"""What is said to an engine and what it answers: plain values, no pointers, no callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.sampling import SamplingParams

TokenIds = npt.NDArray[np.int32]


class EngineError(Exception):
    """A step failed.

    The KV cache may hold any part of the step's batch.  ``reset`` the engine when ``fatal``; otherwise
    remove the step's sequences, and it can go on.
    """

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What never changes while a model is loaded."""

    name: str
    """File name without its folder."""
    description: str
    """llama.cpp's own words: architecture, size, quantisation."""
    n_vocab: int
    n_ctx: int
    """Cells of the KV cache."""
    n_ctx_seq: int
    """Cells that one sequence can have."""
    n_ctx_train: int
    """Tokens that the model was trained to see at once."""
    n_batch: int
    """Most tokens of one step."""
    n_seq_max: int
    eog_ids: tuple[int, ...]
    """Tokens that end a generation."""
    size_bytes: int
    n_params: int

    @property
    def window(self) -> int:
        """Tokens that one request can have, prompt and answer together."""
        return min(self.n_ctx_seq, self.n_ctx_train)


@attrs.frozen
class Draw:
    """How the token after a feed is chosen."""

    params: SamplingParams
    step: int
    """Tokens that were drawn for this request before."""
    mask: TokenIds | None = None
    """Ids that must not be chosen."""


@attrs.frozen
class Feed:
    """Tokens of one sequence, consecutive in it and in the batch."""

    seq_id: int
    pos: int
    """Of the first token: how many the sequence holds already."""
    tokens: TokenIds | Sequence[int]
    draw: Draw | None
    """For the token that follows the last of these; ``None`` inside a prompt."""


@attrs.frozen
class Step:
    """One tick: first what leaves the cache, then what is computed."""

    removals: tuple[int, ...] = ()
    """Sequences whose tokens leave the KV cache, all of them."""
    feeds: tuple[Feed, ...] = ()
    """At most one a sequence, together at most ``n_batch`` tokens; may be empty."""


@attrs.frozen
class StepResult:
    """What came of a step."""

    tokens: tuple[int, ...]
    """One for each feed with a draw, in their order; -1 where the logits gave no distribution."""
    decode_ms: float = 0.0
    sample_ms: float = 0.0
    started_s: float = 0.0
    """``time.perf_counter()`` when the engine took the step up, and"""
    ended_s: float = 0.0
    """when it was done: the difference between one step's end and the next one's start is the host gap."""


class Engine(Protocol):
    """What the runner needs of a model.  Blocking; one call at a time, always from the same thread."""

    @property
    def facts(self) -> ModelFacts: ...

    def step(self, step: Step) -> StepResult:
        """Do one tick.  Blocks for as long as it computes, without the GIL.

        Raises:
            EngineError: see there for what is left behind.
        """

    def used_cells(self) -> dict[int, int]:
        """Tokens that the KV cache holds, by sequence; sequences without any are left out."""

    def reset(self) -> None:
        """Start again with an empty KV cache, on a new context.

        Raises:
            EngineError: that failed as well.
        """

    def abort(self) -> None:
        """Cut the running step and all later ones short, where the device can.  From any thread; for good."""

    def close(self) -> None:
        """Free everything.  Calling it again does nothing."""
