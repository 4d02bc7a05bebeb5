"""LoRA adapters in the engine: loaded with the model, and chosen for each row of a call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio.engine.messages import AdapterFile, EngineError
from uma_trio.kv.adapters import Scales

CALLS_WITHOUT: Final = 64
"""After this many calls without adapters, llama.cpp plans its graphs without them, which takes it 3 to 20 ms.  Until then
all rows have scales of 0, and a call takes about a tenth longer."""


class Adapters:
    """The adapters of one model.  Open them before the first context, and close them after the last one.

    Args:
        files: checked files.  They may have changed since, as before a restart of the engine.

    Raises:
        EngineError: the file of an adapter has changed, or there is no room for a temporary file.
        OSError, llama_abi.LlamaError: an adapter cannot be loaded.
    """

    def __init__(self, model: llama_abi.Model, files: Sequence[AdapterFile]) -> None:
        self.files = tuple(files)
        self._model = model
        self._stacked: llama_abi.StackedAdapters | None = None
        self._calls_without = CALLS_WITHOUT
        for each in files:
            if file_fingerprint(each.path) != each.fingerprint:
                raise EngineError(f"the adapter {each.path} has changed; restart the server")
        if files:
            from uma_trio.engine.stacked_adapters import stack_adapters  # imports gguf, which takes 0.1 s

            self._stacked = stack_adapters(model, [each.path for each in files])

    def open_context(self, options: llama_abi.ContextOptions) -> llama_abi.Context:
        """A context of the model whose calls can have adapters.

        Raises:
            llama_abi.LlamaError: as ``llama_abi.Context``.
        """
        return llama_abi.Context(self._model, options, self._stacked)

    def choose(self, context: llama_abi.Context, scales: Scales) -> None:
        """Compute all rows of the next calls of ``context`` with ``scales``.

        Raises:
            EngineError: there is no such adapter.
        """
        context.set_adapter_scales(self._vector(scales) if scales else None)

    def choose_by_row(self, context: llama_abi.Context, rows: Iterable[tuple[Scales, int]]) -> None:
        """Compute the rows of the next call of ``context`` with their own scales.

        Unless all have the same, llama.cpp must compute the rows together and in their order.

        Args:
            rows: scales, and the number of rows that have them, in the order of the batch.

        Raises:
            EngineError: there is no such adapter.
        """
        if self._stacked is None:
            return
        found = list(rows)
        if any(scales for scales, _ in found):
            self._calls_without = 0
        elif self._calls_without < CALLS_WITHOUT:
            self._calls_without += 1
        if self._calls_without == CALLS_WITHOUT:
            context.set_adapter_scales(None)
        elif len({scales for scales, _ in found}) == 1:
            context.set_adapter_scales(self._vector(found[0][0]))
        else:
            vectors = np.array([self._vector(scales) for scales, _ in found])
            context.set_adapter_scales(np.repeat(vectors, [n for _, n in found], axis=0))

    def _vector(self, scales: Scales) -> npt.NDArray[np.float32]:
        """The scale of each adapter."""
        found = np.zeros(len(self.files), np.float32)
        for number, scale in scales:
            if not 0 <= number < len(found):
                raise EngineError(f"a step names the adapters {scales}; there are {len(found)}")
            found[number] = scale
        return found

    def close(self) -> None:
        """Free them.  Calling it again does nothing."""
        if self._stacked is not None:
            self._stacked.close()


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.  Blocks while it reads."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
