"""What is needed of the place where states of sequences are kept, and how a state lies in its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from uma_trio.kv.prefix import Tokens
from uma_trio.kv.shelf import Saved
from uma_trio.store.state_folder import StateFileError


class Written(Protocol):
    """A file that is complete."""

    @property
    def name(self) -> str: ...


class Draft(Protocol):
    """A file that is being written."""

    @property
    def view(self) -> Any:
        """A writable buffer of as many bytes as were asked for."""

    def finish(self, tokens: Tokens, *, principal: str, n_bytes: int, extra: dict[str, Any]) -> Written: ...
    def abandon(self) -> None: ...


class Reading(Protocol):
    """A file that has been read and verified."""

    @property
    def view(self) -> Any: ...
    def close(self) -> None: ...


class StateFiles(Protocol):
    """Where states are kept; all calls block, and raise ``StateFileError`` with the reason."""

    @property
    def readers(self) -> int:
        """Threads that read one state together."""

    @property
    def used_bytes(self) -> int:
        """Of all files that count to the most that there may be; does not block for long."""

    def begin(self, n_bytes: int) -> Draft: ...
    def open(self, name: str) -> Reading: ...
    def remove(self, name: str) -> None: ...

    def __contains__(self, name: str) -> bool:
        """Whether the state is still there; does not block."""


class Nowhere:
    """The ``StateFiles`` of a server that saves nothing."""

    readers: Final = 1
    used_bytes: Final = 0

    def begin(self, n_bytes: int) -> Draft:
        raise StateFileError("states are not saved")

    def open(self, name: str) -> Reading:
        raise StateFileError("states are not saved")

    def remove(self, name: str) -> None:
        """There is none."""

    def __contains__(self, name: str) -> bool:
        return False


def saved_state(name: str, tenant: int, tokens: Tokens, n_bytes: int, extra: Mapping[str, Any]) -> Saved:
    """What a file holds, of which ``extra`` says which checkpoints follow the state.

    Raises:
        ValueError: it says what cannot be.
    """
    told = extra.get("checkpoints", [])
    match told:
        case [*pairs] if all(_is_pair(pair) for pair in pairs):
            found = tuple([(length, size) for length, size in pairs])
        case _:
            raise ValueError(f"its checkpoints are {str(told)[:100]}")
    lengths = [0, *(length for length, _ in found), len(tokens) + 1]
    if sorted(set(lengths)) != lengths or min([1, *(n for _, n in found)]) < 1 or sum(n for _, n in found) >= n_bytes:
        raise ValueError(f"its checkpoints are {str(told)[:100]}, of {len(tokens)} tokens in {n_bytes} bytes")
    return Saved(name, tenant, tokens, n_bytes, found)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(number, int) for number in value)


def parts(view: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """``view`` cut into parts of ``sizes``, one behind the other; they let go of it when they go."""
    at = 0
    for size in sizes:
        yield memoryview(view)[at : at + size]
        at += size
