"""Stops calls into Wasm at their deadlines."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Final

import wasmtime

TICK_S: Final = 0.005
"""Length of an epoch.  A call ends up to two of them after its deadline, later only if the machine is too busy."""

IDLE_S: Final = 0.25
"""The thread sleeps after that time without a call: to wake it costs more than a call."""

LONGEST: Final = 1 << 30
"""Epochs in the longest call."""


class Epochs:
    """A thread that counts the engine's epochs while calls are in flight, and sleeps otherwise."""

    def __init__(self, engine: wasmtime.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._n_calls = 0
        self._used_at = self._counted_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._count, name="uma-trio epochs", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def until(self, store: wasmtime.Store, deadline: float) -> Iterator[None]:
        """Let the calls of ``store`` inside the context trap at ``deadline``."""
        with self._lock:
            self._used_at = time.monotonic()
            if not self._awake.is_set():
                self._counted_until = self._used_at
                self._awake.set()
            n_epochs = math.ceil((deadline - self._counted_until) / TICK_S) if deadline < math.inf else LONGEST
            store.set_epoch_deadline(max(1, min(n_epochs + 1, LONGEST)))
            self._n_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_calls -= 1

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            self._awake.set()
        self._thread.join()

    def _count(self) -> None:
        while True:
            self._awake.wait()
            time.sleep(TICK_S)
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                n_epochs = int((now - self._counted_until) / TICK_S)
                self._counted_until += n_epochs * TICK_S
                if self._n_calls:
                    for _ in range(n_epochs):
                        self._engine.increment_epoch()
                elif now > self._used_at + IDLE_S:
                    self._awake.clear()
