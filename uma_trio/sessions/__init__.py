"""Conversations that the server remembers: what was said in them, who is answering, what survives.

Knows of the KV cache only that tokens which begin alike are not computed again: a session is the tokens that its
next request begins with.
"""

from uma_trio.sessions.book import Book, Session
from uma_trio.sessions.sessions import Sessions, Turn

__all__ = ["Book", "Session", "Sessions", "Turn"]
