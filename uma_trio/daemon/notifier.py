"""What the daemon reports to the service manager that started it: its state, and that it is alive.

Without a service manager, all of this does nothing.

Sources: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import MutableMapping
from typing import Final

import structlog
import trio

log = structlog.get_logger("uma_trio.daemon")

SEND_S: Final = 1.0
"""How long a change of state may wait for a busy service manager.  The event loop waits with it."""

MIN_PING_S: Final = 0.01
"""A shorter watchdog interval would keep the event loop busy with pings."""

MICROSECONDS: Final = re.compile("[0-9]{1,20}")
"""A number of 64 bits, as service managers write it."""


class Notifier:
    """Sends datagrams to the socket in ``$NOTIFY_SOCKET``.

    Removes the variables of the service manager, because they do not concern the daemon's children.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_watched = self._address and MICROSECONDS.fullmatch(watchdog_us) and watchdog_pid == str(os.getpid())
        watchdog_s = int(watchdog_us) / 1e6 if is_watched else 0.0
        self._ping_s = max(watchdog_s / 2, MIN_PING_S) if watchdog_s else 0.0
        """Half the time after which a service manager without a ping restarts the daemon; 0 if it expects none."""

    def report(self, *assignments: str) -> None:
        """Send a state, such as ``READY=1``.  A failure is logged."""
        # a line break within an assignment, such as one in a path, would begin another assignment
        message = "\n".join(assignment.replace("\n", " ") for assignment in assignments)
        if problem := self._send(message, SEND_S):
            log.warning("cannot notify the service manager", message=message, reason=problem)

    async def ping_forever(self) -> None:
        """Ping the watchdog until cancelled.  Runs on the event loop, so a blocked loop sends no pings.

        Of pings that fail in a row, the first one is logged.
        """
        problem = None
        while self._ping_s:
            had_problem = problem is not None
            problem = self._send("WATCHDOG=1", 0.0)
            if problem is not None and not had_problem:
                log.warning("cannot notify the service manager", message="WATCHDOG=1", reason=problem)
            await trio.sleep(self._ping_s)

    def _send(self, text: str, timeout_s: float) -> str | None:
        """Returns why the text could not be sent; ``None`` if it was sent, or if there is no service manager."""
        if not self._address:
            return None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(timeout_s)
                sock.connect(self._address)
                sock.send(text.encode(errors="replace"))  # a path may have bytes that are not UTF-8
        except OSError as error:
            return error.strerror or str(error)
        return None
