"""The scores of a decode, read in place, and only for as long as they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llama_abi.errors import LogitsPassed

if TYPE_CHECKING:
    from llama_abi.context import Context


class LogitsView:
    """Rows of logits in llama.cpp's memory, until the next ``decode()`` or ``close()``.

    Ask for ``array`` where it is used, not earlier: the view knows when it has passed, an array
    taken from it does not.  Copy what you keep.
    """

    def __init__(self, context: Context, array: npt.NDArray[np.float32]) -> None:
        self._context = context
        self._decode = context.n_decodes
        self._array = array

    @property
    def rows(self) -> int:
        """Tokens that had asked for logits."""
        return len(self._array)

    @property
    def passed(self) -> bool:
        """Whether their memory has been taken back."""
        return self._context.closed or self._context.n_decodes != self._decode

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """float32 ``[rows, n_vocab]``, unnormalised, rows in batch order; no copy.

        It may be written to: nothing in llama.cpp reads it again, except its own samplers.

        Raises:
            LogitsPassed: the context has decoded again, or is closed.
        """
        if self.passed:
            what = "was closed" if self._context.closed else "has decoded again"
            raise LogitsPassed(f"these logits are of an earlier decode; the context {what} since")
        return self._array

    def __len__(self) -> int:
        return self.rows
