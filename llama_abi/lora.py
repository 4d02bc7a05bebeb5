"""LoRA adapters: low-rank changes of a model's weights, which a context applies while it decodes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs
import numpy as np

from llama_abi.errors import LlamaError
from llama_abi.handles import Handle
from llama_abi.model import Model
from llama_abi.row_scales import RankOwners


class LoraAdapter(Handle):
    """A LoRA adapter of one model. Close it before the model, and after the contexts that use it.

    Load adapters before you create a context: the size of its graphs depends on all adapters of the model.

    Args:
        path: a GGUF file of the type ``adapter``.

    Raises:
        LlamaError: the file does not exist, is not an adapter, or belongs to another model. The message includes llama.cpp's
            errors.

    A GGUF file is untrusted input, and some values in it abort the process: check the file first.
    Source: llama.h, ``llama_adapter_lora_init``.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str]) -> None:
        self.model = model
        self.path = os.fspath(path)
        c = model.library.c
        if "\0" in self.path:
            raise LlamaError("a path cannot contain a NUL character")
        if model.vocab_only:
            raise LlamaError("this model was loaded without its weights")
        with model.library.logs.capture_warnings() as captured:
            try:
                pointer = c.llama_adapter_lora_init(model._pointer, os.fsencode(self.path))
            except LlamaError:
                raise LlamaError(f"cannot load the adapter {self.path}: {captured}") from None
        super().__init__(pointer, c.llama_adapter_lora_free, parent=model)

    def __repr__(self) -> str:
        return f"<LoraAdapter {self.path}{' closed' if self.closed else ''}>"


@attrs.frozen
class StackedPart:
    """One of several adapters that were stacked into one file. Both dictionaries have the weights that it changes, by name."""

    n_ranks: dict[str, int]
    """Number of its ranks in the stacked matrices of a weight."""
    factors: dict[str, float]
    """Factor of its change of a weight, besides its scale: ``alpha / rank``, or 1 for an adapter without ``alpha``."""


class StackedAdapters(LoraAdapter):
    """Several adapters loaded as one. Each row of a call can use other parts: see ``Context.set_adapter_scales``.

    Args:
        path: a GGUF file of the type ``adapter``, with ``alpha`` 0. For each weight it has one A and one B, of all parts that
            change the weight: their matrices A below each other, and their matrices B side by side, in the order of
            ``parts``.
        parts: what was stacked. The place of a part is its number.

    Raises:
        LlamaError: as for ``LoraAdapter``.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str], parts: Sequence[StackedPart]) -> None:
        super().__init__(model, path)
        self.n_parts = len(parts)
        layouts: dict[tuple[tuple[int, int, float], ...], RankOwners] = {}
        self.rank_owners: dict[str, RankOwners] = {}
        """For each weight that a part changes, by name. Weights with the same ranks and factors share one object."""
        for weight in {name for part in parts for name in part.n_ranks}:
            layout = tuple(
                (number, part.n_ranks[weight], part.factors[weight])
                for number, part in enumerate(parts)
                if weight in part.n_ranks
            )
            if layout not in layouts:
                owners = np.repeat([number for number, *_ in layout], [rank for _, rank, _ in layout])
                layouts[layout] = RankOwners(
                    owners, np.repeat([f for *_, f in layout], [rank for _, rank, _ in layout])
                )
            self.rank_owners[weight] = layouts[layout]
