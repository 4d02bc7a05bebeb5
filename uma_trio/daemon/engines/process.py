"""The process of an engine, before it has a model.

On a busy machine its interpreter and its libraries take seconds to start.  This module imports little, so the daemon can
start the process before it imports its own libraries.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import attrs

from uma_trio.processes.child_process import ChildProcess

HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"
"""Makes glibc ask the kernel for huge pages, for large blocks of memory.  llama.cpp writes the whole KV cache when it creates
a context, and with small pages the kernel takes most of that time."""


@attrs.define
class EngineProcess:
    """A child process that imports its libraries, then waits for a model to be sent through a socket."""

    _sock: socket.socket
    _child: ChildProcess
    _is_taken: bool = False

    @classmethod
    def start(cls, module: str = "uma_trio.engine") -> EngineProcess:
        """Start the process.  Blocks for some milliseconds.

        Args:
            module: the module that it runs, with the descriptor of its socket.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            tunables = ":".join(filter(None, [HUGE_PAGES, os.environ.get("GLIBC_TUNABLES")]))
            environment = {"GLIBC_TUNABLES": tunables}
            child = ChildProcess.of_module(module, theirs, name="engine", environment=environment)
        return cls(ours, child)

    def take(self) -> tuple[socket.socket, ChildProcess]:
        """Our end of the socket, and the child, which the caller ends."""
        self._is_taken = True
        return self._sock, self._child

    def close(self) -> None:
        """End the process if nobody has taken it.  Blocks for some milliseconds."""
        if not self._is_taken:
            self._sock.close()
            self._child.discard()
