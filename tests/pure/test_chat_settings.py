"""What ``/set`` in a chat makes of a request."""

from __future__ import annotations

import pytest

from tests.support.cases import all_cases
from uma_trio.cli.chat_settings import BadSetting, with_setting


@all_cases(
    ("name", "value", "fields"),
    [
        ("temperature", "0.5", {"temperature": 0.5}),
        ("temp", "0.5", {"temperature": 0.5}),
        ("repeat_penalty", "1.1", {"repetition_penalty": 1.1}),
        ("max-tokens", "9", {"max_tokens": 9}),
        ("stop", "-- end", {"stop": ("-- end",)}),
        ("json", "on", {"constraint": {"json_object": True}}),
        ("schema", '{"type": "object"}', {"constraint": {"json_schema": {"type": "object"}}}),
        ("regex", "--a", {"constraint": {"regex": "--a"}}),
        ("priority", "background", {"slo": {"priority": "background"}}),
    ],
)
def test_a_setting_is_set_replaced_and_unset(name: str, value: str, fields: dict[str, object]) -> None:
    before = {"model": "a", "constraint": {"regex": "b"}}
    assert with_setting(before, name, value) == {**before, **fields}
    [field] = fields
    without = {key: each for key, each in before.items() if key != field}
    for off in ("off", "default"):
        assert with_setting({**before, **fields}, name, off) == without


@all_cases(
    ("name", "value", "reason"),
    [
        ("temperature", "1000", "temperature is a number from 0 to 100, or off"),
        ("temp", "nan", "temp is a number from 0 to 100, or off"),
        ("max_tokens", "abc", "max_tokens is a whole number from 1 on, or off"),
        ("grammar", "/nothing/there.gbnf", "File '/nothing/there.gbnf' does not exist"),
        ("temperature", "", "give a value"),
        ("temprature", "1", "did you mean temperature?"),
        ("xyzzy", "1", "there are system, "),
        ("json", "maybe", "json-object is on or off"),
        ("schema", "/nothing/there.json", "json-schema: cannot read"),
        ("model", "b", "use /model NAME"),
        ("session", "b", "use /session NAME"),
        ("top_p", "2", "top_p is a number above 0, up to 1, or off"),
    ],
)
def test_what_cannot_be_set_says_what_can(name: str, value: str, reason: str) -> None:
    with pytest.raises(BadSetting) as refused:
        with_setting({}, name, value)
    assert reason in str(refused.value)
