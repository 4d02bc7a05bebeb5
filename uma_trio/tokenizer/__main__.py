"""Writes the vocabulary of a model file as ``tokenizer.json``: ``python -m uma_trio.tokenizer PATH [LIBRARY]``.

The gateway starts it.  On standard output comes the file, or one sentence with exit code 2 if the vocabulary cannot be
expressed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec

from uma_trio.errors import ErrorWithRemedy
from uma_trio.models.gguf_header import read_header
from uma_trio.processes.sandbox import limit_cpu
from uma_trio.tokenizer.tokenizer_json import CannotExpress, tokenizer_json
from uma_trio.tokenizer.vocabulary import vocabulary

CPU_SECONDS: Final = 120.0
"""CPU time for a vocabulary; the largest known take about 10 s."""

REFUSED: Final = 2


def main() -> None:
    """Write the file."""
    limit_cpu(CPU_SECONDS)
    path, *library = map(Path, sys.argv[1:])
    try:
        with vocabulary(path, *library) as tokenizer:
            content = tokenizer_json(read_header(path, vocab_only=True), tokenizer)
    except (CannotExpress, ErrorWithRemedy) as error:
        sys.stdout.write(str(error))
        sys.exit(REFUSED)
    sys.stdout.buffer.write(msgspec.json.encode(content))


if __name__ == "__main__":
    main()
