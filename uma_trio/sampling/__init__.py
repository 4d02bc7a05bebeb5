"""Sampling: from logits to tokens, and from tokens to text.

Masks, biases and penalties, filters, random draws, log probabilities, draft tokens, stop strings, reasoning, calls of tools, UTF-8
decoding.
All rows of a step are sampled together in numpy.

This package is pure: it needs numpy, msgspec, the records of the protocol and the standard library, and knows neither
models nor clients.
"""

from uma_trio.sampling.budget import ReasoningBudget, ReasoningLimit
from uma_trio.sampling.defaults import SamplingDefault, recommended, sampling_defaults
from uma_trio.sampling.dry import Breakers
from uma_trio.sampling.logit_ops import Bias, Past, TokenHistory
from uma_trio.sampling.logprobs import TokenLogprobs, compute_logprobs
from uma_trio.sampling.markers import CallMarkers, ParameterTags, ReasoningMarkers
from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.prompt_lookup import PromptLookup
from uma_trio.sampling.regions import RegionAssembler
from uma_trio.sampling.sampler import NO_TOKEN, copied_rows, distribution, sample
from uma_trio.sampling.text import TextAssembler
from uma_trio.sampling.tool_calls import ToolCalling

__all__ = [
    "NO_TOKEN", "Bias", "Breakers", "CallMarkers", "ParameterTags", "Past", "PromptLookup", "ReasoningBudget", "ReasoningLimit", "ReasoningMarkers", "RegionAssembler", "SamplingDefault",
    "SamplingParams", "TextAssembler", "TokenHistory", "TokenLogprobs", "ToolCalling", "compute_logprobs", "copied_rows",
    "distribution", "recommended", "sample", "sampling_defaults",
]  # fmt: skip
