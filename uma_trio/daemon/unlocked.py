"""Ends the daemon when nobody needs it any more: the processes that do lock a file, and the kernel unlocks it with them."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Final

import structlog
import trio

log = structlog.get_logger("uma_trio.daemon")

KEEP: Final = b"keep"
"""In the file, this lets the daemon go on without users."""


async def stop_when_unlocked(path: Path) -> None:
    """Wait until no other process has ``path`` locked, and send this process SIGTERM.  It stays locked until the end.

    A process that locks it later waits for the end of the daemon, so it takes no daemon for running that ends.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.error("the file of stop_when_unlocked cannot be opened", path=str(path), reason=error.strerror)
    else:
        await trio.to_thread.run_sync(fcntl.flock, lock, fcntl.LOCK_EX, abandon_on_cancel=True)
        if os.pread(lock, len(KEEP), 0) == KEEP:
            os.close(lock)
            return
    log.info("nobody needs the daemon any more", path=str(path))
    os.kill(os.getpid(), signal.SIGTERM)
