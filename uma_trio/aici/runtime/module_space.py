"""Which modules are removed from the disk to make room for another one.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import attrs

MIB: Final = 1 << 20


@attrs.frozen
class StoredModule:
    """A module on disk."""

    owner: str
    module_id: str
    n_bytes: int
    """Size of all its files."""
    used_at: float
    """When it was uploaded or instantiated last, in seconds."""
    has_tag: bool = False
    """Only its owner removes it."""


@attrs.frozen
class Space:
    """What modules may take on disk."""

    max_bytes: int
    """Most bytes, all owners together."""
    max_owner_bytes: int
    """Most bytes of one owner."""
    max_owner_modules: int = 1000


class NoRoom(Exception):
    """The module does not fit, whatever is removed; ``str`` has the numbers."""


def to_remove(stored: Iterable[StoredModule], owner: str, n_bytes: int, space: Space) -> list[StoredModule]:
    """The modules to remove so that one more with ``n_bytes`` fits, which belongs to ``owner``.

    Modules without a tag leave, the least recently used ones first: those of the owner, and if all owners together take
    too much, those of whoever takes most, as long as that is more than the owner takes then.

    Raises:
        NoRoom: what may be removed is not enough.
    """
    modules = sorted(stored, key=lambda module: module.used_at)
    sizes, numbers = Counter[str](), Counter(module.owner for module in modules)
    for module in modules:
        sizes[module.owner] += module.n_bytes
    sizes[owner] += n_bytes
    numbers[owner] += 1
    removable = {name: [module for module in modules if module.owner == name and not module.has_tag] for name in sizes}
    removed: list[StoredModule] = []

    def remove_one_of(name: str) -> bool:
        if not removable[name]:
            return False
        leaving = removable[name].pop(0)
        sizes[name] -= leaving.n_bytes
        numbers[name] -= 1
        removed.append(leaving)
        return True

    while sizes[owner] > space.max_owner_bytes or numbers[owner] > space.max_owner_modules:
        if not remove_one_of(owner):
            raise NoRoom(_refusal(n_bytes, sizes[owner] - n_bytes, numbers[owner] - 1, space))
    while sizes.total() > space.max_bytes:
        largest = max((name for name in sizes if removable[name]), key=lambda name: sizes[name], default=owner)
        victim = owner if removable[owner] or sizes[largest] <= sizes[owner] else largest
        if not remove_one_of(victim):
            raise NoRoom(
                f"the module takes {_mib(n_bytes)} with its machine code, and the modules of everybody else leave too "
                f"little of {_mib(space.max_bytes)} (aici_max_modules_mb)"
            )
    return removed


def _refusal(n_bytes: int, kept_bytes: int, n_kept: int, space: Space) -> str:
    has_all = space.max_owner_bytes >= space.max_bytes
    setting = "aici_max_modules_mb" if has_all else "aici_max_principal_modules_mb"
    return (
        f"the module takes {_mib(n_bytes)} with its machine code, and yours that have tags take {_mib(kept_bytes)} "
        f"({n_kept} modules); you may have {_mib(space.max_owner_bytes)} ({setting}) and "
        f"{space.max_owner_modules} modules; delete some"
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"
