"""The tokenizer of a model file, for programs that need nothing else.  It imports little, so they start fast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from uma_trio.engine_link.load_errors import explained
from uma_trio.models.gguf_check import check_gguf
from uma_trio.tokenizer.tokenizer import Tokenizer, open_vocabulary


@contextlib.contextmanager
def vocabulary(path: Path, llama_dir: Path | None = None) -> Iterator[Tokenizer]:
    """The tokenizer of the GGUF at ``path``, without its weights.

    Raises:
        ModelError: as ``uma_trio.daemon.engines.loaded.open_model``.
    """
    with contextlib.ExitStack() as stack:
        with explained(path):
            check_gguf(path, vocab_only=True)
            opened = stack.enter_context(open_vocabulary(path, llama_dir))
        yield opened.tokenizer  # outside of ``explained``: errors of the caller are not about the file
