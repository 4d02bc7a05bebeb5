"""Which modules are removed from the disk to make room for another one.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

import attrs

MIB: Final = 1 << 20


@attrs.frozen
class StoredModule:
    """A module on disk."""

    module_id: str
    n_bytes: int
    """Size of all its files."""
    used_at: float
    """When it was uploaded or instantiated last, in seconds."""


class NoRoom(Exception):
    """The module does not fit, whatever is removed; ``str`` has the numbers."""


def to_remove(stored: Iterable[StoredModule], tagged: Set[str], n_bytes: int, max_bytes: int) -> list[str]:
    """The ids of modules to remove so that ``n_bytes`` more fit: modules without a tag, the least recently used ones first.

    Raises:
        NoRoom: the modules that have tags leave too little.
    """
    modules = sorted(stored, key=lambda each: each.used_at)
    left = sum(each.n_bytes for each in modules) + n_bytes - max_bytes
    removed = []
    for each in modules:
        if left <= 0:
            break
        if each.module_id not in tagged:
            removed.append(each.module_id)
            left -= each.n_bytes
    if left > 0:
        kept = sum(each.n_bytes for each in modules if each.module_id in tagged)
        raise NoRoom(
            f"the module takes {_mib(n_bytes)} with its machine code; all modules together may take "
            f"{_mib(max_bytes)} on disk (aici_max_modules_mb), and those that have tags take {_mib(kept)}"
        )
    return removed


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"
