"""What goes wrong with a name or a download."""

from __future__ import annotations

from uma_trio.errors import ErrorWithRemedy


class HubError(ErrorWithRemedy):
    """There is no such model, or it cannot be downloaded."""


class NotInstalled(HubError):
    """The name is valid, and no model of that name is on this machine."""


class Interrupted(Exception):
    """A connection failed or was cut, or the server is busy: the same request may work later.

    Args:
        wait_s: the delay that the server asks for, in seconds.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Unreachable(Interrupted):
    """There is no connection to be had: the name has no address, nobody listens there, or no network leads there.

    A retry helps only if there was a connection before.
    """


class AliasFileError(HubError):
    """The file of aliases is damaged, so no name can be looked up."""


class FileRefused(HubError):
    """What was downloaded cannot be served, or does not fit the model."""
