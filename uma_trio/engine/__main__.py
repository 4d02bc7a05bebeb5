"""The engine process: ``python -m uma_trio.engine FD``, started by the daemon and by nobody else."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable

import setproctitle

from llama_abi.process import die_with_parent
from uma_trio.processes import parent_process


def main() -> None:
    """Serve the daemon at the other end of the socket until it goes."""
    fd = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()  # on Linux, also while this process is stopped
    parent_process.end_with_it()
    setproctitle.setproctitle("uma-trio engine")
    parent_process.send_log_to_it(logging.DEBUG)
    gc.disable()  # imports leave little to collect, and each collection would look at all that they made
    from uma_trio.engine import open_fitted as fitting
    from uma_trio.engine.worker import LoadedEngine, Worker
    from uma_trio.engine_link.messages import Start

    def open_engine(start: Start, on_progress: Callable[[float], bool]) -> LoadedEngine:
        setproctitle.setproctitle(f"uma-trio engine: {start.settings.alias or start.path.name}")
        return fitting.open_engine(start, on_progress, worker.report_opening)

    gc.freeze()  # so later collections are shorter as well
    gc.enable()
    worker = Worker(socket.socket(fileno=fd), open_engine)
    worker.run()


if __name__ == "__main__":
    main()
