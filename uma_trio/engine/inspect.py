"""What the built library says of itself, in plain values: for ``uma-trio doctor``."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

import llama_abi
from llama_abi.library import DIRECTORY_VARIABLE
from llama_abi.stamp import DEFAULT_DIRECTORY


class LibraryProblem(Exception):
    """The library cannot be used; says why and names the fix."""


@attrs.frozen
class DeviceFacts:
    """Something that computes."""

    name: str
    description: str
    kind: str
    """``cpu``, ``gpu``, ``igpu``, ``accel`` or ``meta``."""
    memory_free: int
    """Bytes; 0 where the backend does not know."""
    memory_total: int


@attrs.frozen
class StampFacts:
    """What a library was built from, as its stamp says and its files bear out."""

    pin: str
    backend: str


@attrs.frozen
class LibraryFacts:
    """A library that is loaded."""

    system_info: str
    """Instruction sets and the like, in llama.cpp's words."""
    supports_rpc: bool
    max_sequences: int
    devices: tuple[DeviceFacts, ...]


def library_directory(named: Path | None = None) -> Path:
    """Where the library is looked for; see ``llama_abi.load``."""
    return Path(named or os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY).resolve()


def read_stamp(directory: Path) -> StampFacts:
    """The stamp of ``directory``, held against the files there; nothing is loaded.

    Raises:
        LibraryProblem: there is none, or it does not hold.
    """
    try:
        stamp = llama_abi.Stamp.read(directory)
        stamp.verify(directory)
    except llama_abi.LibraryError as error:
        raise LibraryProblem(str(error)) from None
    return StampFacts(stamp.pin, stamp.backend)


def load_library(directory: Path) -> LibraryFacts:
    """Load the library of ``directory`` into this process and ask it.

    Raises:
        LibraryProblem: it does not load.
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
