"""Keeps one engine alive: a watchdog for steps that do not end, and restarts with backoff."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
import structlog
import trio

from uma_trio.config import Engine as EngineSettings
from uma_trio.daemon.engines.link import WATCH_S, EngineLink, Launcher
from uma_trio.engine_link.messages import EngineDied, LoadError, Start, StepAnswer
from uma_trio.processes.backoff import Backoff

log = structlog.get_logger("uma_trio.engine")

SLOWER_THAN_PREDICTED: Final = 10
"""A step may take this many times what was predicted, and ``hang_timeout_s`` on top."""


class SupervisedEngine:
    """One model's engine, and how to start it again.

    Args:
        launcher: starts it.
        start: what it loads.
        link: to the engine that runs now.
        settings: When an engine counts as hung, and after how many failed starts all requests fail.
    """

    def __init__(self, launcher: Launcher, start: Start, link: EngineLink, settings: EngineSettings) -> None:
        self._launcher = launcher
        # a restart takes what was chosen at the first start: clients rely on the context
        chosen = link.ready.settings or start.settings
        self._start = msgspec.structs.replace(start, settings=chosen, layouts=(link.ready.layout.name,))
        self._settings = settings
        self.link = link
        self.info = link.info
        self.n_threads = link.info.n_threads
        self.restarts = 0
        self._predicted_s = math.inf
        """What the step should take whose answer is awaited; infinite if none is."""
        self._n_awaited = 0
        """Answers that were awaited so far."""
        self._hang = ""
        """Why the engine that runs now was killed, if ``watch`` did that."""
        self._begins = trio.Event()
        """Set while ``watch`` is to look at the engine."""

    def set_threads(self, n_threads: int) -> None:
        """Have the engine compute with this many threads, also after a restart."""
        self.n_threads = n_threads
        if self.link.is_usable:
            self.link.set_threads(n_threads)

    async def receive(self, predicted_s: float) -> list[StepAnswer]:
        """The engine's next answers; ``watch`` must be running.

        Args:
            predicted_s: what the step in flight should take.

        Raises:
            EngineDied: it has ended, or hung.
        """
        self._predicted_s = predicted_s
        self._n_awaited += 1
        self._begins.set()
        try:
            return cast("list[StepAnswer]", await self.link.receive())
        except EngineDied:
            if self._hang:
                raise EngineDied(self._hang) from None
            raise
        finally:
            self._predicted_s = math.inf

    async def watch(self) -> None:
        """Kill an engine that hangs, until cancelled.

        A scope with a deadline for each answer would take the daemon 17 µs.  Counts polling intervals and not wall time, so
        time in which the daemon itself was stopped does not count.
        """
        n_seen, waited_s = 0, 0.0
        while True:
            if self._predicted_s == math.inf:
                self._begins = trio.Event()
                await self._begins.wait()
            await trio.sleep(WATCH_S)
            waited_s = waited_s + WATCH_S if self._n_awaited == n_seen else 0.0
            n_seen = self._n_awaited
            limit_s = self._settings.hang_timeout_s + SLOWER_THAN_PREDICTED * self._predicted_s
            if limit_s < waited_s:
                self._hang = f"it was killed, because it gave no answer for {waited_s:.0f} s"
                log.error(
                    "the engine hangs and is killed", waited_s=round(waited_s), predicted_s=round(self._predicted_s, 3)
                )
                self.link.kill()
                n_seen = 0

    async def restart_until_ready(self, n_crashes: int, on_unavailable: Callable[[LoadError, float], None]) -> None:
        """Start the engine again if it has died, however long that takes.

        Args:
            n_crashes: since a step was completed; with more than ``restart_attempts`` there is a wait before the restart.
            on_unavailable: called after ``restart_attempts`` failures in a row, and after each further one, with the reason
                and the seconds until the next attempt.
        """
        if self.link.is_usable:
            return
        began, attempts = trio.current_time(), self._settings.restart_attempts
        backoff = Backoff()
        backoff.after(worked=n_crashes <= attempts)
        failures = 0
        while not self.link.is_usable:
            await trio.sleep(backoff.wait_s)
            try:
                await self._restart()
            except LoadError as error:
                failures += 1
                backoff_s = backoff.after(worked=False)
                log.error("the engine cannot be started", reason=str(error), attempt=failures, next_in_s=backoff_s)
                if failures >= attempts:
                    on_unavailable(error, backoff_s)
        log.info("the engine runs again", after_s=round(trio.current_time() - began, 2), restarts=self.restarts)

    async def _restart(self) -> None:
        """Replace the engine by a new one, whose KV cache is empty.

        Raises:
            LoadError: there is no engine now.
        """
        self.link.kill()
        await self.link.aclose()
        self.restarts += 1
        link = self._launcher.launch(self.info.name)
        hang_timeout_s = self._settings.hang_timeout_s
        if not await link.load(self._start, lambda share: None, lambda: True, hang_timeout_s):
            raise LoadError("loading was given up")
        if msgspec.structs.replace(link.info, memory_bytes_per_s=self.info.memory_bytes_per_s) != self.info:
            link.kill()
            await link.aclose()
            raise LoadError(f"{self._start.path} has changed since it was loaded; restart the daemon")
        self.link, self._hang = link, ""
        if self.n_threads != self.info.n_threads:
            link.set_threads(self.n_threads)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        return {"pid": self.link.pid, "restarts_total": self.restarts, **self.link.usage()}
