"""Mutants of a small file: each changes one thing and compiles."""

from __future__ import annotations

from tests.fuzz.mutate_code import Mutant, covering, mutants_of

SOURCE = b'''LIMIT = 3


def f(a: int = 1) -> int:
    """One."""
    assert a > 0, "2"
    log.info("three", 3)
    if a < LIMIT and not g(a):
        h.n += 2
        return a * 2
    raise ValueError(4)
'''


def test_each_mutant_changes_one_thing_inside_a_function():
    lines = SOURCE.decode().splitlines()
    found = set()
    for mutant in mutants_of("f.py", SOURCE):
        changed = mutant.applied(SOURCE).decode().splitlines()
        [at] = [n for n, (old, new) in enumerate(zip(lines, changed, strict=True)) if old != new]
        assert at + 1 in range(mutant.line, mutant.end_line + 1)
        found.add(changed[at].strip())
    assert found == {
        "if a <= LIMIT and not g(a):",
        "if a < LIMIT or not g(a):",
        "if a < LIMIT and g(a):",
        "pass",
        "h.n += 3",
        "return a / 2",
        "return a * 3",
        "return None",
    }


def test_tests_are_spread_over_those_that_execute_the_line():
    mutant = Mutant(path="f.py", line=2, end_line=3, start=0, end=0, text="")
    names = [f"t{n:04}" for n in range(1000)]
    chosen = covering(mutant, {2: [f"{name}|run" for name in names[:700]], 3: [*names[700:], ""], 4: ["other"]})
    assert len(chosen) == 120
    assert set(chosen) <= set(names)
    assert chosen[0] == "t0000"
    assert chosen[-1] > "t0950"
    assert covering(mutant, {4: ["other"]}) == []
