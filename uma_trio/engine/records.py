"""What is said to an engine and what it answers: plain values, no pointers, no callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio.kv.edits import Copy, Edit, Forget, Load, Mark, Remove, Save
from uma_trio.sampling import Bias, Past, SamplingParams, Score

__all__ = [
    "Copy", "Draw", "Edit", "Engine", "EngineError", "Feed", "Forget", "Load", "Mark", "ModelFacts", "Past", "PromptPart",
    "Remove", "Save", "Score", "Step", "StepResult", "TokenIds",
]  # fmt: skip

TokenIds = npt.NDArray[np.int32]


@attrs.frozen
class PromptPart:
    """A stretch of a prompt's text."""

    text: str
    parse_special: bool = True
    """Control tokens that it spells out are read as such; else they are letters like others."""


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
    unified: bool = True
    """All sequences share the cells: copying between them is bookkeeping."""
    pads: bool = False
    """In one call attention takes as long for each sequence as for the longest of them."""
    rewinds: bool = True
    """A sequence's last tokens can be removed.  Not of a recurrent memory; nor of one with a sliding window where all
    share the cells: there others get those behind it."""
    states_rewind: bool = True
    """Of a loaded state as well; that of a sliding-window memory has the last window alone."""
    checkpoints: int = 0
    """Where they cannot be: the most checkpoints that there is memory for."""
    kv_bytes_per_token: float = 0.0
    """Of the KV cache, in all layers."""
    n_layer: int = 0
    n_embd: int = 0
    memory_bytes_per_s: float | None = None
    """What the memory that holds the weights can move; ``None`` where that was not measured."""
    spare_cores: int = 1
    """That steps leave to others."""

    @property
    def window(self) -> int:
        """Tokens that one request can have, prompt and answer together."""
        return min(self.n_ctx_seq, self.n_ctx_train)


@attrs.define(eq=False)
class Draw:
    """How the token after a feed is chosen.  Never changed; frozen it would take three times as long to make."""

    params: SamplingParams
    step: int
    """Tokens that were drawn for this request before."""
    mask: TokenIds | None = None
    """Ids that must not be chosen."""
    bias: Bias | None = None
    """What is added to the logits."""
    past: Past | None = None
    """What stands before, if there are penalties: the end of what the sequence then holds."""
    logprobs: int | None = None
    """Tell how likely the token was, and the so many most likely ones."""


@attrs.define(eq=False)
class Feed:
    """Tokens of one sequence, consecutive in it and in the batch.  Never changed, as ``Draw``."""

    seq_id: int
    pos: int
    """Of the first token: how many the sequence holds already."""
    tokens: TokenIds | Sequence[int]
    draws: Sequence[Draw] = ()
    """For what follows each of the last ``len(draws)`` tokens: none inside a prompt, one at its end and while
    decoding, one for every token where the later ones are guesses to be checked."""


@attrs.frozen
class Step:
    """One tick: first what changes in the cache, then what is computed."""

    edits: Sequence[Edit] = ()
    """In order."""
    batches: Sequence[Sequence[Feed]] = ()
    """One ``llama_decode`` each, one after another; in all of them together at most one feed a sequence.  None is
    empty, and none has more than ``n_batch`` tokens."""


@attrs.frozen
class StepResult:
    """What came of a step."""

    tokens: tuple[int, ...]
    """One for each draw, in the order of the feeds; -1 where the logits gave no distribution."""
    decode_ms: float = 0.0
    sample_ms: float = 0.0
    started_s: float = 0.0
    """``time.perf_counter()`` when the engine took the step up, and"""
    ended_s: float = 0.0
    """when it was done: the difference between one step's end and the next one's start is the host gap."""
    copied_rows: int = 0
    """Of the rows of logits, those that were copied before they were read."""
    scores: Sequence[Score | None] = ()
    """One for each draw, ``None`` where it was not asked for; empty where nobody asked."""
    copied_ms: float = 0.0
    """What saving and loading states took; not part of the decode, as what checkpoints take is not."""
    saved_bytes: int = 0
    """Of the states that were saved, their checkpoints included: what of their buffers counts."""
    refused: Sequence[tuple[int, str]] = ()
    """States that were not saved or not loaded: sequence and reason.  One that was to be loaded left it empty."""


class Engine(Protocol):
    """What the runner needs of a model.  Blocking; one call at a time, always from the same thread."""

    @property
    def facts(self) -> ModelFacts: ...

    def step(self, step: Step) -> StepResult:
        """Do one tick.  Blocks for as long as it computes, without the GIL.

        Raises:
            EngineError: see there for what is left behind.
        """

    def state_bytes(self, seq_id: int) -> int:
        """What a ``Save`` of the sequence needs, as it is now."""

    def mark_bytes(self, mark: int) -> int:
        """The same for a checkpoint; 0 where there is none of this number."""

    def used_cells(self) -> dict[int, int]:
        """Tokens that the KV cache holds, by sequence; sequences without any are left out."""

    def reset(self) -> None:
        """Start again with an empty KV cache and no checkpoints, on a new context.

        Raises:
            EngineError: that failed as well.
        """

    def abort(self) -> None:
        """Cut the running step and all later ones short, where the device can.  From any thread; for good."""

    def close(self) -> None:
        """Free everything.  Calling it again does nothing."""
