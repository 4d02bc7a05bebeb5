"""What outlives the daemon: the journal of sessions and the states of their sequences, in the state folder.

Whatever is wrong with the folder costs sessions their memory on disk, and nothing else: the daemon serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import platformdirs
import structlog

from uma_trio.config import Config
from uma_trio.kv.offload_index import SavedState
from uma_trio.models.loaded import LoadedModel
from uma_trio.runner.state_files import StateFiles, saved_state
from uma_trio.store.journal import Journal, JournalError
from uma_trio.store.spill import SpillError, SpillFolder
from uma_trio.store.spill_format import Spilled

log = structlog.get_logger("uma_trio.daemon")

MB: Final = 1_000_000

MOST_READERS: Final = 8
"""Threads that check one state; they read it from memory, mostly, which more would not do any faster."""


@attrs.frozen
class Memory:
    """What a server remembers with."""

    journal: Journal | None = None
    files: StateFiles | None = None
    states: Sequence[SavedState] = ()
    """Those that were there."""


NO_MEMORY: Final = Memory()


def state_dir(config: Config) -> Path:
    """The folder of all models' sessions."""
    return config.sessions.state_dir or Path(platformdirs.user_state_dir("uma-trio"))


@contextlib.contextmanager
def open_memory(config: Config, model: LoadedModel) -> Iterator[Memory]:
    """The memory of ``model``'s sessions.  Blocks while it is read."""
    folder = state_dir(config) / model.name
    with contextlib.ExitStack() as stack:
        journal: Journal | None = None
        files: SpillFolder | None = None
        states: list[SavedState] = []
        try:
            journal = Journal(folder / "sessions", model=model.name, max_sessions=config.sessions.max_stored_sessions)
            stack.callback(journal.close)
        except JournalError as error:
            log.error("sessions will not survive this server", reason=str(error))
        if config.sessions.spill and journal is not None:
            try:
                files = SpillFolder(
                    folder / "states",
                    max_bytes=config.sessions.spill_max_mb * MB,
                    fingerprint=model.state_name,
                    readers=min(MOST_READERS, model.engine.facts.spare_cores),
                )
                stack.callback(files.close)
                states = [*_usable(files.scan())]
                for problem in files.problems:
                    log.warning("a saved state is of no use", reason=problem)
            except SpillError as error:
                log.error("sessions' KV caches will not be written to disk", reason=str(error))
        yield Memory(journal, files, states)


def _usable(found: Iterable[Spilled]) -> Iterator[SavedState]:
    for s in found:
        try:
            yield saved_state(s.name, str(s.tenant), s.tokens, s.n_bytes, s.extra)
        except ValueError as error:
            log.warning("a saved state is of no use", reason=f"{s.name}: {error}")
