"""Where and how a prompt differs from an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from uma_trio.daemon.prompts.difference import difference
from uma_trio.engine_link.tokens import common_prefix
from uma_trio.protocol.usage import Change

QUESTION = "Which mountain is the highest one of Switzerland, and who was there first?"


def tokens(text: str) -> Any:
    return np.array([ord(letter) for letter in text], np.int32)


def spell(found: Sequence[int]) -> str:
    return "".join(map(chr, found))


def chat(*messages: str, head: str = "") -> str:
    return head + "".join([f"<|turn|>{message}<|end|>\n" for message in messages])


def compare(was: str, now: str, messages: Sequence[str] = (), tools: Sequence[str] = ()) -> Change:
    a, b = tokens(now), tokens(was)
    return difference(a, b, common_prefix(a, b), spell, text=now, messages=messages, tools=tools)


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("Today is 2026-11-27.", "Today is 2026-11-28.", "date"),
        ("It is 9:59 now.", "It is 10:00 now.", "date"),
        ("Today is Nov 9, a Monday", "Today is Nov 10, a Monday", "date"),
        ("You are visitor 41 of this page.", "You are visitor 42 of this page.", "number"),
        ("You are brief.", "You are thorough.", "text"),
        ("Version 2 of it", "Version two of it", "text"),
    ],
)
def test_kinds_of_changes_in_a_system_prompt(was: str, now: str, kind: str) -> None:
    found = compare(chat(was, QUESTION), chat(now, QUESTION), [now, QUESTION])
    assert (found.kind, found.message_index) == (kind, 0)
    assert found.was in was
    assert found.now in now
    assert found.was != found.now
    assert f"{found.before}{found.now}" in chat(now, QUESTION)


def test_whole_words_are_shown_and_not_the_rest_of_the_prompt() -> None:
    found = compare(chat("Today is 2026-11-27.", QUESTION), chat("Today is 2026-11-28.", QUESTION))
    assert (found.was[:11], found.now[:11]) == ("2026-11-27.", "2026-11-28.")
    assert QUESTION not in found.now
    assert found.before.endswith("Today is ")
    assert found.message_index is None, "the messages are not known"


def test_a_message_that_was_edited() -> None:
    other = QUESTION.replace("Switzerland", "Austria")
    found = compare(
        chat("Be brief.", QUESTION, "Dufour"), chat("Be brief.", other, "Dufour"), ["Be brief.", other, "Dufour"]
    )
    assert (found.kind, found.message_index, found.was[:11], found.now[:7]) == ("text", 1, "Switzerland", "Austria")


def test_tools_in_another_order_and_other_tools() -> None:
    def prompt(*names: str) -> str:
        return chat(QUESTION, head="".join([f'{{"name": "{name}", "about": "what {name} does"}}\n' for name in names]))

    assert compare(
        prompt("ask", "buy", "call"), prompt("buy", "ask", "call"), [QUESTION], ["buy", "ask", "call"]
    ).kind == ("tools_order")
    assert compare(prompt("ask", "buy"), prompt("ask", "dig"), [QUESTION], ["ask", "dig"]).kind == "tools"


def test_text_of_the_template_belongs_to_no_message() -> None:
    found = compare(chat(QUESTION, head="thinking: on\n"), chat(QUESTION, head="thinking: off\n"), [QUESTION])
    assert (found.kind, found.was[:2], found.now[:3], found.message_index) == ("template", "on", "off", None)


def test_a_prompt_that_ends_where_the_earlier_one_goes_on() -> None:
    found = compare(chat(QUESTION, "Dufour"), chat(QUESTION), [QUESTION])
    assert (found.kind, found.now) == ("shorter", "")


def test_a_token_in_front_that_the_text_does_not_have() -> None:
    now = chat("Be kind 8.", QUESTION)
    a, b = tokens("#" + now), tokens("#" + chat("Be kind 7.", QUESTION))
    assert difference(a, b, common_prefix(a, b), spell, text=now, messages=["Be kind 8.", QUESTION]).message_index == 0


def test_what_occurs_twice_is_not_placed() -> None:
    now = chat("same words here 1", "same words here 1")
    a, b = tokens(now), tokens(chat("same words here 2", "same words here 1"))
    found = difference(a, b, common_prefix(a, b), spell, text="no such text", messages=["same words here 1"] * 2)
    assert found.message_index is None
