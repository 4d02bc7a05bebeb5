"""What the daemon reports to the service manager that started it: its state, and that it is alive.

Without a service manager, all of this does nothing.

Sources: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import Final

import structlog
import trio

log = structlog.get_logger("uma_trio.daemon")

SEND_S: Final = 1.0
"""How long a change of state may wait for a busy service manager.  The event loop waits with it."""


class Notifier:
    """Sends datagrams to the socket in ``$NOTIFY_SOCKET``.

    Removes the variables of the service manager, because they do not concern the daemon's children.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_watched = self._address and watchdog_us.isdecimal() and watchdog_pid == str(os.getpid())
        self._ping_s = int(watchdog_us) / 2e6 if is_watched else 0.0
        """Half the time after which a service manager without a ping restarts the daemon; 0 if it expects none."""

    def report(self, *assignments: str) -> None:
        """Send a state, such as ``READY=1``.  A failure is logged."""
        self._send("\n".join(assignments), SEND_S)

    async def ping_forever(self) -> None:
        """Ping the watchdog until cancelled.  Runs on the event loop, so a blocked loop sends no pings."""
        while self._ping_s:
            self._send("WATCHDOG=1", 0.0)
            await trio.sleep(self._ping_s)

    def _send(self, text: str, timeout_s: float) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(timeout_s)
                sock.connect(self._address)
                sock.send(text.encode())
        except OSError as error:
            log.warning("cannot notify the service manager", message=text, reason=error.strerror or str(error))
