"""From logits to text: edits, filters and draws over all rows of a tick, stop strings, whole characters.

Pure: numpy and the standard library.  Knows neither the model nor who asked.
"""

from uma_trio.sampling.edits import Bias, Past, Transcript, penalises
from uma_trio.sampling.logprobs import Score, logprobs
from uma_trio.sampling.lookup import Lookup
from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.sampler import copied_rows, distribution, sample
from uma_trio.sampling.text import TextAssembler

__all__ = [
    "Bias", "Lookup", "Past", "SamplingParams", "Score", "TextAssembler", "Transcript",
    "copied_rows", "distribution", "logprobs", "penalises", "sample",
]  # fmt: skip
