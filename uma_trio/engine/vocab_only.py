"""What a model knows without its weights: its tokenizer, its chat template, its metadata."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

import llama_abi
from uma_trio.engine.tokenizer import Tokenizer


@attrs.frozen(eq=False)
class VocabOnlyModel:
    """A model without its weights."""

    tokenizer: Tokenizer
    chat_template: str | None
    """Jinja source; ``None`` if the file has none."""
    metadata: Mapping[str, str]
    """Keys of the file and their values as text, without arrays."""


@contextlib.contextmanager
def open_vocabulary(path: Path, llama_dir: Path | None = None) -> Iterator[VocabOnlyModel]:
    """Load the vocabulary of a GGUF file, without its weights, until the ``with`` block ends.  Blocks.

    Raises:
        llama_abi.LlamaError: the file cannot be loaded.
        llama_abi.LibraryError: there is no libllama to load it with.
    """
    with llama_abi.Model(llama_abi.load(llama_dir), path, vocab_only=True) as model:
        yield VocabOnlyModel(Tokenizer(model.vocab), model.chat_template, model.metadata())
