"""Sampling: from logits to tokens, and from tokens to text.

Masks, biases and penalties, filters, random draws, log probabilities, draft tokens, stop strings, reasoning, UTF-8 decoding.
All rows of a step are sampled together in numpy.

This package is pure: it needs numpy, msgspec and the standard library, and knows neither models nor clients.
"""

from uma_trio.sampling.defaults import SamplingDefault, given, recommended, sampling_defaults
from uma_trio.sampling.logit_ops import Bias, Past, TokenHistory
from uma_trio.sampling.logprobs import TokenLogprobs, compute_logprobs
from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.prompt_lookup import PromptLookup
from uma_trio.sampling.reasoning import ReasoningAssembler, ReasoningMarkers
from uma_trio.sampling.sampler import NO_TOKEN, copied_rows, distribution, sample
from uma_trio.sampling.text import TextAssembler

__all__ = [
    "NO_TOKEN", "Bias", "Past", "PromptLookup", "ReasoningAssembler", "ReasoningMarkers", "SamplingDefault",
    "SamplingParams", "TextAssembler", "TokenHistory", "TokenLogprobs", "compute_logprobs", "copied_rows",
    "distribution", "given", "recommended", "sample", "sampling_defaults",
]  # fmt: skip
