"""Grammars of calls: each format's own writing follows its grammar, after reasoning too, and nothing else does."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.pure.test_tool_calls import CONTROL
from tests.support.profile import sampled
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.reasoning import FORMATS as REASONING
from uma_trio.daemon.prompts.reasoning import make_markers
from uma_trio.daemon.prompts.tool_formats import FORMATS, by_name, make_call_markers, write_calls
from uma_trio.daemon.text.regions import RegionAssembler
from uma_trio.daemon.text.tool_calls import ToolCalling
from uma_trio.errors import InvalidConstraint
from uma_trio.grammar.calls import AnswerShape
from uma_trio.grammar.checker import LocalChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.grammar.terms import json_expression
from uma_trio.grammar.vocabulary import Vocabulary, start_matcher
from uma_trio.protocol.chat import Tool
from uma_trio.protocol.requests import Constraint

WEATHER = Tool(
    name="weather",
    parameters={
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOTHING = Tool(name="nothing", parameters={"properties": {}})

TEXTS = [
    *(text for each in FORMATS for text in (*each.begin, *each.end, *each.dropped, *each.written, *each.around)),
    *(text for each in REASONING for text in (*each.begin, *each.end, *each.dropped)),
    '<|"|>',
]
CONTROLS = sorted({found for text in TEXTS for found in CONTROL.findall(text)} - {"<response>", "</response>"})
CONTROLS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜"]
IDS = {text: 256 + n for n, text in enumerate(CONTROLS)}
END = 256 + len(CONTROLS)


def tokens_of(text: str) -> list[int]:
    """Bytes, and control tokens."""
    parts = filter(None, re.split("(" + "|".join(map(re.escape, CONTROLS)) + ")", text))
    return [token for part in parts for token in ([IDS[part]] if part in IDS else part.encode())]


@cache
def vocabulary() -> Vocabulary:
    tokens = [*(bytes([n]) for n in range(256)), *(text.encode() for text in CONTROLS), b"<end>"]
    return Vocabulary(tokens, range(256, END + 1), [END], None, lambda text: list(text.encode()))


@cache
def tokenizer():
    return vocabulary().tokenizer()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary, LocalChecker(vocabulary))


def shape_of(name: str | None, **fields) -> AnswerShape:
    text = MarkerText(IDS.get)
    markers = None if name is None else make_call_markers(by_name(name), text)
    if "reasoning" in fields:
        fields["reasoning"] = make_markers(next(each for each in REASONING if fields["reasoning"] in each.begin), text)
    tools = () if name is None else (WEATHER, NOTHING)
    return AnswerShape(markers=markers, **{"tools": tools, **fields})


def follows(shape: AnswerShape, output: str) -> bool:
    """Whether the output is one of the grammar, from beginning to end."""
    grammar = compiler().compile(shape)
    matcher = start_matcher(tokenizer(), grammar.source)
    tokens = tokens_of(output)
    n = matcher.try_consume_tokens(tokens)
    assert not matcher.is_error(), matcher.get_error()
    return n == len(tokens) and matcher.is_accepting()


def written(name: str, *calls: tuple[str, dict]) -> str:
    found = by_name(name)
    if found.quote is None:
        return write_calls(found, calls)
    before, between, after = found.written

    def arguments(values: dict) -> str:
        q = found.quote
        return "{" + ",".join(f"{k}:{q + v + q if isinstance(v, str) else v}" for k, v in values.items()) + "}"

    each = [before + tool + between + arguments(values) + after for tool, values in calls]
    return found.around[0] + (found.separator or "").join(each) + found.around[1]


ONE = ("weather", {"city": "Lima é", "days": 2})
TWO = ("nothing", {})


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_a_format_writes_what_its_grammar_allows_and_its_reader_reads(name: str) -> None:
    shape = shape_of(name)
    calls = [ONE] if by_name(name).separator is None else [ONE, TWO, ONE]
    output = written(name, *calls)
    assert follows(shape, output)
    assert not follows(shape, output[:-1] + "x")
    assert not follows(shape, "Hello")
    assert not follows(shape, "")
    assert not follows(shape, written(name, ("another", {})))
    assert follows(shape_of(name, parallel=False), written(name, ONE))
    assert not follows(shape_of(name, parallel=False), written(name, ONE, TWO))
    if name != "gemma":
        assert not follows(shape, written(name, ("weather", {"days": 1})))
        tags = by_name(name).tags
        is_raw = tags is not None and tags.before_json is None  # whatever stands there is a string
        assert follows(shape, written(name, ("weather", {"city": 1}))) == is_raw
        assert not follows(shape, written(name, ("weather", {"city": "Lima", "days": "many"})))
    assert not follows(shape, written(name, ("weather", {"city": "Lima", "more": 1})))
    assert not follows(shape, written(name, ("nothing", {"more": 1}))) or name == "gemma"
    assert calls_of(shape, output) == calls


def calls_of(shape: AnswerShape, output: str) -> list[tuple[str, dict]]:
    """What the reader finds in an output that has nothing but calls."""
    assert shape.markers is not None
    tools = {tool.name: tool.parameters for tool in shape.tools}
    calling = ToolCalling(markers=shape.markers, tools=tools, make_id=lambda _: "x")
    assembler = RegionAssembler([], None, calling, is_open=False)
    text = "".join(assembler.feed(token, bytes([token]) if token < 256 else b"").text for token in tokens_of(output))
    assert text + assembler.finish().text == ""
    return [(call.name, call.arguments) for call in assembler.calls]


TAGGED = [each.name for each in FORMATS if each.tags is not None]


@pytest.mark.parametrize("name", sampled(TAGGED, 3))
@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "string"}, ["", "a", "1", "null", "a\nb\n", "é < {}", "x</tool"], []),
        ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd"]),
        ({"enum": ["a", "ab"]}, ["a", "ab"], ["", "b", "abc"]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"type": "integer", "minimum": 1}, [1, 23], [0, "a", ""]),
        ({"type": "boolean"}, [True], ["True", 1]),
        ({"type": ["string", "null"]}, ["a", None, "1"], []),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [7, None], ["a"]),
        ({"$ref": "#/$defs/colour"}, ["red"], ["green"]),
        ({"type": "array", "items": {"$ref": "#/$defs/colour"}}, [["red"], []], [["green"], "red"]),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, [{"a": 'b"'}], [{}, "a"]),
        (True, ["a", "b c"], []),
    ],
    ids=str,
)
def test_values_between_tags_follow_their_schema(name: str, schema, yes: list, no: list) -> None:
    tool = Tool(
        name="x",
        parameters={
            "properties": {"first": {"type": "integer"}, "key": schema, "last": {"type": "string"}},
            "required": ["key"],
            "$defs": {"colour": {"enum": ["red", "blue"]}},
        },
    )
    shape = shape_of(name, tools=[tool])
    for value in yes:
        for arguments in ({"key": value}, {"first": 1, "key": value}, {"key": value, "last": "b"}):
            output = written(name, ("x", arguments))
            assert follows(shape, output)
            assert follows(shape, output.replace(">\n<", "><")), "line breaks between tags may be left out"
            assert calls_of(shape, output) == [("x", arguments)]
    for value in no:
        assert not follows(shape, written(name, ("x", {"key": value})))
    assert not follows(shape, written(name, ("x", {"first": 1})))


@pytest.mark.parametrize("name", TAGGED)
def test_a_tool_without_a_schema_takes_any_argument(name: str) -> None:
    shape = shape_of(name, tools=[Tool(name="x")])
    for arguments in ({}, {"a": "b"}, {"a": 1, "b": [None]}):
        output = written(name, ("x", arguments))
        assert follows(shape, output)
        assert calls_of(shape, output) == [("x", arguments)]


def test_definitions_are_not_repeated_for_ever(monkeypatch) -> None:
    """Each value that is no string brings the definitions of the schema with it."""
    n_written = 0

    def counted(schema: dict) -> str:
        nonlocal n_written
        n_written += 1
        return json_expression(schema)

    monkeypatch.setattr("uma_trio.grammar.tagged_arguments.json_expression", counted)
    parameters = {
        "properties": {f"k{n}": {"$ref": "#/$defs/a"} for n in range(2000)},
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"enum": ["x" * 50000]}},
    }
    plain = {"properties": {"a": {"type": "integer"}}, "$defs": parameters["$defs"]}
    compiler().compile(shape_of("glm", tools=[Tool(name=f"t{n}", parameters=plain) for n in range(3)]))
    with pytest.raises(InvalidConstraint, match="too much for a grammar"):
        compiler().compile(shape_of("glm", tools=[Tool(name="x", parameters=parameters)] * 100))
    assert n_written < 100


def test_calls_with_numbers() -> None:
    shape = shape_of("kimi")
    output = written("kimi", TWO, TWO)
    assert "functions.nothing:1<" in output
    assert follows(shape, output)
    assert follows(shape, output.replace(":1<", ":23<"))
    assert not follows(shape, output.replace(":1<", "<"))


@pytest.mark.parametrize("found", sampled(REASONING, 3), ids=lambda each: each.begin[0])
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", None])
def test_reasoning_comes_first(found, name: str | None) -> None:
    text = Constraint(choice=["yes", "no"])
    fields = {"reasoning": found.begin[0], "text": text}
    answer = "yes" if name is None else written(name, ONE)
    dropped = found.dropped[0] if found.dropped else ""
    for end in ("", "\n\n", dropped):
        thought = f"Well, 1 < 2 {{}} é.\n{found.end[0]}{end}"
        shape = shape_of(name, **fields)
        assert follows(shape, found.begin[0] + thought + answer)
        assert follows(shape, answer)
        assert follows(shape, "yes"), "the model may answer at once"
        assert not follows(shape, found.begin[0] + "Well" + answer)
        assert not follows(shape, found.begin[0] + thought + "perhaps")
        opened = shape_of(name, is_open=True, **fields)
        assert follows(opened, thought + answer)
        assert not follows(opened, answer)


def test_a_text_or_a_call() -> None:
    shape = shape_of(
        "hermes", text=Constraint(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    )
    assert follows(shape, '{"a": 1}')
    assert follows(shape, written("hermes", ONE))
    assert not follows(shape, "Hello")
    required = shape_of("hermes", text=None)
    assert not follows(required, '{"a": 1}')
