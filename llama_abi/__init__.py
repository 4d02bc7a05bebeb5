"""llama.cpp for Python: declarations of llama.h as text, loading, and owned handles.

Knows C; knows nothing of sessions, schedulers or sockets.  Nothing outside this package touches
ctypes.

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
from llama_abi.context import (
    ABORTED,
    NO_ROOM,
    OK,
    PARTIAL_ONLY,
    Context,
)
from llama_abi.errors import Closed, LibraryError, LlamaError, LogitsPassed, TooManyTokens
from llama_abi.library import Device, DeviceType, Library, load
from llama_abi.logits import LogitsView
from llama_abi.model import Model
from llama_abi.options import ContextOptions
from llama_abi.samplers import SamplerChain
from llama_abi.stamp import Stamp
from llama_abi.vocab import TokenAttr, Tokens, Vocab

__all__ = [
    "ABORTED",
    "NO_ROOM",
    "OK",
    "PARTIAL_ONLY",
    "AbortFlag",
    "Batch",
    "Closed",
    "Context",
    "ContextOptions",
    "Device",
    "DeviceType",
    "Library",
    "LibraryError",
    "LlamaError",
    "LogitsPassed",
    "LogitsView",
    "Model",
    "SamplerChain",
    "Stamp",
    "TokenAttr",
    "Tokens",
    "TooManyTokens",
    "Vocab",
    "load",
]
