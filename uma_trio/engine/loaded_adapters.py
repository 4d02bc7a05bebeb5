"""LoRA adapters in the engine: loaded with the model, and applied to each row of a call.

How a row gets its adapters::

    loading      files that are safe -> LoadedAdapters            daemon/engines/adapter_check.py
    request      names and scales -> Scales                       daemon/serving/request.py (adapters_of)
    daemon       Answer.adapters -> StepInput.adapters            daemon/serving/answer.py
    engine       which rows can be in one call                    engine/adapter_calls.py
                 Scales of each input -> scales of each row       LoadedAdapters.apply_by_row
    llama_abi    scales of each row -> masks in llama.cpp's graph Context.set_adapter_scales, row_scales.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.messages import AdapterFile, EngineError
from uma_trio.models.fingerprint import file_fingerprint

CALLS_WITH_ZERO_SCALES: Final = 64
"""The engine turns the adapters off after this many calls in a row that need none: llama.cpp then plans its graphs again, which
takes 3 to 20 ms.  Until then all scales are 0, and a call takes about a fifth longer than without adapters."""


class LoadedAdapters:
    """The adapters of one model.  Create it before the first context, and close it after the last one.

    Creating it blocks: it reads each file twice, and writes a temporary file of about their size.

    Args:
        files: checked files; the place of a file is the number of its adapter.  Each is compared with its fingerprint,
            because it may have changed since the check, for instance before a restart of the engine.
        on_gpu: layers of the model are on a GPU.

    Raises:
        EngineError: the file of an adapter has changed, or there is no room for the temporary file.
        OSError, llama_abi.LlamaError: an adapter cannot be loaded.
    """

    def __init__(self, model: llama_abi.Model, files: Sequence[AdapterFile], *, on_gpu: bool) -> None:
        self.files = tuple(files)
        self._model = model
        self._stacked: llama_abi.StackedAdapters | None = None
        self._n_calls_without = CALLS_WITH_ZERO_SCALES
        """Calls in a row that needed no adapters; no more are counted than turn them off."""
        for file in files:
            if file_fingerprint(file.path) != file.fingerprint:
                raise EngineError(f"the adapter {file.path} has changed; restart the server")
        if files:
            from uma_trio.engine.stacked_adapters import stack_adapters  # imports gguf, which takes 0.1 s

            self._stacked = stack_adapters(model, [file.path for file in files], on_gpu=on_gpu)

    def open_context(self, options: llama_abi.ContextOptions) -> llama_abi.Context:
        """Create a context of the model for ``apply`` and ``apply_by_row``.  Blocks.

        Raises:
            llama_abi.LlamaError: see ``llama_abi.Context``.
        """
        return llama_abi.Context(self._model, options, self._stacked)

    def apply(self, context: llama_abi.Context, scales: Scales) -> None:
        """Apply ``scales`` to all rows of the next calls of ``context``.

        Raises:
            EngineError: ``scales`` name an adapter that does not exist.
        """
        context.set_adapter_scales(self._vector(scales) if scales else None)

    def apply_by_row(self, context: llama_abi.Context, rows: Iterable[tuple[Scales, int]]) -> None:
        """Apply to each row of the next call of ``context`` its own scales.

        If they differ, llama.cpp must compute all rows in one pass and in their order: see ``adapter_calls``.

        Args:
            rows: scales, and how many rows have them, in batch order.

        Raises:
            EngineError: scales name an adapter that does not exist.
        """
        if self._stacked is None:
            return
        scales_of_rows = list(rows)
        if any(scales for scales, _ in scales_of_rows):
            self._n_calls_without = 0
        elif self._n_calls_without < CALLS_WITH_ZERO_SCALES:
            self._n_calls_without += 1
        if self._n_calls_without == CALLS_WITH_ZERO_SCALES:
            context.set_adapter_scales(None)
        elif len({scales for scales, _ in scales_of_rows}) == 1:
            context.set_adapter_scales(self._vector(scales_of_rows[0][0]))
        else:
            vectors = np.array([self._vector(scales) for scales, _ in scales_of_rows])
            context.set_adapter_scales(np.repeat(vectors, [n for _, n in scales_of_rows], axis=0))

    def _vector(self, scales: Scales) -> npt.NDArray[np.float32]:
        """The scale of each adapter, ``[adapters]``; 0 for an adapter that ``scales`` do not name."""
        vector = np.zeros(len(self.files), np.float32)
        for number, scale in scales:
            if not 0 <= number < len(vector):
                raise EngineError(f"a step names the adapters {scales}; there are {len(vector)}")
            vector[number] = scale
        return vector

    def close(self) -> None:
        """Free them.  Calling it again does nothing."""
        if self._stacked is not None:
            self._stacked.close()
