"""Conversations that the daemon remembers: their history, their running request, and their copy on disk.

A session is the list of tokens that its next request begins with.  The KV cache finds them by prefix reuse, so the two
packages know nothing else of each other.
"""

from uma_trio.daemon.sessions.sessions import Sessions, SessionTurn
from uma_trio.daemon.sessions.table import Session, SessionTable

__all__ = ["Session", "SessionTable", "SessionTurn", "Sessions"]
