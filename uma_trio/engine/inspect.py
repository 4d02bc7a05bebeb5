"""Facts about the built library as plain values, for ``uma-trio doctor``."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

import llama_abi
from llama_abi.library import DIRECTORY_VARIABLE
from llama_abi.stamp import DEFAULT_DIRECTORY


class LibraryProblem(Exception):
    """The library cannot be used.  The message has the reason and the fix."""


@attrs.frozen
class DeviceFacts:
    """A compute device."""

    name: str
    description: str
    kind: str
    """``cpu``, ``gpu``, ``igpu``, ``accel`` or ``meta``."""
    memory_free: int
    """Bytes.  0 if the backend does not report it."""
    memory_total: int
    """Bytes."""


@attrs.frozen
class StampFacts:
    """The source of a library: what its stamp says, verified against its files."""

    pin: str
    backend: str


@attrs.frozen
class LibraryFacts:
    """Facts about a loaded library."""

    system_info: str
    """Instruction sets and build options, as llama.cpp reports them."""
    supports_rpc: bool
    max_sequences: int
    devices: tuple[DeviceFacts, ...]


def library_directory(named: Path | None = None) -> Path:
    """The directory that ``llama_abi.load`` searches."""
    return Path(named or os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY).resolve()


def read_stamp(directory: Path) -> StampFacts:
    """Read the stamp of ``directory`` and verify it against the files there.  Loads nothing.

    Raises:
        LibraryProblem: there is no stamp, or the files differ from it.
    """
    try:
        stamp = llama_abi.Stamp.read(directory)
        stamp.verify(directory)
    except llama_abi.LibraryError as error:
        raise LibraryProblem(str(error)) from None
    return StampFacts(stamp.pin, stamp.backend)


def load_library(directory: Path) -> LibraryFacts:
    """Load the library of ``directory`` into this process and query it.

    Raises:
        LibraryProblem: it cannot be loaded.
    """
    try:
        library = llama_abi.load(directory)
    except llama_abi.LibraryError as error:
        raise LibraryProblem(str(error)) from None
    devices = tuple(
        DeviceFacts(device.name, device.description, device.type.name.lower(), device.memory_free, device.memory_total)
        for device in library.devices()
    )
    return LibraryFacts(library.system_info, library.supports_rpc, library.max_sequences, devices)
