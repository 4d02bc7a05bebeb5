"""An engine process in which the library aborts while it loads the model: ``python -m tests.support.aborting_engine FD MODEL``."""

from __future__ import annotations

import os
import socket
import sys

ASSERTION = "/build/llama.cpp/src/llama-hparams.cpp:7: GGML_ASSERT(hparams.n_layer > 0) failed"


def main() -> None:
    """Wait for the ``Start`` message, print what ``GGML_ASSERT`` prints, and abort."""
    socket.socket(fileno=int(sys.argv[1])).recv(1 << 16)
    os.write(2, f"{ASSERTION}\nThread 1 received signal SIGABRT\n".encode())
    os.abort()


if __name__ == "__main__":
    main()
