"""Prompts of so many tokens, whatever the model."""

from __future__ import annotations

import random

from measure import WORDS

from uma_trio.engine.tokenizer import Tokenizer


def of_tokens(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> str:
    """Common words that make ``tokens``, or a word's tokens fewer."""
    return cut(tokenizer, rng.choices(WORDS, k=tokens), tokens)


def cut(tokenizer: Tokenizer, words: list[str], tokens: int) -> str:
    """As many of ``words``, from the first on, as ``tokens`` have room for."""
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.encode(" ".join(words[:middle]))) <= tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
