"""Patterns for names of tensors: what both engines read alike is taken, and nothing that takes forever."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.config.tensor_pattern import MAX_LENGTH, problem_of


@all_cases(
    "pattern",
    [
        r"ffn",
        r"\.ffn_(up|down|gate|gate_up)_(ch|)exps",
        r"blk\.(1[0-9]|2[0-4])\.ffn_.*_exps\.weight",
        r"^blk\.[0-9]+\.attn_[qkv]\.weight$",
        r"(?:blk\.\d{1,2}\.)?ffn_.*?exps",
        r"[^a-z_]+",
        r"\bblk\b",
        r"(ab)+",
        r"a\+b\{2\}",
    ],
)
def test_usual_patterns_are_taken(pattern: str) -> None:
    assert problem_of(pattern) is None


@all_cases(
    ("pattern", "why"),
    [
        ("", "empty"),
        ("a" * (MAX_LENGTH + 1), "257 characters"),
        ("blk\n", "printable"),
        ("blöck", "ASCII"),
        ("(ffn", "not closed"),
        ("ffn)", "not open"),
        ("[ffn", "not closed"),
        ("[]", "class"),
        ("[z-a]", "bad character range"),
        ("[[:alpha:]]", "backslash in a class"),
        ("*ffn", "nothing that"),
        ("^*", "nothing that"),
        ("a**", "repeated"),
        ("a++", "repeated"),
        ("a{2}{3}", "repeated"),
        ("a{x}", "numbers"),
        ("a{3,1}", "smaller one first"),
        ("a{1,9999}", "up to 64"),
        ("a]", "backslash"),
        ("a}", "backslash"),
        ("(?=ffn)", "(?: only"),
        ("(?P<name>ffn)", "(?: only"),
        ("(?i)ffn", "(?: only"),
        (r"(ffn)\1", "not supported"),
        (r"\Z", "not supported"),
        ("ffn\\", "ends with a backslash"),
        ("(a+)+$", "forever"),
        ("(a|a)*$", "forever"),
        ("((a*)b)*c", "forever"),
        (".*.*.*.*.*x", "forever"),
        ("a?" * 40 + "a" * 40, "forever"),
        ("(.|.)" * 40 + "x", "forever"),
        ("|".join(["ffn"] * 64), None),
    ],
)
def test_what_is_refused_and_why(pattern: str, why: str | None) -> None:
    found = problem_of(pattern)
    assert found is None if why is None else why in (found or "")


@given(st.text(alphabet=r"ab.[](){}|*+?^$\0123,-:=_", max_size=40))
def test_what_is_taken_compiles_and_ends(pattern: str) -> None:
    if problem_of(pattern) is None:
        re.compile(pattern)
