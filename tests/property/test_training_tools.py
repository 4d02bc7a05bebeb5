"""Chats with tools in the training text: every call fits its tool, and what is held out stays held out."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest

from tests.support.training_chats import messages_of
from uma_trio.training.chat import CONTROLS
from uma_trio.training.sample import Sample, held_out
from uma_trio.training.skills.capitals import DONT_KNOW
from uma_trio.training.skills.tool_kinds import KINDS
from uma_trio.training.skills.tool_results import answer_to
from uma_trio.training.skills.tools import EXAM, tool_chat, tool_question
from uma_trio.training.tool_format import calls_text, parse_calls, parse_results, results_text


@pytest.fixture(scope="module")
def chats() -> list[Sample]:
    rng = Random(1)
    return [tool_chat(rng, 1, 8, longest=6) for _ in range(1500)]


def functions_of(sample: Sample) -> dict[str, dict[str, Any]]:
    functions = [json.loads(tool)["function"] for tool in sample.tools]
    assert len({function["name"] for function in functions}) == len(functions)
    return {function["name"]: function for function in functions}


def calls_of(sample: Sample) -> Iterator[tuple[str, dict[str, Any]]]:
    for turn in sample.turns:
        yield from parse_calls(turn.answer) or ()


@pytest.mark.thorough
def test_every_call_fits_the_schema_of_its_tool(chats: list[Sample]) -> None:
    seen = 0
    for sample in chats:
        functions = functions_of(sample)
        for function in functions.values():
            jsonschema.Draft202012Validator.check_schema(function.get("parameters", {}))
        for name, arguments in calls_of(sample):
            schema = functions[name].get("parameters", {"type": "object", "properties": {}})
            jsonschema.Draft202012Validator({**schema, "additionalProperties": False}).validate(arguments)
            seen += 1
    assert seen > len(chats)


def test_every_argument_is_in_the_question(chats: list[Sample]) -> None:
    """Otherwise the model would learn to make arguments up."""
    for sample in chats:
        for at, turn in enumerate(sample.turns):
            for _, arguments in parse_calls(turn.answer) or ():
                texts = [value for value in arguments.values() if isinstance(value, str | int | float)]
                said = turn.question.replace("_", " ")
                for value in texts:
                    assert isinstance(value, bool) or str(value).replace("_", " ") in said, (at, turn)


def test_every_kind_of_tool_is_called(chats: list[Sample]) -> None:
    descriptions = {functions_of(sample)[name].get("description") for sample in chats for name, _ in calls_of(sample)}
    assert all(descriptions.intersection(kind.about) for kind in KINDS)


def test_calls_results_and_plain_answers(chats: list[Sample]) -> None:
    turns = [turn for sample in chats for turn in sample.turns]
    amounts = [len(parse_calls(turn.answer) or ()) for turn in turns]
    asked = [turn for turn in turns if parse_results(turn.question) is None]
    plain = [turn for turn in asked if parse_calls(turn.answer) is None]
    assert 0.1 < amounts.count(2) / (len(turns) - amounts.count(0)) < 0.4
    assert amounts.count(3) > 0
    assert 0.1 < len(plain) / len(asked) < 0.4
    assert 0.2 < sum(turn.answer == DONT_KNOW for turn in plain) / len(plain) < 0.8
    for before, turn in itertools.chain.from_iterable(itertools.pairwise(sample.turns) for sample in chats):
        calls, results = parse_calls(before.answer) or [], parse_results(turn.question) or []
        assert len(calls) == len(results), "every call has a result, and no result comes without a call"
        if results:
            assert turn.answer == "\n".join(map(answer_to, results))


def test_names_are_held_out(chats: list[Sample]) -> None:
    assert not any(held_out(name) for sample in chats for name in functions_of(sample))
    rng = Random(2)
    for _ in range(30):
        assert all(map(held_out, functions_of(tool_question(rng, "tools: new names"))))


def test_the_exam_asks_what_its_rows_say() -> None:
    rng = Random(3)
    by_row = {row: [tool_question(rng, row) for _ in range(8)] for row in EXAM}
    calls = {row: [parse_calls(sample.turns[-1].answer) for sample in by_row[row]] for row in EXAM}
    assert {len(found or ()) for found in calls["tools: several calls"]} <= {2, 3}
    for row in ("tools: one call", "tools: new names", "tools: many tools", "tools: call again"):
        assert {len(found or ()) for found in calls[row]} == {1}, row
    assert all(found is None for row in ("tools: none fits", "tools: result") for found in calls[row])
    assert all(parse_results(sample.turns[-1].question) for sample in by_row["tools: result"])
    assert all(len(sample.tools) >= 10 for sample in by_row["tools: many tools"])


def test_the_same_chats_in_every_process() -> None:
    program = "from random import Random; from uma_trio.training.skills.tools import tool_chat; r = Random(4)\n"
    program += "print([tool_chat(r, 1, 9, longest=5) for _ in range(200)])"
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "77")
    }
    assert len(texts) == 1


def test_no_text_spells_a_control_token(chats: list[Sample]) -> None:
    for sample in chats:
        for message in messages_of(sample):
            assert not any(control in message["content"] for control in CONTROLS)
        assert not any(control in tool for control in CONTROLS for tool in sample.tools)


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ('{"temperature": 21, "sky": "clear"}', "The temperature is 21 and the sky is clear."),
        ('{"degrees_c": 21.5}', "The degrees c is 21.5."),
        ('{"error": "no such city"}', "The call failed: no such city."),
        ("[1, 2, 3]", "The results are 1, 2 and 3."),
        ('["x"]', "The result is x."),
        ("42", "The result is 42."),
        ("Sunny, 21 degrees.", "Sunny, 21 degrees."),
        ("{}", "There is no result."),
    ],
)
def test_the_sentence_about_a_result(result: str, answer: str) -> None:
    assert answer_to(result) == answer


def test_calls_and_results_round_trip() -> None:
    calls = [("add", {"a": 1, "b": 2.5}), ("say", {"text": "grüße\n</tool_call>", "loud": True})]
    assert parse_calls(calls_text(calls)) == calls
    assert parse_calls(calls_text(calls)[:-3]) is None
    assert parse_calls("<tool_call>\nnonsense\n</tool_call>") is None
    assert parse_calls("Hello") is None
    results = ["1", '{"a": "b"}']
    assert parse_results(results_text(results)) == results
    assert parse_results("Hello") is None
