"""A loaded model: its weights, its metadata, and its vocabulary."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from llama_abi.errors import LlamaError
from llama_abi.handles import Owned
from llama_abi.library import Library
from llama_abi.types import LOAD_MODE, llama_progress_callback
from llama_abi.vocab import Vocab

INT32_MAX = 2**31 - 1


class Model(Owned):
    """A GGUF file, loaded.  Shared by any number of contexts; safe to read from any thread.

        with Model(load(), "model.gguf") as model:
            print(model.description, model.vocab.n_tokens)

    Args:
        path: the file; of a split model its first part.
        n_gpu_layers: layers to put on devices; -1 for all.  Without a device it does nothing.
        use_mmap: map the file instead of reading it.  The file must then stay as it is.
        vocab_only: no weights; enough to tokenize, not for a ``Context``.
        check_tensors: look for NaN and broken blocks in the weights (slow).
        on_progress: called in this thread with 0.0 to 1.0; ``False`` stops loading, ``None`` and
            anything else goes on.  What it raises stops loading, and comes out of here.

    Raises:
        LlamaError: the file is not there, not a model, or does not fit into memory; or loading
            was stopped.  The message has llama.cpp's own words.  Nothing is left behind.

    A GGUF is untrusted input, and llama.cpp's own checks are few: validate the header first.
    Source: llama.h, ``llama_model_load_from_file``.
    """

    def __init__(
        self,
        library: Library,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        use_mmap: bool = True,
        vocab_only: bool = False,
        check_tensors: bool = False,
        on_progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        self.library = library
        self.path = os.fspath(path)
        self.vocab_only = vocab_only
        """Loaded without weights."""
        self._c = library.c
        progress = _Progress(on_progress)
        params = self._c.llama_model_default_params()
        params.n_gpu_layers = max(-1, min(n_gpu_layers, INT32_MAX))
        params.load_mode = LOAD_MODE["LLAMA_LOAD_MODE_AUTO" if use_mmap else "LLAMA_LOAD_MODE_NONE"]
        params.vocab_only = vocab_only
        params.check_tensors = check_tensors
        params.progress_callback = progress.callback
        if "\0" in self.path:
            raise LlamaError("a path cannot contain a NUL character")
        if not os.path.isfile(self.path):
            raise LlamaError(f"there is no file {self.path}")
        with library.logs.complaints() as complaints:
            try:
                pointer = self._c.llama_model_load_from_file(os.fsencode(self.path), params)
            except LlamaError:
                if progress.error is not None:
                    raise progress.error from None
                if progress.stopped:
                    raise LlamaError(f"loading {self.path} was stopped") from None
                raise LlamaError(f"cannot load {self.path}: {str(complaints) or 'no reason given'}") from None
        super().__init__(pointer, self._c.llama_model_free)
        self.vocab = Vocab(self)
        """Its tokens; usable for as long as the model is open."""

    @property
    def description(self) -> str:
        """Architecture, size and quantization, in llama.cpp's words."""
        return self._string(self._c.llama_model_desc, self._pointer) or ""

    @property
    def n_params(self) -> int:
        """Weights, counted one by one."""
        return int(self._c.llama_model_n_params(self._pointer))

    @property
    def size_bytes(self) -> int:
        """Of all tensors, as stored."""
        return int(self._c.llama_model_size(self._pointer))

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context that it was trained for."""
        return int(self._c.llama_model_n_ctx_train(self._pointer))

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return int(self._c.llama_model_n_embd(self._pointer))

    @property
    def n_layer(self) -> int:
        """Transformer blocks."""
        return int(self._c.llama_model_n_layer(self._pointer))

    @property
    def n_head(self) -> int:
        """Query heads of the first layer."""
        return int(self._c.llama_model_n_head(self._pointer))

    @property
    def n_head_kv(self) -> int:
        """Key and value heads of the first layer."""
        return int(self._c.llama_model_n_head_kv(self._pointer))

    @property
    def n_swa(self) -> int:
        """Tokens of the sliding attention window; 0 without one."""
        return int(self._c.llama_model_n_swa(self._pointer))

    @property
    def is_recurrent(self) -> bool:
        """Its memory is a state and not a list of tokens (Mamba, RWKV): no rolling back."""
        return bool(self._c.llama_model_is_recurrent(self._pointer))

    @property
    def is_hybrid(self) -> bool:
        """Attention and recurrent layers both."""
        return bool(self._c.llama_model_is_hybrid(self._pointer))

    @property
    def has_encoder(self) -> bool:
        """Needs ``llama_encode`` first, which this package does not offer."""
        return bool(self._c.llama_model_has_encoder(self._pointer))

    @property
    def has_decoder(self) -> bool:
        """Can generate."""
        return bool(self._c.llama_model_has_decoder(self._pointer))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source in the file; untrusted, so render it in a sandbox only."""
        found = self._c.llama_model_chat_template(self._pointer, None)
        return None if found is None else found.decode("utf-8", "replace")

    def meta(self, key: str) -> str | None:
        """A scalar of the file's metadata as text, or ``None``.  Arrays are not given."""
        if "\0" in key:
            return None
        return self._string(self._c.llama_model_meta_val_str, self._pointer, key.encode())

    def metadata(self) -> dict[str, str]:
        """All scalars of the file's metadata, as text."""
        found = {}
        for index in range(self._c.llama_model_meta_count(self._pointer)):
            key = self._string(self._c.llama_model_meta_key_by_index, self._pointer, index)
            value = self._string(self._c.llama_model_meta_val_str_by_index, self._pointer, index)
            if key is not None and value is not None:
                found[key] = value
        return found

    def _string(self, function: Any, *arguments: Any) -> str | None:
        """Call a C function that fills a buffer like snprintf and returns the whole length."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = function(*arguments, buffer, size)
            if length < 0:
                return None
            if length < size:
                return buffer.raw[:length].decode("utf-8", "replace")
            size = length + 1

    def __repr__(self) -> str:
        return f"<Model {self.path}{' closed' if self.closed else ''}>"


class _Progress:
    """Keeps what a progress function raises out of C and for the caller."""

    def __init__(self, function: Callable[[float], bool | None] | None) -> None:
        self.error: BaseException | None = None
        self.stopped = False
        self._function = function
        self.callback = llama_progress_callback(self._called)

    def _called(self, progress: float, _: object) -> bool:
        if self._function is None:
            return True
        try:
            self.stopped = self._function(progress) is False
        except BaseException as error:  # noqa: BLE001  handed to the caller once C has returned
            self.error = error
        return not self.stopped and self.error is None
