"""Errors of the daemon in the words of a dialect."""

from __future__ import annotations

from tests.support.cases import all_cases
from uma_trio.gateway.errors import field_renamer

NAMES = {
    "stop": "stop_sequences",
    "max_tokens": ("max_completion_tokens", "max_tokens", "n_predict"),
    "constraint": "format",
    "constraint.regex": "pattern.of_text",
    "tools[].parameters": "tools[].function.schema",
    "messages[0].content[1].data": "images[0]",
}


@all_cases(
    ("given", "message", "reworded"),
    [
        ((), "stop[3] must be a text", "stop_sequences[3] must be a text"),
        ((), "ask it to stop, not to max_tokens", "ask it to stop, not to max_tokens"),
        (("n_predict",), "ask for a smaller max_tokens", "ask for a smaller n_predict"),
        (("n_predict", "max_tokens"), "max_tokens is 5", "max_tokens is 5"),
        (("n_predict",), "at most 5 (--max-tokens, max_tokens)", "at most 5 (--max-tokens, n_predict)"),
        (("n_predict",), "seed must be a number, not the text 'max_tokens'", "seed must be a number, not the text 'max_tokens'"),
        ((), "constraint.json_schema must be an object", "format.json_schema must be an object"),
        ((), "constraint.regex: missing )", "pattern.of_text: missing )"),
        ((), "tools[7].parameters.type must be object", "tools[7].function.schema.type must be object"),
        ((), "tools[7].name must be a text", "tools[7].name must be a text"),
        ((), "messages[0].content[1].data: not base64", "images[0]: not base64"),
        ((), "messages[1].content[1].data: not base64", "messages[1].content[1].data: not base64"),
        ((), "", ""),
    ],
)  # fmt: skip
def test_names_of_fields(given: tuple[str, ...], message: str, reworded: str) -> None:
    assert field_renamer(NAMES, given)(message) == reworded
