"""What goes wrong when an engine is opened."""

from __future__ import annotations

import llama_abi
from uma_trio.engine.layout import ContextTooLarge, KvCacheTooSmall
from uma_trio.engine.placement import PlacementError

LOAD_ERRORS = (llama_abi.LlamaError, llama_abi.LibraryError, KvCacheTooSmall, ContextTooLarge, PlacementError)
"""What opening an engine raises: about the model, or about the library."""
