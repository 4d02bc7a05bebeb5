"""Why a function of the host ends the call in which a controller has called it."""

from __future__ import annotations


class Fatal(Exception):
    """The controller has called the host in a wrong way."""


class Stopped(Exception):
    """The controller has ended itself."""


class OutOfTime(Exception):
    """The deadline of the call came while the host worked for it."""
