"""A loaded model: weights, metadata and vocabulary."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from llama_abi.errors import LlamaError
from llama_abi.handles import Handle
from llama_abi.library import Library
from llama_abi.placement import Placement
from llama_abi.types import LOAD_MODE, llama_progress_callback
from llama_abi.vocab import Vocab

INT32_MAX = 2**31 - 1
DEFAULT_PLACEMENT = Placement()

TILED_PRODUCTS = "GGML_CPU_TILED_MM"
"""Environment variable that llama.cpp reads before its first product: 0 turns off kernels for eight rows or more."""


class Model(Handle):
    """A loaded GGUF file. Any number of contexts share it, and any thread may read it.

        with Model(load(), "model.gguf") as model:
            print(model.description, model.vocab.n_tokens)

    Args:
        path: the file, or the first part of a split model.
        n_gpu_layers: number of layers to put on devices; -1 for all. Ignored without a device.
        placement: which devices, and what goes where.
        use_mmap: map the file instead of reading it. The file must not change while the model is open.
        vocab_only: load the vocabulary without weights. Such a model can tokenize, but cannot have a ``Context``.
        no_alloc: load no weights, and let contexts allocate no KV cache and no compute buffers. Such a model only tells
            how large the ``Context.buffers`` would be: its contexts must not decode.
        check_tensors: search the weights for NaN and invalid blocks, which is slow.
        plain_kernels: on a CPU, keep weights as they are in the file, and multiply several rows with quantised weights in
            the way in which one row is multiplied. From then on that holds for all models of the process.
        on_progress: called in this thread with a share from 0.0 to 1.0. Loading stops if it returns ``False``, or
            raises; the exception is passed on.

    Raises:
        LlamaError: the file does not exist, is not a model, or does not fit into memory; or loading was stopped. The
            message includes llama.cpp's errors.

    A GGUF file is untrusted input, and some values in it abort the process: check the file first.
    Source: llama.h, ``llama_model_load_from_file``.
    """

    def __init__(
        self,
        library: Library,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        placement: Placement = DEFAULT_PLACEMENT,
        use_mmap: bool = True,
        vocab_only: bool = False,
        no_alloc: bool = False,
        check_tensors: bool = False,
        plain_kernels: bool = False,
        on_progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        self.library = library
        self.path = os.fspath(path)
        self.vocab_only = vocab_only
        """Whether it was loaded without weights."""
        self.no_alloc = no_alloc
        """Whether nothing is allocated."""
        self._c = library.c
        progress = _Progress(on_progress)
        params = self._c.llama_model_default_params()
        params.n_gpu_layers = max(-1, min(n_gpu_layers, INT32_MAX))
        alive = placement.fill(library, params)
        params.load_mode = LOAD_MODE["LLAMA_LOAD_MODE_AUTO" if use_mmap and not no_alloc else "LLAMA_LOAD_MODE_NONE"]
        params.vocab_only = vocab_only
        params.no_alloc = no_alloc
        params.check_tensors = check_tensors
        if plain_kernels:
            params.use_extra_bufts = False
            os.environ[TILED_PRODUCTS] = "0"
        params.progress_callback = progress.callback
        if "\0" in self.path:
            raise LlamaError("a path cannot contain a NUL character")
        if not os.path.isfile(self.path):
            raise LlamaError(f"there is no file {self.path}")
        with library.logs.capture_warnings() as captured:
            try:
                pointer = self._c.llama_model_load_from_file(os.fsencode(self.path), params)
            except LlamaError:
                if progress.error is not None:
                    raise progress.error from None
                if progress.stopped:
                    raise LlamaError(f"loading {self.path} was stopped") from None
                raise LlamaError(f"cannot load {self.path}: {str(captured) or 'no reason given'}") from None
            finally:
                alive.clear()
        super().__init__(pointer, self._c.llama_model_free)
        self.buffers = tuple(captured.buffers)
        """Where the weights are."""
        self.vocab = Vocab(self._c, self)
        """Its vocabulary, usable while the model is open."""

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as llama.cpp prints them."""
        return self._string(self._c.llama_model_desc, self._pointer) or ""

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return int(self._c.llama_model_n_params(self._pointer))

    @property
    def size_bytes(self) -> int:
        """Size of all tensors in the file, in bytes."""
        return int(self._c.llama_model_size(self._pointer))

    @property
    def n_ctx_train(self) -> int:
        """Context length in tokens that it was trained with."""
        return int(self._c.llama_model_n_ctx_train(self._pointer))

    @property
    def n_embd_inp(self) -> int:
        """Width of the rows that can stand in place of tokens; see ``Batch.add_rows``.

        Raises:
            LibraryError: the library was built without libmtmd.
        """
        return int(self.library.mtmd.llama_model_n_embd_inp(self._pointer))

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return int(self._c.llama_model_n_embd(self._pointer))

    @property
    def n_embd_out(self) -> int:
        """Width of an embedding."""
        return int(self._c.llama_model_n_embd_out(self._pointer))

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return int(self._c.llama_model_n_layer(self._pointer))

    @property
    def n_head(self) -> int:
        """Number of query heads of the first layer."""
        return int(self._c.llama_model_n_head(self._pointer))

    @property
    def n_head_kv(self) -> int:
        """Number of KV heads of the first layer."""
        return int(self._c.llama_model_n_head_kv(self._pointer))

    @property
    def n_swa(self) -> int:
        """Length of the sliding attention window in tokens; 0 without one."""
        return int(self._c.llama_model_n_swa(self._pointer))

    @property
    def is_recurrent(self) -> bool:
        """Whether all layers are recurrent (Mamba, RWKV), so that sequences cannot be truncated."""
        return bool(self._c.llama_model_is_recurrent(self._pointer))

    @property
    def is_hybrid(self) -> bool:
        """Whether it has both attention and recurrent layers."""
        return bool(self._c.llama_model_is_hybrid(self._pointer))

    @property
    def has_encoder(self) -> bool:
        """Whether it needs ``llama_encode``, which this package does not offer."""
        return bool(self._c.llama_model_has_encoder(self._pointer))

    @property
    def has_decoder(self) -> bool:
        """Whether it can generate."""
        return bool(self._c.llama_model_has_decoder(self._pointer))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of its chat template. It is untrusted: render it in a sandbox only."""
        template = self._c.llama_model_chat_template(self._pointer, None)
        return None if template is None else template.decode("utf-8", "replace")

    def meta(self, key: str) -> str | None:
        """The metadata value of ``key`` as text; ``None`` if there is none, or it is an array."""
        if "\0" in key:
            return None
        return self._string(self._c.llama_model_meta_val_str, self._pointer, key.encode())

    def metadata(self) -> dict[str, str]:
        """All metadata of the file as text, except arrays."""
        values = {}
        for index in range(self._c.llama_model_meta_count(self._pointer)):
            key = self._string(self._c.llama_model_meta_key_by_index, self._pointer, index)
            value = self._string(self._c.llama_model_meta_val_str_by_index, self._pointer, index)
            if key is not None and value is not None:
                values[key] = value
        return values

    def _string(self, function: Any, *arguments: Any) -> str | None:
        """Call a C function that works like snprintf: it fills a buffer and returns the full length."""
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
    """Keeps exceptions of the progress function away from C, for the caller."""

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
        except BaseException as error:  # noqa: BLE001  (re-raised once C has returned)
            self.error = error
        return not self.stopped and self.error is None
