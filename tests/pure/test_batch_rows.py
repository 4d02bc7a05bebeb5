"""Rows of batches: what a file may contain, and the line that a bad one is refused with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.support.cases import all_cases
from uma_trio.gateway.batches.rows import EXAMPLE, MAX_ROWS, Contents, RowReader, RowResult, RowsError, unanswered_row

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
MAX_BODY = 1000
READER = RowReader((CHAT, EMBED), MAX_BODY, "http_max_body_bytes")


def row(number: int = 0, **fields: object) -> dict[str, object]:
    return {"custom_id": f"row-{number}", "method": "POST", "url": CHAT, "body": {"messages": []}, **fields}


def written(folder: Path, lines: Sequence[object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(
        b"".join([(line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines])
    )
    return path


def refusal(folder: Path, *lines: object) -> RowsError:
    with pytest.raises(RowsError) as caught:
        READER.check(written(folder, lines))
    return caught.value


def test_a_good_file(tmp_path: Path) -> None:
    path = written(tmp_path, [row(number) for number in range(3)])
    assert READER.check(path) == Contents(CHAT, 3)
    assert [found.custom_id for _, found in READER.read(path)] == ["row-0", "row-1", "row-2"]


def test_empty_lines_a_byte_order_mark_and_a_missing_last_line_break_are_nothing_bad(tmp_path: Path) -> None:
    path = written(tmp_path, [b"\xef\xbb\xbf" + json.dumps(row(0)).encode(), b"", b"  \r", row(1)])
    path.write_bytes(path.read_bytes().rstrip())
    assert READER.check(path).rows == 2
    assert [number for number, _ in READER.read(path)] == [1, 4]


@all_cases(
    ("bad", "field", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b"\xff", None, "not valid JSON"),
        (b'{"body": ' + b"[" * 3000, None, "not valid JSON"),
        (["a", "list"], None, f"expected `object`, got `array`; a line is such as {EXAMPLE}"),
        ({"custom_id": "a", "method": "POST", "url": CHAT}, None, "missing required field `body`; a line is such as {"),
        (row(custom_id=""), "custom_id", "length >= 1"),
        (row(custom_id="a" * 513), "custom_id", "length <= 512"),
        (row(custom_id=7), "custom_id", "Expected `str`"),
        (row(method="GET"), "method", "Invalid enum value"),
        (row(url="/v1/models"), "url", CHAT),
        (row(body=[]), "body", "JSON object"),
        (row(body={"prompt": "a" * MAX_BODY}), "body", "http_max_body_bytes"),
        (b" " * 10_000 + b"{}", None, "http_max_body_bytes"),
        (row(url=EMBED), "url", "make a file for each"),
        (row(0), "custom_id", "also that of line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: object, field: str | None, words: str) -> None:
    error = refusal(tmp_path, row(0), b"", bad, row(2))
    assert (error.line, error.field) == (3, field)
    assert words in str(error)
    assert str(error).startswith("line 3: ")


def test_no_rows_and_too_many_rows(tmp_path: Path) -> None:
    assert "no rows" in str(refusal(tmp_path))
    assert "no rows" in str(refusal(tmp_path, b"", b" "))
    assert f"{MAX_ROWS:,}" in str(refusal(tmp_path, *[row(number) for number in range(MAX_ROWS + 1)]))


def test_results_are_lines_of_openais_form() -> None:
    result = RowResult("a", 200, msgspec.Raw(b'{"id":"x"}'), "req-1")
    line = json.loads(result.line())
    assert result.line().endswith(b"\n")
    assert not result.is_error
    assert line.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"id": "x"}}
    assert line == {"custom_id": "a", "response": response, "error": None}
    assert RowResult("a", 400, msgspec.Raw(b"{}"), "req-1").is_error
    late = json.loads(unanswered_row("b", "batch_expired", "too late"))
    assert (late["custom_id"], late["response"]) == ("b", None)
    assert late["error"] == {"code": "batch_expired", "message": "too late"}
