"""Samples as tokens, and the chat template that renders the same in Jinja."""

from __future__ import annotations

from uma_trio.training.bpe import Tokenizer
from uma_trio.training.sample import Sample

BOS, EOS, START, END, PAD = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CONTROLS = (BOS, EOS, START, END, PAD)

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML.  Without BOS, because the tokenizer adds it (``add_bos_token``)."""


def tokens_of(sample: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokenize a sample.  Returns token ids, and for each token whether it is in the loss.

    A chat is BOS and the rendered template; the loss covers the answers and their end tokens.  A raw sample is BOS,
    question, line break, answer, EOS; the loss also covers the line break, because a prompt may come without it.
    """
    bos, eos, start, end = (tokenizer.control(name) for name in (BOS, EOS, START, END))
    ids, said = [bos], [False]

    def add(more: list[int], learned: bool) -> None:
        ids.extend(more)
        said.extend([learned] * len(more))

    def add_message(role: str, content: str, learned: bool = False) -> None:
        add([start, *tokenizer.encode(role + "\n")], False)
        add([*tokenizer.encode(content), end], learned)
        add(tokenizer.encode("\n"), False)

    if sample.raw:
        (turn,) = sample.turns
        add(tokenizer.encode(turn.question), False)
        add([*tokenizer.encode("\n"), *tokenizer.encode(turn.answer), eos], True)
        return ids, said
    if sample.system:
        add_message("system", sample.system)
    for turn in sample.turns:
        add_message("user", turn.question)
        add_message("assistant", turn.answer, learned=True)
    return ids, said
