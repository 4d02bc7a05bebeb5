"""What is typed while an answer is shown."""

from __future__ import annotations

from tests.support.cases import all_cases
from uma_trio.cli.type_ahead import TypeAhead, change_of


@all_cases(
    ("keys", "lines", "rest"),
    [
        ([b"shorter\r"], ["shorter"], ""),
        ([b"sho", b"rter", b"\rand"], ["shorter"], "and"),
        ([b"a\r\r \rb\n"], ["a", "b"], ""),
        ([b"shop\x7fr\b\br"], [], "shr"),
        ([b"wrong\x15right\r"], ["right"], ""),
        ([b"a\x1b[Ab\x1b[1;5Cc\x1bOHd\x1b[3~e\r"], ["abcde"], ""),
        (["é".encode()[:1], "é".encode()[1:], b"\r"], ["é"], ""),
        ([b"\t\x01x\x00\r"], ["x"], ""),
    ],
)
def test_lines_and_what_is_left(keys: list[bytes], lines: list[str], rest: str) -> None:
    ahead = TypeAhead()
    assert [line for part in keys for line in ahead.feed(part)] == lines
    assert (ahead.take(), ahead.has_ended) == (rest, False)


@all_cases(("keys", "ends"), [(b"\x04", True), (b"a\r\x04", True), (b"a\x04", False)])
def test_the_end_of_the_input(keys: bytes, ends: bool) -> None:
    ahead = TypeAhead()
    ahead.feed(keys)
    assert ahead.has_ended is ends


@all_cases(
    ("line", "change"),
    [
        ("Shorter, please.", {"message": "Shorter, please."}),
        ("//etc is a folder", {"message": "/etc is a folder"}),
        ("/stop", {"stop": "sentence"}),
        ("/answer", {"end_reasoning": True}),
        ("/say In short:", {"text": "In short:"}),
        ("/say", None),
        ("/retry", None),
    ],
)
def test_what_a_line_changes(line: str, change: dict[str, object] | None) -> None:
    assert change_of(line) == change
