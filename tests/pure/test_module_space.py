"""Which modules leave the disk."""

from __future__ import annotations

import pytest

from uma_trio.aici.runtime.module_space import NoRoom, StoredModule, to_remove

MIB = 1 << 20
STORED = [StoredModule("c", 3 * MIB, 3.0), StoredModule("a", 1 * MIB, 1.0), StoredModule("b", 2 * MIB, 2.0)]


@pytest.mark.parametrize(
    ("n_mib", "tagged", "removed"),
    [
        (4, set(), []),
        (5, set(), ["a"]),
        (6, set(), ["a", "b"]),
        (8, set(), ["a", "b", "c"]),
        (5, {"a"}, ["b"]),
        (7, {"a"}, ["b", "c"]),
        (4, {"a", "b", "c"}, []),
    ],
)
def test_the_last_used_ones_leave_last(n_mib: int, tagged: set[str], removed: list[str]) -> None:
    assert to_remove(STORED, tagged, n_mib * MIB, 10 * MIB) == removed


def test_no_room() -> None:
    with pytest.raises(NoRoom, match=r"takes 8\.0 MiB.*may take 10\.0 MiB.*have tags take 3\.0 MiB"):
        to_remove(STORED, {"c"}, 8 * MIB, 10 * MIB)
    with pytest.raises(NoRoom):
        to_remove([], set(), 11 * MIB, 10 * MIB)
