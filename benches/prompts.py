"""Prompts with a given number of tokens, for any model."""

from __future__ import annotations

import random

from measure import WORDS

from uma_trio.tokenizer.tokenizer import Tokenizer


def of_tokens(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> str:
    """A text of common words with ``tokens`` tokens, or fewer by less than a word."""
    return cut(tokenizer, rng.choices(WORDS, k=tokens), tokens)


def cut(tokenizer: Tokenizer, words: list[str], tokens: int) -> str:
    """The longest text of the first ``words`` with at most ``tokens`` tokens."""
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.encode(" ".join(words[:middle]))) <= tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
