"""One call of ``llama_decode``, and what was sampled after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from uma_trio.engine_link.messages import StepInput
from uma_trio.engine_link.sampling import TokenLogprobs


class Call:
    """A call of ``llama_decode``, and what it samples.

    Args:
        inputs: at their positions.
    """

    def __init__(self, inputs: Sequence[StepInput]) -> None:
        self.inputs = inputs
        self.samples = [sample for step_input in inputs for sample in step_input.samples]
        self.params = [sample.params for sample in self.samples]
        self.controller_keys = {
            row: sample.controller_mask for row, sample in enumerate(self.samples) if sample.controller_mask is not None
        }
        """For each row of logits with a mask of a controller, the key of the mask."""
        self.are_plain = not [
            sample
            for sample in self.samples
            if sample.banned is not None
            or sample.bias is not None
            or sample.past is not None
            or sample.logprobs is not None
            or sample.params.mirostat
        ]
        """Whether logits, parameters and random numbers are all that the tokens depend on, masks aside, and all that is wanted
        is tokens."""


class SampledCall(NamedTuple):
    """What was sampled after a call."""

    tokens: Sequence[int]
    """One for each sample."""
    scores: Sequence[TokenLogprobs | None]
    """One for each sample, ``None`` where nobody asked; empty where nobody asked at all."""
    mus: Mapping[int, float]
    """What mirostat changes, by row."""
    copied_logits_rows: int
    """Rows of logits that were copied before they were read."""


NOTHING_SAMPLED: Final = SampledCall((), (), {}, 0)
