"""The engine process: ``python -m uma_trio.engine FD MODEL``, started by the daemon and by nobody else."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys

import setproctitle

from llama_abi.process import die_with_parent
from uma_trio import parent_process


def main() -> None:
    """Serve the daemon at the other end of the socket until it goes."""
    fd, model = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()  # on Linux, also while this process is stopped
    parent_process.end_with_it()
    setproctitle.setproctitle(f"uma-trio engine: {model}")
    parent_process.send_log_to_it(logging.DEBUG)
    gc.disable()  # imports leave little to collect, and each collection would look at all that they made
    from uma_trio.engine.fitting import open_engine
    from uma_trio.engine.worker import Worker

    gc.freeze()  # so later collections are shorter as well
    gc.enable()
    Worker(socket.socket(fileno=fd), open_engine).run()


if __name__ == "__main__":
    main()
