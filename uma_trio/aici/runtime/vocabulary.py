"""The vocabulary of a GGUF file for controllers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from uma_trio.engine.messages import TokenIds
from uma_trio.engine.tokenizer import Tokenizer
from uma_trio.hub.environment import find_model_locations
from uma_trio.hub.errors import HubError
from uma_trio.hub.locate import find_here
from uma_trio.models.vocabulary import vocabulary

REFERENCE_NAMES = ("gpt4", "llama", "llama16", "orca", "falcon", "mistral", "mpt", "phi", "gpt2")
"""Tokenizers that the reference implementation downloads."""


class NoVocabulary(Exception):
    """There is no such vocabulary; says why, and what to give instead."""


class ModelVocabulary:
    """The tokens of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_id is None:
            raise NoVocabulary("this model has no EOS token, which controllers end with")
        self._tokenizer = tokenizer
        self.n_vocab = tokenizer.n_tokens
        self.eos = tokenizer.eos_id

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_to_bytes(token)

    def tokenize(self, text: bytes) -> TokenIds:
        return self._tokenizer.encode(
            text.decode("utf-8", "replace"), add_special=False, parse_special=False, continues=True
        )

    def tokenize_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids


@contextlib.contextmanager
def open_vocabulary(name: str, llama_dir: Path | None = None) -> Iterator[ModelVocabulary]:
    """The vocabulary of a model, until the end of the context.

    Args:
        name: a GGUF file, with or without ``.gguf``, a model of this machine, or ``embedded``.

    Raises:
        NoVocabulary: there is none.
        ModelError: see ``uma_trio.models.vocabulary``.
    """
    with vocabulary(find(name), llama_dir) as tokenizer:
        yield ModelVocabulary(tokenizer)


def find(name: str) -> Path:
    """The GGUF file that ``name`` means.  Raises ``NoVocabulary``."""
    if (path := Path(f"{name}.gguf")).is_file():
        return path
    try:
        path = find_here(name, find_model_locations(os.environ)).path
    except HubError as error:
        hint = "; this runtime downloads no tokenizers" if name in REFERENCE_NAMES else ""
        raise NoVocabulary(f"there is no tokenizer {name}{hint}: {error}") from None
    if not path.is_file():
        raise NoVocabulary(f"there is no tokenizer {name}; give a GGUF file, the name of a model, or embedded")
    return path
