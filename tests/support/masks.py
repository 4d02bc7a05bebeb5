"""The writer's side of controllers' masks."""

from __future__ import annotations

import os
import tempfile

from uma_trio.engine_link.masks import ITEM_BYTES, MaskFile, Masks


class SharedMasks:
    """Rows of biases in a file without a name."""

    def __init__(self, n_rows: int, n_vocab: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``close``)
        os.ftruncate(self._file.fileno(), ITEM_BYTES * n_rows * n_vocab)
        self.file = MaskFile(self._file.fileno(), n_rows, n_vocab)
        self.rows = Masks(self.file).rows
        self.rows[:] = -100.0

    def allow_only(self, row: int, *tokens: int) -> None:
        self.rows[row] = -100.0
        self.rows[row, list(tokens)] = 0.0

    def close(self) -> None:
        self._file.close()
