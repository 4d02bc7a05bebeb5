"""LoRA adapters: low-rank changes of a model's weights, which a context applies while it decodes."""

from __future__ import annotations

import os

from llama_abi.errors import LlamaError
from llama_abi.handles import Handle
from llama_abi.model import Model


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
