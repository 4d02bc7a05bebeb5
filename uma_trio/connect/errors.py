"""Why a client gets no answer."""

from __future__ import annotations

from uma_trio.errors import ErrorWithRemedy


class ClientError(Exception):
    """A request did not end with ``eos``."""


class BrokenProtocol(ClientError):
    """The daemon violated the protocol, or closed the connection before the end of an answer."""


class NoDaemon(ErrorWithRemedy, ClientError):
    """No daemon can be reached at the path, which the reason names.

    Args:
        may_appear: whether a daemon may become reachable there if nothing else changes.
    """

    def __init__(self, reason: str, remedy: str, *, may_appear: bool = False) -> None:
        super().__init__(reason, remedy)
        self.may_appear = may_appear


class Loading(NoDaemon):
    """The daemon at the path still loads its model."""
