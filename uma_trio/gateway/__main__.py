"""The gateway process: ``python -m uma_trio.gateway FD CONFIG``, started by the daemon and by nobody else.

It imports its libraries, and waits for its turn: the daemon starts the next gateway while this one serves.  Whatever
keeps it from starting becomes one sentence for the daemon.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import setproctitle

from uma_trio.config import Config
from uma_trio.errors import ErrorWithRemedy
from uma_trio.processes import parent_process


def main() -> None:
    """Serve HTTP on the listening socket until the daemon ends or sends SIGTERM."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    config = msgspec.json.decode(sys.argv[2], type=Config, dec_hook=_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gc.disable()  # imports leave little to collect, and each collection would look at all that they made
    try:
        from uma_trio.gateway.process import Server

        setproctitle.setproctitle("uma-trio gateway: standby")
        parent_process.wait_for_turn()
        parent_process.end_with_it()
        server = Server(config, sock)
    except ErrorWithRemedy as error:
        parent_process.fail_to_start(str(error))
    except ImportError as error:
        parent_process.fail_to_start(f"a library cannot be imported ({error}); install uma-trio again")
    except Exception as error:  # noqa: BLE001  (said by the daemon)
        parent_process.fail_to_start(f"{type(error).__name__}: {error}")
    gc.freeze()  # so later collections are shorter as well
    gc.enable()
    server.run(sockets=[sock])


def _path(cls: type, value: Any) -> Any:
    return Path(value) if cls is Path else value


if __name__ == "__main__":
    main()
