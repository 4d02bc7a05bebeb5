"""The engine process: ``python -m uma_trio.engine FD MODEL``, started by the daemon and by nobody else."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

import msgspec
import setproctitle

from llama_abi.process import die_with_parent
from uma_trio.engine.messages import LOG_MARK


class _ToDaemon(logging.Handler):
    """Writes each record as a line that the daemon turns into a record of its own log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            line = LOG_MARK + msgspec.json.encode((record.levelno, record.name, text)).decode() + "\n"
            os.write(sys.stderr.fileno(), line.encode())
        except OSError:  # the daemon has gone
            self.handleError(record)


def _end_with_the_daemon() -> None:
    """End when the daemon does, however it ends and whatever this process is doing then.

    The thread sees the end of standard input.  On Linux the kernel kills this process as well, also while it is stopped.
    """
    die_with_parent()

    def watch() -> None:
        while os.read(0, 1):
            """The daemon never writes; the read ends when it does."""
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> None:
    """Serve the daemon at the other end of the socket until it goes."""
    fd, model = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_the_daemon()
    setproctitle.setproctitle(f"uma-trio engine: {model}")
    handler = _ToDaemon()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.DEBUG, handlers=[handler])
    from uma_trio.engine.llama import open_engine
    from uma_trio.engine.worker import Worker

    Worker(socket.socket(fileno=fd), open_engine).run()


if __name__ == "__main__":
    main()
