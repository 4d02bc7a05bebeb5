"""A flag that interrupts a running decode."""

from __future__ import annotations

import ctypes
from typing import Any

from llama_abi.types import ggml_abort_callback


class AbortFlag:
    """Interrupts decodes. Any thread may set it. Works on the CPU backend only.

    The compute threads read one byte of this object after every operation of the graph. They run no Python, so a busy
    event loop does not delay them.

    Args:
        memory: where the flag is, such as memory that processes share; ``None`` for memory of its own.
        offset: of its two bytes there.  The second one is always 0.
    """

    def __init__(self, memory: Any = None, offset: int = 0) -> None:
        two_bytes = ctypes.c_char * 2
        self._bytes = two_bytes() if memory is None else two_bytes.from_buffer(memory, offset)

    def set(self) -> None:
        """Make the running decode and all later ones return ``ABORTED``."""
        self._bytes[0] = b"\1"

    def clear(self) -> None:
        """Let later decodes run to their end."""
        self._bytes[0] = b"\0"

    def is_set(self) -> bool:
        """Whether decodes are interrupted."""
        return self._bytes[0] != b"\0"

    @property
    def callback(self) -> tuple[Any, int]:
        """The two arguments of ``llama_set_abort_callback``: a C function of type ``bool (*)(void *)``, and its data.

        The function is ``strlen`` and the data are the flag's bytes: it returns 1 if the flag is set, and 0 otherwise.
        """
        return ctypes.cast(_strlen, ggml_abort_callback), ctypes.addressof(self._bytes)


_strlen = ctypes.CDLL(None).strlen
