"""Which modules leave the disk."""

from __future__ import annotations

import pytest

from tests.support.cases import all_cases
from uma_trio.aici.runtime.module_space import NoRoom, Space, StoredModule, to_remove

MIB = 1 << 20
SPACE = Space(max_bytes=20 * MIB, max_owner_bytes=10 * MIB, max_owner_modules=4)


def stored(owner: str, *sizes: int, tagged: str = "") -> list[StoredModule]:
    """Modules a, b, ..., the least recently used one first."""
    return [
        StoredModule(owner, name, size * MIB, float(n), name in tagged)
        for n, (name, size) in enumerate(zip("abcdef", sizes, strict=False))
    ]


def removed(modules: list[StoredModule], n_mib: int, space: Space = SPACE) -> list[str]:
    found = to_remove(reversed(modules), "alice", n_mib * MIB, space)
    return [f"{each.owner} {each.module_id}" for each in found]


@all_cases(
    ("n_mib", "tagged", "expected"),
    [
        (4, "", []),
        (5, "", ["alice a"]),
        (6, "", ["alice a", "alice b"]),
        (10, "", ["alice a", "alice b", "alice c"]),
        (5, "a", ["alice b"]),
        (7, "a", ["alice b", "alice c"]),
        (4, "abc", []),
    ],
)
def test_an_owner_makes_room_with_what_it_used_least_recently(n_mib: int, tagged: str, expected: list[str]) -> None:
    assert removed([*stored("alice", 1, 2, 3, tagged=tagged), *stored("bob", 9)], n_mib) == expected


def test_a_number_of_modules_is_enough() -> None:
    assert removed(stored("alice", 0, 0, 0, 0), 0) == ["alice a"]
    with pytest.raises(NoRoom, match="and 4 modules"):
        removed(stored("alice", 0, 0, 0, 0, tagged="abcd"), 0)


def test_others_leave_only_for_one_who_has_less() -> None:
    full = [*stored("bob", 4, 5), *stored("carol", 2, 5)]
    assert removed(full, 4) == []
    assert removed(full, 5) == ["bob a"], "bob has most"
    assert removed([*full, *stored("alice", 4)], 5) == ["alice a", "bob a"], "alice's own leave first"
    with pytest.raises(NoRoom, match=r"aici_max_modules_mb"):
        removed([*stored("bob", 6), *stored("carol", 6), *stored("dave", 6)], 7)
    with pytest.raises(NoRoom, match=r"everybody else leave too little of 20\.0 MiB"):
        removed([*stored("bob", 9, tagged="a"), *stored("carol", 9, tagged="a")], 3)


def test_a_share_is_not_exceeded() -> None:
    with pytest.raises(
        NoRoom, match=r"takes 8\.0 MiB.*have tags take 3\.0 MiB.*may have 10\.0 MiB \(aici_max_principal_modules_mb\)"
    ):
        removed(stored("alice", 1, 2, 3, tagged="c"), 8)
    with pytest.raises(NoRoom):
        removed([], 11)
