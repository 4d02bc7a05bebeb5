"""From logits to text: filters and draws over all rows of a tick, stop strings, whole characters.

Pure: numpy and the standard library.  Knows neither the model nor who asked.
"""

from uma_trio.sampling.lookup import Lookup
from uma_trio.sampling.params import SamplingParams
from uma_trio.sampling.sampler import copied_rows, distribution, sample
from uma_trio.sampling.text import TextAssembler

__all__ = ["Lookup", "SamplingParams", "TextAssembler", "copied_rows", "distribution", "sample"]
