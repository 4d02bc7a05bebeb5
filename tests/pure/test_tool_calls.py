"""Calls of tools in every format: the same however the output is cut into tokens, and nothing is lost."""

from __future__ import annotations

import itertools
import json
import re

from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from tests.support.profile import amount
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.reasoning import FORMATS as REASONING_FORMATS
from uma_trio.daemon.prompts.reasoning import make_markers
from uma_trio.daemon.prompts.tool_formats import FORMATS, by_name, find_tool_format, make_call_markers
from uma_trio.daemon.text.regions import RegionAssembler
from uma_trio.daemon.text.tool_calls import ToolCalling

CONTROL = re.compile(r"｜DSML｜|<\|[a-z_]+\|>|<｜[^｜]+｜>|\[[A-Z_]+\]|<\|\"\|>|<\|[a-z_]+>|<[a-z_]+\|>")
"""What is a control token in these tests, except where none is."""

TOOLS = {
    "weather": {"properties": {"city": {"type": "string"}}},
    "add.numbers-2": {"properties": {"b": {"type": "string"}, "ok": {"type": "boolean"}}},
    "none": {},
}


class Ids(dict[str, int]):
    """Gives every text that looks like a control token an id."""

    def __call__(self, text: str) -> int | None:
        return self.setdefault(text, len(self) + 1) if CONTROL.fullmatch(text) else None


def tokens_of(text: str, ids: Ids | None, sizes=()) -> list[tuple[int, bytes]]:
    """Tokens of an output: control tokens, and bytes in pieces of ``sizes``."""
    found: list[tuple[int, bytes]] = []
    cuts = itertools.chain(sizes, itertools.repeat(1 << 20))
    parts = [text] if ids is None else re.split(f"({CONTROL.pattern})", text)
    for part in filter(None, parts):
        if ids is not None and (token := ids(part)) is not None:
            found.append((token, b""))
            continue
        data = part.encode()
        while data:
            size = next(cuts)
            found.append((1000, data[:size]))
            data = data[size:]
    return found


def assembler(name: str, *, controls: bool = True, reasoning: bool = False, stop=(), parallel=True, is_open=False):
    ids = Ids()
    text = MarkerText(ids if controls else lambda _: None)
    counter = itertools.count()
    calling = ToolCalling(
        markers=make_call_markers(by_name(name), text),
        tools=TOOLS,
        parallel=parallel,
        make_id=lambda _: f"c{next(counter)}",
    )
    markers = None
    if reasoning:
        begin = "<|channel|>analysis<|message|>" if name == "gpt-oss" else "<think>"
        markers = make_markers(next(each for each in REASONING_FORMATS if begin in each.begin), text)
    return RegionAssembler(stop, markers, calling, is_open=is_open), ids if controls else None


def read(output: str, name: str, sizes=(), **options):
    """Text, reasoning, calls as they streamed, and the complete ones."""
    found, ids = assembler(name, **options)
    splits = [found.feed(*token) for token in tokens_of(output, ids, sizes)]
    splits.append(found.finish())
    streamed: dict[int, list[str]] = {}
    for delta in itertools.chain.from_iterable(split.calls for split in splits):
        if delta.name is not None:
            assert delta.call not in streamed, "the name comes first, and once"
            assert delta.arguments is None
            streamed[delta.call] = [delta.call_id, delta.name, ""]
        else:
            streamed[delta.call][2] += delta.arguments
    return (
        "".join(split.text for split in splits),
        "".join(split.reasoning for split in splits),
        streamed,
        found.calls,
    )


def calls(output: str, name: str, sizes=(), **options):
    """Text, and the complete calls, which have streamed as well."""
    text, _, streamed, complete = read(output, name, sizes, **options)
    by_id = {call_id: (tool, arguments) for call_id, tool, arguments in streamed.values()}
    for call in complete:
        tool, arguments = by_id[call.id]
        assert (tool, json.loads(arguments)) == (call.name, call.arguments)
    return text, [(call.name, call.arguments) for call in complete]


ONE = ("weather", {"city": "Lima"})
TWO = ("add.numbers-2", {"a": [1, -2.5e3, {"b": None}], "b": 'say "é}{]["\n', "ok": True})

OUTPUTS = {
    "hermes": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>', "", [ONE]),
        (
            'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>\n<tool_call>\n'
            '{"name": "add.numbers-2", "arguments": {"a": [1, -2.5e3, {"b": null}], "b": "say \\"é}{][\\"\\n", "ok": true}}'
            "\n</tool_call>\n",
            "Let me see.",
            [ONE, TWO],
        ),
        ('<tool_call>{"arguments": {"city": "Lima"}, "name": "weather"}</tool_call> Done', "Done", [ONE]),
        ('<tool_call>[{"name":"weather","arguments":{"city":"Lima"}}]</tool_call>', "", [ONE]),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Lima\\"}"}</tool_call>', "", [ONE]),
        ('<tool_call>{"type": "function", "name": "none"}</tool_call>', "", [("none", {})]),
        ('<tool_call>{"name": "none", "arguments": null}</tool_call>', "", [("none", {})]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}', "", [("weather", {"city": "</tool_call>"})]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Lima"}} and so on', "and so on", [ONE]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Lima"}}, {"name": "none", "arguments": {}, "id": "x"}]',
            "",
            [ONE, ("none", {})],
        ),
        ('Well.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lima"}}]\n', "Well.", [ONE]),
    ],
    "mistral-args": [
        ('[TOOL_CALLS]weather[ARGS]{"city": "Lima"}[TOOL_CALLS]none[CALL_ID]abc[ARGS]{}', "", [ONE, ("none", {})]),
        ('Hm [TOOL_CALLS]weather{"city": "Lima"}', "Hm", [ONE]),
    ],
    "deepseek-json": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"city": "Lima"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>none\n```json\n{}\n'
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [ONE, ("none", {})],
        )
    ],
    "deepseek": [
        (
            'So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Lima"}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>none<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So:",
            [ONE, ("none", {})],
        )
    ],
    "gpt-oss": [
        ('<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Lima"}', "", [ONE]),
        (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Lima"}<|call|>', "", [ONE]),
    ],
    "gemma": [
        ('<|tool_call>call:weather{city:<|"|>Lima<|"|>}<tool_call|>', "", [ONE]),
        (
            'I see.<|tool_call>call:add.numbers-2{a:[1,-2.5e3,{<|"|>b<|"|>:null}],b:<|"|>say "é}{]["\n<|"|>,ok:true}'
            "<tool_call|><|tool_call>call:none{}<tool_call|>",
            "I see.",
            [TWO, ("none", {})],
        ),
    ],
    "qwen3-coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nLima\n</parameter>\n</function>\n</tool_call>",
            "",
            [ONE],
        ),
        (
            "Let me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nLima\n</parameter>\n</function>\n</tool_call>"
            '\n<tool_call>\n<function=add.numbers-2>\n<parameter=a>\n[1, -2.5e3, {"b": null}]\n</parameter>\n'
            '<parameter=b>\nsay "é}{]["\n\n</parameter>\n<parameter=ok>\nTrue\n</parameter>\n</function>\n</tool_call>\n',
            "Let me see.",
            [ONE, TWO],
        ),
        ("<function=none></function></tool_call> Done", "Done", [("none", {})]),
        ("<function=none> </function>\nDone", "Done", [("none", {})]),
        (
            "<tool_call><function=weather><parameter=city>a</parameter> </function</parameter>\n</function>",
            "",
            [("weather", {"city": "a</parameter> </function"})],
        ),
    ],
    "seed-oss": [
        (
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Lima</parameter>\n</function>\n</seed:tool_call>\n"
            "<seed:tool_call>\n<function=none>\n</function>\n</seed:tool_call>",
            "",
            [ONE, ("none", {})],
        ),
    ],
    "glm": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Lima</arg_value>\n</tool_call>",
            "",
            [ONE],
        ),
        (
            "So:\n<tool_call>weather<arg_key>city</arg_key><arg_value>Lima</arg_value></tool_call>"
            '<tool_call>add.numbers-2<arg_key>a</arg_key><arg_value>[1,-2500.0,{"b":null}]</arg_value>'
            '<arg_key>b</arg_key><arg_value>say "é}{]["\n</arg_value><arg_key>ok</arg_key><arg_value>true</arg_value>'
            "</tool_call><tool_call>none\n\n</tool_call> Done",
            "So:\nDone",
            [ONE, TWO, ("none", {})],
        ),
    ],
    "kimi": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Lima"}<|tool_call_end|><|tool_call_begin|>functions.none:1<|tool_call_argument_begin|>{}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            "",
            [ONE, ("none", {})],
        ),
        (
            'Well <|tool_call_begin|>weather:12<|tool_call_argument_begin|>{"city": "Lima"}<|tool_call_end|>'
            "<|tool_call_begin|>none<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "Well",
            [ONE, ("none", {})],
        ),
    ],
    "minimax": [
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Lima</parameter>\n</invoke>\n'
            '<invoke name="none">\n</invoke>\n</minimax:tool_call>',
            "",
            [ONE, ("none", {})],
        ),
    ],
    "deepseek-v3.2": [
        (
            'So:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
            '<｜DSML｜parameter name="city" string="true">Lima</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="add.numbers-2">\n'
            '<｜DSML｜parameter name="a" string="false">[1, -2.5e3, {"b": null}]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="b" string="true">say "é}{]["\n</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="ok" string="false">true</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            "So:",
            [ONE, TWO],
        ),
    ],
    "deepseek-v4": [
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
            '<｜DSML｜parameter name="city" string="true">Lima</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="none">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
            "",
            [ONE, ("none", {})],
        ),
    ],
    "llama3": [
        ('{"name": "weather", "parameters": {"city": "Lima"}}', "", [ONE]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Lima"}}', "", [ONE]),
        ('\n{"name": "weather", "parameters": {"city": "Lima"}}; {"name": "none", "parameters": {}}', "", [ONE, ("none", {})]),
    ],
}  # fmt: skip

CASES = [(name, *case) for name, cases in OUTPUTS.items() for case in cases]


def test_every_format_has_cases() -> None:
    assert set(OUTPUTS) == {each.name for each in FORMATS}


@all_cases(("name", "output", "text", "expected"), CASES)
def test_calls_are_read_at_every_split(name, output, text, expected) -> None:
    for size in range(1, 9):
        assert calls(output, name, itertools.repeat(size)) == (text, expected), size
    for first in range(1, len(output.encode()), amount(quick=5, thorough=1)):
        assert calls(output, name, [first]) == (text, expected), first


@all_cases(("name", "output", "text", "expected"), CASES)
def test_markers_may_be_text(name, output, text, expected) -> None:
    said, found = calls(output, name, itertools.repeat(3), controls=False)
    assert found == expected
    assert said.startswith(text)


@all_cases(("name", "output", "text", "expected"), CASES)
def test_a_cut_call_is_text(name, output, text, expected) -> None:
    """At every cut, each character is in the text, or part of a complete call, or of a marker."""
    for cut in range(0, len(output), amount(quick=3, thorough=1)):
        said, found = calls(output[:cut], name, controls=False)
        assert found == expected[: len(found)]
        if not found:
            expect = output[:cut]
            for marker in by_name(name).dropped:
                expect = expect.replace(marker, "")
            assert said == expect


@all_cases("name", OUTPUTS)
def test_a_tool_that_nobody_offered_is_text(name) -> None:
    output = OUTPUTS[name][0][0].replace("weather", "whether")
    said, found = calls(output, name, itertools.repeat(2), controls=False)
    assert ("weather", {"city": "Lima"}) not in found
    assert "whether" in said
    assert "Lima" in said


@all_cases(
    "output",
    [
        '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "name": "none", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {}, "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {}, "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": ' + "9" * 50 + "}}</tool_call>",
        '<tool_call>{"name": "weather", "arguments": ' + '{"a": ' * 60 + "1" + "}" * 60 + "}</tool_call>",
        '<tool_call>{"city": "Lima"}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call> hello </tool_call>",
        "<tool_call>",
        " \n<tool_call>\n ",
        "a <tool_cal> b",
        '{"name": "weather", "arguments": {}}',
    ],
)
def test_what_is_no_call_is_all_delivered(output) -> None:
    for size in (1, 2, 3, 5, 1000):
        assert calls(output, "hermes", itertools.repeat(size)) == (output, [])


def test_a_call_after_one_that_failed() -> None:
    output = '<tool_call>{"name": "x"}</tool_call>\n<tool_call>{"name": "none"}</tool_call>'
    for size in (1, 3, 1000):
        text, found = calls(output, "hermes", itertools.repeat(size))
        assert found == [("none", {})]
        assert text == '<tool_call>{"name": "x"}</tool_call>'


def test_calls_are_numbered_and_a_number_is_not_used_again() -> None:
    cut = '<tool_call>{"name": "weather", "arguments": {"a": ?}}</tool_call>'
    whole = '<tool_call>{"name": "none", "arguments": {}}</tool_call>'
    _, _, streamed, complete = read(whole + cut + whole, "hermes", itertools.repeat(4))
    assert {number: name for number, (_, name, _) in streamed.items()} == {0: "none", 1: "weather", 2: "none"}
    assert [call.id for call in complete] == ["c0", "c2"]


def test_arguments_stream_as_they_come() -> None:
    found, _ = assembler("hermes")
    deltas = []
    for part in [
        "<tool_call>",
        '{"name": "weather',
        '", "argu',
        'ments": {"city"',
        ': "Li',
        'ma"}',
        "}",
        "</tool_call>",
    ]:
        deltas.append([delta[2:] for delta in found.feed(1000, part.encode()).calls])
    assert deltas == [
        [],
        [],
        [("weather", None)],
        [(None, '{"city"')],
        [(None, ': "Li')],
        [(None, 'ma"}')],
        [],
        [],
    ]


def test_reasoning_is_not_searched_for_calls() -> None:
    call = '<tool_call>{"name": "none"}</tool_call>'
    for size in (1, 2, 7, 1000):
        text, reasoning, _, complete = read(
            f"<think>I could {call}</think>\n\n{call}", "hermes", itertools.repeat(size), reasoning=True
        )
        assert (text, reasoning, len(complete)) == ("", f"I could {call}", 1)
        text, reasoning, _, complete = read(call, "hermes", itertools.repeat(size), reasoning=True, is_open=True)
        assert (text, reasoning, len(complete)) == ("", call, 0)


def test_channels_of_gpt_oss() -> None:
    output = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Lima"}'
    )
    for size in (1, 2, 7, 1000):
        text, reasoning, _, complete = read(output, "gpt-oss", itertools.repeat(size), reasoning=True)
        assert (text, reasoning) == ("I look.", "Need it.")
        assert [(call.name, call.arguments) for call in complete] == [ONE]


def test_a_bare_call_after_reasoning() -> None:
    output = '<think>So</think>\n{"name": "weather", "parameters": {"city": "Lima"}}'
    for size in (1, 2, 7, 1000):
        text, reasoning, _, complete = read(output, "llama3", itertools.repeat(size), reasoning=True)
        assert (text, reasoning, len(complete)) == ("", "So", 1)


@all_cases("output", ['{"city": "Lima"}', '{"name": "Ann"}', " { }", "{", 'So {"name": "none"}'])
def test_json_that_is_no_call_is_an_answer(output) -> None:
    for size in (1, 2, 1000):
        assert calls(output, "llama3", itertools.repeat(size)) == (output, [])


def test_stop_strings_count_outside_of_calls() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "END"}}</tool_call>'
    for size in (1, 2, 7, 1000):
        assert calls(f"a {call} b END c", "hermes", itertools.repeat(size), stop=["END"]) == (
            "a b ",
            [("weather", {"city": "END"})],
        )


@all_cases("name", OUTPUTS)
def test_an_answer_may_end_after_its_first_call(name) -> None:
    output = OUTPUTS[name][0][0]
    found, ids = assembler(name, parallel=False)
    for token in tokens_of(output + output, ids, itertools.repeat(1)):
        found.feed(*token)
        if found.has_ended:
            break
    assert len(found.calls) == 1
    assert found.finish() == ("", "", ())


def test_the_output_up_to_a_stop_string() -> None:
    call = '<tool_call>{"name": "none"}</tool_call>'
    for size in (1, 2, 7, 1000):
        for before in (call, f"a {call}\n", '<tool_call>{"name": "x"}', '<tool_call>{"name": "none"}, hm '):
            found, ids = assembler("hermes", stop=["STOP"])
            for token in tokens_of(f"{before}text STOP more", ids, itertools.repeat(size)):
                found.feed(*token)
            assert found.output("") == before + "text "


PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "weather", "arguments": {"city": "Lima"}}', '{"name": "', '"}', "{}", "[", "]",
    ", ", "\n", "hello", "<think>", "</think>", "é", '"', "END", "none", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<|tool_call>call:", "weather{", "<function=", "weather", ">", "<parameter=city>", "</parameter>", "</function>",
    "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="', '<parameter name="city">',
    '">', "</invoke>", "</minimax:tool_call>", "<|tool_call_begin|>", "functions.weather:0", "<|tool_call_argument_begin|>", '<|"|>', "<tool_call|>", "<|channel|>commentary to=functions.", "<|message|>",
]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.sampled_from(sorted(OUTPUTS)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@example('<tool_call>{"name": "weather", "arguments": {"city": "Lima"}}, hello', [1] * 40, "hermes", False, False, True)
def test_streamed_is_the_same_as_whole(output, sizes, name, controls, reasoning, stops) -> None:
    options = {"controls": controls, "reasoning": reasoning, "stop": ["END"] if stops else []}
    assert read(output, name, sizes, **options) == read(output, name, **options)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.sampled_from(sorted(OUTPUTS)))
def test_nothing_is_lost(output, name) -> None:
    """Without a complete call, everything but spaces and dropped markers is text."""
    text, found = calls(output, name, controls=False)
    if not found:
        for marker in by_name(name).dropped:
            output = output.replace(marker, "")
        assert text == output


# -- which format a model has ------------------------------------------------------------------------


@all_cases(
    ("template", "name"),
    [
        ("For each call return <tool_call>{...}</tool_call>", "hermes"),
        ("<tool_call><function=x></function></tool_call>", None),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("<tool_call><function=x><parameter=y></parameter></function></tool_call>", "qwen3-coder"),
        ("{{ '<seed:tool_call><function=' + x + '><parameter=' }}", "seed-oss"),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>", "glm"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi"),
        ('<minimax:tool_call><invoke name="{{ name }}"><parameter name="{{ key }}">', "minimax"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral-args"),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        ("nothing", None),
    ],
)
def test_the_template_says_which_format_it_is(template, name) -> None:
    found = find_tool_format(template)
    assert (None if found is None else found.name) == name
