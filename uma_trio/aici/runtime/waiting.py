"""Controllers that were instantiated for a request and have no sequence yet."""

from __future__ import annotations

import threading
import time
from typing import Final

import attrs

from uma_trio.aici.runtime.controller import Controller
from uma_trio.aici.runtime.interface import BadRequest

MAX_WAITING: Final = 256


@attrs.frozen(eq=False)
class _Waiting:
    controller: Controller
    since: float


class WaitingControllers:
    """Controllers by the id of their request.  A controller that nobody takes is closed.  Thread-safe.

    Args:
        expire_s: how long a controller waits at most.
    """

    def __init__(self, expire_s: float) -> None:
        self._expire_s = expire_s
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}

    def check_room(self) -> None:
        """Raises ``BadRequest`` if there is no room for another one."""
        if len(self._waiting) >= MAX_WAITING:
            raise BadRequest(f"{MAX_WAITING} controllers wait for a sequence already; assign them with pre_ops")

    def put(self, req_id: str, controller: Controller) -> None:
        """Add a controller; one that waits for the same request is closed."""
        with self._lock:
            before = self._waiting.pop(req_id, None)
            self._waiting[req_id] = _Waiting(controller, time.monotonic())
        if before is not None:
            before.controller.close()

    def take(self, req_id: str) -> Controller | None:
        """The controller of a request, which then belongs to the caller; ``None`` if none waits."""
        with self._lock:
            waiting = self._waiting.pop(req_id, None)
        return None if waiting is None else waiting.controller

    def expire(self) -> None:
        """Close controllers that have waited too long, or that have lost their memory."""
        oldest = time.monotonic() - self._expire_s
        with self._lock:
            gone = [
                req_id
                for req_id, waiting in self._waiting.items()
                if waiting.since < oldest or waiting.controller.is_evicted
            ]
            controllers = [self._waiting.pop(req_id).controller for req_id in gone]
        for controller in controllers:
            controller.close()
