"""The installed library, as its stamp describes it: what it was built from, and how to install it anew.  Loads nothing."""

from __future__ import annotations

from pathlib import Path

import attrs

import llama_abi
from llama_abi.locations import library_directory, plugin_folders
from llama_abi.remedies import repair_command
from uma_trio.errors import ErrorWithRemedy


class LibraryProblem(ErrorWithRemedy):
    """The library cannot be used."""


@attrs.frozen
class StampFacts:
    """The source of a library: what its stamp says, verified against its files."""

    pin: str
    backend: str
    """What it was built for."""
    plugins: tuple[str, ...]
    """The backends of the plug-ins that are installed for it, whether they load on this machine or not."""
    directory: Path


def read_stamp(named: Path | None = None) -> StampFacts:
    """Read the stamp of the library and verify it against its files.  Loads nothing.

    Args:
        named: its directory; by default the one that ``llama_abi.load`` takes.

    Raises:
        LibraryProblem: there is no stamp, or the files differ from it.
    """
    directory = library_directory(named)
    try:
        stamp = llama_abi.Stamp.read(directory)
        stamp.verify(directory)
        plugins = [llama_abi.Stamp.read(folder).backend for folder in plugin_folders()] if stamp.has_plugins else ()
        return StampFacts(stamp.pin, stamp.backend, tuple(plugins), directory)
    except llama_abi.LibraryError as error:
        raise LibraryProblem(error.reason, error.remedy) from None


def library_fix(named: Path | None = None) -> str:
    """The command that installs or builds the library anew, where it loads and does not work.

    Args:
        named: its directory; by default see ``llama_abi.load``.
    """
    return repair_command(library_directory(named), clean=True)
