"""Arguments between tags: which of them are strings, and that what is written is read again."""

from __future__ import annotations

import itertools
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.tool_formats import FORMATS, by_name, make_call_markers, write_calls
from uma_trio.daemon.text.regions import RegionAssembler
from uma_trio.daemon.text.tool_calls import ToolCalling
from uma_trio.grammar.argument_types import ANY_TYPE, MAX_SCHEMAS, SchemaTypes, property_schema, read_value
from uma_trio.protocol.chat import MAX_TOOL_DEPTH

TAGGED = [each.name for each in FORMATS if each.tags is not None]


def read(name: str, output: str, parameters: dict, sizes=(1 << 20,)) -> tuple[str, list]:
    """Text, and the arguments of the calls of the tool ``x``, which have streamed as well."""
    counter = itertools.count()
    markers = make_call_markers(by_name(name), MarkerText(lambda _: None))
    calling = ToolCalling(markers=markers, tools={"x": parameters}, make_id=lambda _: str(next(counter)))
    assembler = RegionAssembler([], None, calling, is_open=False)
    data, cuts, splits = output.encode(), itertools.cycle(sizes), []
    while data:
        size = next(cuts)
        splits.append(assembler.feed(1000, data[:size]))
        data = data[size:]
    splits.append(assembler.finish())
    streamed: dict[int, str] = {}
    for delta in itertools.chain.from_iterable(split.calls for split in splits):
        streamed[delta.call] = streamed.get(delta.call, "") + (delta.arguments or "")
    assert [json.loads(streamed[int(call.id or 0)]) for call in assembler.calls] == [
        call.arguments for call in assembler.calls
    ]
    return "".join(split.text for split in splits), [call.arguments for call in assembler.calls]


@all_cases(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, ANY_TYPE),
        ({"type": "string", "enum": ["a", None]}, {"string"}),
        ({"const": 1}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "array"]}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"string"}),
        ({"$ref": "#/$defs/itself"}, ANY_TYPE),
        ({"$ref": "#/$defs/nowhere"}, ANY_TYPE),
        ({"$ref": "elsewhere"}, ANY_TYPE),
        ({"$ref": 1}, ANY_TYPE),
        ({"$ref": "#/$defs/contains_itself"}, ANY_TYPE),
        ({"type": "nonsense"}, ANY_TYPE),
        ({"type": [1, {}]}, ANY_TYPE),
        ({"enum": 1, "anyOf": 2, "allOf": 3, "type": None}, ANY_TYPE),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
        (None, ANY_TYPE),
    ],
)
def test_types_of_a_schema(schema, types) -> None:
    root = {
        "$defs": {
            "a/b": {"type": "string"},
            "itself": {"$ref": "#/$defs/itself"},
            "contains_itself": {"anyOf": [{"$ref": "#/$defs/contains_itself"}, {"type": "string"}]},
        }
    }
    assert SchemaTypes(root).of(schema) == types


def test_schemas_that_contain_each_other_are_looked_at_once() -> None:
    names = [f"d{n}" for n in range(200)]
    several = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    assert SchemaTypes({"$defs": dict.fromkeys(names, several)}).of(several) == ANY_TYPE
    assert SchemaTypes({"$defs": {name: {**several} for name in names}}).of(several) == ANY_TYPE


def test_of_a_large_schema_only_a_part_is_looked_at() -> None:
    looked_at = []

    class Part(dict):
        def __contains__(self, key: object) -> bool:
            if key == "const":
                looked_at.append(self)
            return super().__contains__(key)

    types = SchemaTypes({})
    parts = [Part(type="string") for _ in range(3 * MAX_SCHEMAS)]
    assert [types.of(part) for part in parts] == [{"string"}] * MAX_SCHEMAS + [ANY_TYPE] * 2 * MAX_SCHEMAS
    assert len(looked_at) == MAX_SCHEMAS
    assert SchemaTypes({}).of({"$ref": "#" + "/a" * 10000}) == ANY_TYPE


@all_cases(("parameters", "schema"), [({}, True), ({"properties": 1}, True), ({"properties": {"a": 2}}, 2)])
def test_schema_of_an_argument(parameters, schema) -> None:
    assert property_schema(parameters, "a") == schema


@all_cases(
    ("text", "types", "value"),
    [
        ("1", {"string"}, "1"),
        (" a\n", {"string"}, " a\n"),
        ('"a"', {"string"}, '"a"'),
        ("1", {"integer"}, 1),
        (" 1 ", {"integer"}, 1),
        ("1.5", {"integer"}, 1.5),
        ("many", {"integer"}, "many"),
        ("", {"integer"}, ""),
        ("True", {"boolean"}, True),
        ("None", {"string", "null"}, None),
        ("null", {"string", "null"}, None),
        ("1", {"string", "null"}, "1"),
        ("true", {"string", "integer"}, "true"),
        ("1", {"string", "integer"}, 1),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ('{"a": [1]', {"object"}, '{"a": [1]'),
        ("1", ANY_TYPE, 1),
        ("a", ANY_TYPE, "a"),
        ('"a"', ANY_TYPE, '"a"'),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ('["\\ud800"]', {"array"}, '["\\ud800"]'),
        ("[" * 10000, {"array"}, "[" * 10000),
        ("[" * MAX_TOOL_DEPTH + "]" * MAX_TOOL_DEPTH, {"array"}, "[" * MAX_TOOL_DEPTH + "]" * MAX_TOOL_DEPTH),
    ],
)
def test_values(text, types, value) -> None:
    found = read_value(text, frozenset(types))
    assert found == value
    assert type(found) is type(value)
    msgspec.json.encode(found)


SCHEMAS = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "array": {"type": "array"},
    "object": {"type": "object"},
    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TEXTS = st.lists(
    st.sampled_from(
        [
            *("</parameter>", "<parameter=", "</function>", "</arg_value>", "<arg_key>", "</tool_call>", "</invoke>"),
            *("</｜DSML｜parameter>", "</seed:tool_call>", "null", "1", "a", "<", "{"),
            *("\n", " ", "é", '"', "\\", "\x00", "\x7f", "\U0001f600"),
        ]
    ),
    max_size=8,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS, lambda of: st.lists(of, max_size=3), max_leaves=5
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "string": TEXTS,
        "integer": st.integers(-(2**63), 2**64 - 1),
        "boolean": st.booleans(),
        "array": st.lists(JSON, max_size=3),
        "object": st.dictionaries(TEXTS, JSON, max_size=3),
        "perhaps": st.none() | st.text("ab \n1", min_size=1),
    },
)


def is_plain(name: str, value) -> bool:
    """Whether no text of a value is what ends a value in this format, with what follows there."""
    tags = by_name(name).tags
    assert tags is not None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    squeezed = "".join(text.split())
    ends = [tags.after_value + tag for tag in (tags.before_key, tags.end_call)]
    return not any("".join(end.split()) in squeezed for end in ends)


@given(st.sampled_from(TAGGED), st.lists(ARGUMENTS, min_size=1, max_size=3), st.lists(st.integers(1, 9), min_size=1))
def test_what_is_written_is_read_again(name: str, each: list[dict], sizes: list[int]) -> None:
    each = [{key: value for key, value in arguments.items() if is_plain(name, value)} for arguments in each]
    output = write_calls(by_name(name), [("x", arguments) for arguments in each])
    assert read(name, output, {"properties": SCHEMAS}, sizes) == ("", each)


@given(st.sampled_from(TAGGED), ARGUMENTS, st.data())
def test_a_damaged_call_is_text_or_a_call(name: str, arguments: dict, data) -> None:
    output = write_calls(by_name(name), [("x", arguments)])
    at = data.draw(st.integers(0, len(output)))
    damaged = output[:at] + data.draw(TEXTS) + output[at + data.draw(st.integers(0, 3)) :]
    text, found = read(name, damaged, {"properties": SCHEMAS})
    assert found or text == damaged
    assert (text, found) == read(name, damaged, {"properties": SCHEMAS}, [1])


@all_cases("name", TAGGED)
def test_strings_stream_and_other_values_come_whole(name: str) -> None:
    output = write_calls(by_name(name), [("x", {"string": 'a"b\n', "integer": 12})])
    calling = ToolCalling(
        markers=make_call_markers(by_name(name), MarkerText(lambda _: None)),
        tools={"x": {"properties": SCHEMAS}},
        make_id=lambda _: "c",
    )
    assembler = RegionAssembler([], None, calling, is_open=False)
    parts = [assembler.feed(1000, c.encode()).calls for c in output]
    assert [delta.arguments for deltas in parts for delta in deltas if delta.arguments is not None] == [
        *("{", '"string":"', "a", '\\"', "b", "\\n", '"', ',"integer":', "12}"),
    ]
    assert [call.arguments for call in assembler.calls] == [{"string": 'a"b\n', "integer": 12}]


@all_cases(
    "output",
    [
        "<tool_call>\n<function=x>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=x>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n<function=x>\n<parameter={'a' * 257}>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=x>\nhello</function>\n</tool_call>",
        "<tool_call>\n<function=x",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=x y>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>',
        "<tool_call>\n</tool_call>",
        "a <function=y> b",
    ],
)
def test_what_is_no_call_is_all_delivered(output: str) -> None:
    for size in (1, 2, 3, 1000):
        assert read("qwen3-coder", output, {}, [size]) == (output, [])
