"""Durable storage: the states of KV sequences, and the journals of sessions.

Blocking functions, to be called from worker threads.  They handle bytes, tokens and files, and know no engine.
"""

from uma_trio.store.folder import StoreError
from uma_trio.store.journal import Journal, JournalError
from uma_trio.store.journal_format import SessionKey, SessionRecord
from uma_trio.store.memory_states import MemoryStates
from uma_trio.store.state_folder import CorruptState, StateDraft, StateFileError, StateFolder, StateReader
from uma_trio.store.state_format import StoredState

__all__ = [
    "CorruptState",
    "Journal",
    "JournalError",
    "MemoryStates",
    "SessionKey",
    "SessionRecord",
    "StateDraft",
    "StateFileError",
    "StateFolder",
    "StateReader",
    "StoreError",
    "StoredState",
]
