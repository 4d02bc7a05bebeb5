"""Cutting a decode short without running Python in it."""

from __future__ import annotations

import ctypes
from typing import Any

from llama_abi.types import ggml_abort_callback


class AbortFlag:
    """Cuts a running decode short, from any thread; on the CPU only.

    The compute threads read one byte of this object.  No Python runs for it, so that a busy event
    loop cannot hold them up: llama.cpp asks after every operation of the graph.
    """

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(2)

    def set(self) -> None:
        """The running decode and all later ones return ``ABORTED`` soon."""
        self._bytes[0] = b"\1"

    def clear(self) -> None:
        """Later decodes run to their end."""
        self._bytes[0] = b"\0"

    def is_set(self) -> bool:
        """Whether decodes are cut short."""
        return self._bytes[0] != b"\0"

    @property
    def callback(self) -> tuple[Any, int]:
        """For ``llama_set_abort_callback``: a C function of type ``bool (*)(void *)``, and its argument.

        It is ``strlen``, which reads the flag's bytes and answers 1 when it is set and 0 when not.
        """
        return ctypes.cast(_strlen, ggml_abort_callback), ctypes.addressof(self._bytes)


_strlen = ctypes.CDLL(None).strlen
