"""Python bindings for llama.cpp: checked declarations of llama.h, loading, and handles with owners.

This package knows C. It knows nothing of requests, schedulers or sockets, and no other package uses ctypes.

    library = llama_abi.load()
    with llama_abi.Model(library, path) as model:
        with llama_abi.Context(model, llama_abi.ContextOptions(n_ctx=4096)) as context:
            batch = llama_abi.Batch(512)
            batch.add(model.vocab.tokenize("Hello", add_special=True, parse_special=False), pos=0, seq=0)
            context.decode(batch)
            print(context.logits(1).array.argmax())
"""

from __future__ import annotations

from llama_abi.abort import AbortFlag
from llama_abi.batch import Batch
from llama_abi.context import ABORTED, NO_KV_SLOT, OK, PARTIAL_ONLY, Context, LogitsView
from llama_abi.errors import HandleClosed, LibraryError, LlamaError, StaleLogits, TooManyTokens
from llama_abi.library import Device, DeviceType, Library, load
from llama_abi.logs import Buffer
from llama_abi.lora import LoraAdapter, StackedAdapters, StackedPart
from llama_abi.model import Model
from llama_abi.mtmd import Bitmap, MediaPiece, Projector, TextPiece
from llama_abi.options import ContextOptions
from llama_abi.placement import SPLIT_MODES, Placement
from llama_abi.stamp import Stamp
from llama_abi.vocab import FimTokens, TokenAttr, Tokens, Vocab

__all__ = [
    "ABORTED",
    "NO_KV_SLOT",
    "OK",
    "PARTIAL_ONLY",
    "SPLIT_MODES",
    "AbortFlag",
    "Batch",
    "Bitmap",
    "Buffer",
    "Context",
    "ContextOptions",
    "Device",
    "DeviceType",
    "FimTokens",
    "HandleClosed",
    "Library",
    "LibraryError",
    "LlamaError",
    "LogitsView",
    "LoraAdapter",
    "MediaPiece",
    "Model",
    "Placement",
    "Projector",
    "StackedAdapters",
    "StackedPart",
    "StaleLogits",
    "Stamp",
    "TextPiece",
    "TokenAttr",
    "Tokens",
    "TooManyTokens",
    "Vocab",
    "load",
]
