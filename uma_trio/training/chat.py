"""Samples as text and tokens, and the chat template that renders the same in Jinja."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from uma_trio.training.bpe import Tokenizer
from uma_trio.training.sample import Sample
from uma_trio.training.tool_format import MARKERS, system_text

BOS, EOS, START, END, PAD = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CONTROLS = (BOS, EOS, START, END, PAD, *MARKERS)
_CONTROLS = re.compile("(" + "|".join(map(re.escape, CONTROLS)) + ")")

TEMPLATE = Path(__file__).with_name("template.jinja").read_text().rstrip("\n")
"""ChatML, with tools as Hermes and Qwen have them.  Without BOS, because the tokenizer adds it (``add_bos_token``)."""


def segments(sample: Sample) -> Iterator[tuple[str, bool]]:
    """The text of a sample, in order, with control tokens spelled out; for each part, whether it is in the loss.

    A chat is the rendered template; the loss covers the answers and their end tokens.  A raw sample is question, line
    break, answer, EOS; the loss also covers the line break, because a prompt may come without it.
    """
    if sample.raw:
        (turn,) = sample.turns
        yield turn.question, False
        yield f"\n{turn.answer}{EOS}", True
        return
    system = system_text(sample.system, sample.tools) if sample.tools else sample.system
    before = f"{START}system\n{system}{END}\n" if system else ""
    for turn in sample.turns:
        yield f"{before}{START}user\n{turn.question}{END}\n{START}assistant\n", False
        yield f"{turn.answer}{END}", True
        before = "\n"
    yield before, False


def tokens_of(sample: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokenize a sample, after BOS.  Returns token ids, and for each token whether it is in the loss."""
    ids, said = [tokenizer.control(BOS)], [False]
    for text, learned in segments(sample):
        for at, part in enumerate(_CONTROLS.split(text)):
            more = [tokenizer.control(part)] if at % 2 else tokenizer.encode(part)
            ids.extend(more)
            said.extend([learned] * len(more))
    return ids, said
