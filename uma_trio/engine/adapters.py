"""LoRA adapters in the engine: loaded with the model, and chosen for each call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import llama_abi
from uma_trio.engine.messages import AdapterFile, EngineError
from uma_trio.scheduling.view import Scales


class Adapters:
    """The adapters of one model.  Open them before the first context, and close them after the last one.

    Args:
        files: checked files.  They may have changed since, as before a restart of the engine.

    Raises:
        EngineError: the file of an adapter has changed.
        OSError, llama_abi.LlamaError: an adapter cannot be loaded.
    """

    def __init__(self, model: llama_abi.Model, files: Sequence[AdapterFile]) -> None:
        self.files = tuple(files)
        self._loaded: list[llama_abi.LoraAdapter] = []
        try:
            for each in files:
                if file_fingerprint(each.path) != each.fingerprint:
                    raise EngineError(f"the adapter {each.path} has changed; restart the server")
                self._loaded.append(llama_abi.LoraAdapter(model, each.path))
        except BaseException:
            self.close()
            raise

    def choose(self, context: llama_abi.Context, scales: Scales) -> None:
        """Have the next calls of ``context`` apply the adapters of ``scales``, and no others.

        Raises:
            EngineError: there is no such adapter.
        """
        if any(not 0 <= number < len(self._loaded) for number, _ in scales):
            raise EngineError(f"a step names the adapters {scales}; there are {len(self._loaded)}")
        if self._loaded:
            context.set_adapters([(self._loaded[number], scale) for number, scale in scales])

    def close(self) -> None:
        """Free them.  Calling it again does nothing."""
        for adapter in self._loaded:
            adapter.close()


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.  Blocks while it reads."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
