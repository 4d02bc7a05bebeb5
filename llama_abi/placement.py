"""Where a model's weights go: devices, how layers or tensors are split between them, and exceptions by tensor."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import attrs

from llama_abi.types import SPLIT_MODE, C, llama_model_tensor_buft_override

if TYPE_CHECKING:
    from llama_abi.library import Library

SPLIT_MODES = {name.removeprefix("LLAMA_SPLIT_MODE_").lower(): value for name, value in SPLIT_MODE.items()}
"""``none``: everything on one device. ``layer``: whole layers. ``row``: rows of large matrices, where the backend can.
``tensor``: all large tensors, so that the devices compute each layer together."""


@attrs.frozen(kw_only=True)
class Placement:
    """The devices of a model. The default lets llama.cpp use all GPUs, with layers in proportion to their free memory.

    Source: llama.h, ``llama_model_params``; llama.cpp, ``llama_prepare_model_devices``.
    """

    devices: tuple[str, ...] | None = None
    """Names of devices, in the order of their layers; empty for the CPU alone, ``None`` for all GPUs."""
    split_mode: str = attrs.field(default="layer", validator=attrs.validators.in_(tuple(SPLIT_MODES)))
    """One of ``SPLIT_MODES``."""
    tensor_split: tuple[float, ...] = ()
    """Share of each device; empty for its free memory."""
    main_gpu: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Index of the only device with ``split_mode`` ``none``."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Regular expressions (ECMAScript) for names of tensors, each with the name of a device or of its buffer type. The
    first one that matches a part of a tensor's name says where the tensor goes."""

    def fill(self, library: Library, params: Any) -> list[Any]:
        """Write the fields of ``params``, a ``llama_model_params``.

        Returns:
            What must live until the model is loaded.

        Raises:
            LlamaError: there is no such device.
        """
        alive: list[Any] = []
        params.split_mode = SPLIT_MODES[self.split_mode]
        params.main_gpu = self.main_gpu
        if self.devices is not None:
            pointers = [library.device_pointer(name) for name in self.devices]
            params.devices = (C.known["ggml_backend_dev_t"] * (len(pointers) + 1))(*pointers)
            alive.append(params.devices)
        if self.tensor_split:
            shares = (ctypes.c_float * library.max_devices)(*self.tensor_split)
            params.tensor_split = shares
            alive.append(shares)
        if self.overrides:
            entries = (llama_model_tensor_buft_override * (len(self.overrides) + 1))()
            for entry, (pattern, buffer) in zip(entries, self.overrides, strict=False):
                entry.pattern = pattern.encode()
                entry.buft = library.buffer_type(buffer)
            params.tensor_buft_overrides = entries
            alive.append(entries)
        return alive
