"""What survives on disk: states of KV sequences, and the tokens of sessions.

Plain functions that block, to be called from worker threads; they know bytes, tokens and files, and no engine.
"""

from uma_trio.store.folder import StoreError
from uma_trio.store.journal import Journal, JournalError
from uma_trio.store.journal_format import SessionKey, SessionRecord
from uma_trio.store.spill import CorruptState, Draft, Loaded, SpillError, SpillFolder
from uma_trio.store.spill_format import Spilled

__all__ = [
    "CorruptState",
    "Draft",
    "Journal",
    "JournalError",
    "Loaded",
    "SessionKey",
    "SessionRecord",
    "SpillError",
    "SpillFolder",
    "Spilled",
    "StoreError",
]
