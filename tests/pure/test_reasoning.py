"""Reasoning and answer are separated, however the output is cut into tokens, and no text is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.reasoning import FORMATS, ReasoningFormat, find_format, make_markers
from uma_trio.daemon.text.assembler import TextAssembler
from uma_trio.daemon.text.regions import RegionAssembler
from uma_trio.models.markers import ReasoningMarkers

THINK = ReasoningMarkers(begin=("<think>",), end=("</think>",), opened_by=("<think>",))


def split(text: str, sizes: list[int], markers: ReasoningMarkers = THINK, **options) -> tuple[str, str, str | None]:
    """Reasoning, answer and stop string of a text that comes in parts of ``sizes`` bytes."""
    data = text.encode()
    parts, at = [], 0
    for size in [*sizes, len(data)]:
        parts.append(data[at : at + size])
        at += size
    return fed([(-1, part) for part in parts], markers, **options)


def fed(tokens, markers=THINK, *, stop=(), is_open=False):
    assembler = RegionAssembler(stop, markers, is_open=is_open)
    found = [assembler.feed(*token) for token in tokens]
    found.append(assembler.finish())
    return "".join(each.reasoning for each in found), "".join(each.text for each in found), assembler.matched


SIZES = st.lists(st.integers(1, 7), max_size=60)


@given(SIZES)
def test_reasoning_in_front_of_the_answer(sizes: list[int]) -> None:
    assert split("\n<think>\nHé <b>, 1<2 </thin \n</think>\n\nSo: <think> x\n", sizes) == (
        "Hé <b>, 1<2 </thin",
        "So: <think> x\n",
        None,
    )


@given(SIZES)
def test_a_prompt_may_open_the_reasoning(sizes: list[int]) -> None:
    assert split("a b</think>c", sizes, is_open=True) == ("a b", "c", None)
    assert split("a b ", sizes, is_open=True) == ("a b ", "", None)


@all_cases(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think> hello", False),
        ("", False),
    ],
)
def test_which_prompts_open_it(prompt: str, opened: bool) -> None:
    assert THINK.is_opened_by(prompt) is opened


@given(SIZES)
@example([1] * 60)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "<",
        "<thi",
        " <thinking> a",
        "Well, <think>a</think>",
        "</think>a",
        "<thin</think>",
        "a\n",
        "<think",
        "\n\n",
    ],
)
def test_text_without_reasoning_is_all_delivered(text: str, sizes: list[int]) -> None:
    assert split(text, sizes) == ("", text, None)


@given(SIZES)
@pytest.mark.parametrize(
    ("text", "reasoning"), [("<think>", ""), ("<think>a</thi", "a</thi"), ("<think>\n a \n", "a \n")]
)
def test_reasoning_that_is_cut_off_stays_reasoning(text: str, reasoning: str, sizes: list[int]) -> None:
    assert split(text, sizes) == (reasoning, "", None)


@given(st.text("<think>/ a\n", max_size=40), SIZES, st.booleans())
def test_nothing_but_markers_and_spaces_is_lost(text: str, sizes: list[int], is_open: bool) -> None:
    whole = split(text, [], is_open=is_open)
    assert split(text, sizes, is_open=is_open) == whole
    reasoning, answer, _ = whole
    bare = re.sub(r"\s", "", reasoning + answer)
    assert bare == re.sub(r"\s", "", without_markers(text, is_open=is_open))


def without_markers(text: str, *, is_open: bool) -> str:
    begun = text.lstrip()
    if not is_open:
        if not begun.startswith("<think>"):
            return text
        text = begun.removeprefix("<think>")
    before, _, after = text.partition("</think>")
    return before + after


@given(SIZES)
def test_stop_strings_count_in_the_answer_only(sizes: list[int]) -> None:
    assert split("<think>a END b</think> c END d", sizes, stop=["END"]) == ("a END b", "c ", "END")
    assert split("a END", sizes, stop=["END"]) == ("", "a ", "END")


@given(st.text("<think>/ aE", max_size=30), SIZES, st.lists(st.text("Ea<", min_size=1, max_size=3), max_size=2))
def test_without_markers_it_is_a_text_assembler(text: str, sizes: list[int], stop: list[str]) -> None:
    assembler = TextAssembler(stop)
    expected = (assembler.feed(0, text.encode()) + assembler.finish()).text
    assert split(text, sizes, ReasoningMarkers(begin=("B",), end=("E",)), stop=stop) == (
        "",
        expected,
        assembler.matched,
    )


@given(SIZES, st.sampled_from(["", "é", "<think>a b</think>", "<think>a</think>\n"]))
def test_the_output_up_to_a_stop_string(sizes: list[int], before: str) -> None:
    assembler = RegionAssembler(["STOP"], THINK, is_open=False)
    data = (before + "text STOP more").encode()
    for size in [*sizes, len(data)]:
        assembler.feed(-1, data[:size])
        data = data[size:]
    assembler.finish()
    assert assembler.output("") == before + "text "


def test_tokens_of_reasoning_are_counted() -> None:
    assembler = RegionAssembler([], THINK, is_open=False)
    for part in ["<think>", "a", " b", "</think>", "\n", "c"]:
        assembler.feed(-1, part.encode())
    assert assembler.n_reasoning_tokens == 4


# -- control tokens ----------------------------------------------------------------------------------

HARMONY = make_markers(
    next(each for each in FORMATS if "<|channel|>analysis" in each.signs),
    MarkerText({"<|channel|>": 1, "<|message|>": 2, "<|end|>": 3, "<|start|>": 4, "<|return|>": 5}.get),
)


def harmony(text: str) -> list[tuple[int, bytes]]:
    """Tokens of a text; a control token is written as ``<|name|>`` and has no bytes."""
    ids = {"<|channel|>": 1, "<|message|>": 2, "<|end|>": 3, "<|start|>": 4, "<|return|>": 5}
    parts = re.split(r"(<\|\w+\|>)", text)
    return [(ids[part], b"") if part in ids else (100, part.encode()) for part in parts if part]


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>First, <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>then.<|end|><|start|>assistant<|channel|>final<|message|>So."
    )
    assert fed(harmony(text), HARMONY) == ("First,then.", "I look.So.", None)
    assert fed(harmony("<|channel|>final<|message|>So."), HARMONY) == ("", "So.", None)
    assert fed(harmony("<|channel|>analysis<|message|>First<|channel|>final<|message|>So."), HARMONY) == (
        "First",
        "So.",
        None,
    )


def test_text_that_spells_a_control_token_is_no_marker() -> None:
    spelled = [(100, b"<|channel|>analysis<|message|>a"), (100, b"<|end|>b")]
    assert fed(spelled, HARMONY) == ("", "<|channel|>analysis<|message|>a<|end|>b", None)
    tokens = [*harmony("<|channel|>analysis<|message|>"), (100, b"a <|end|> b"), (3, b""), (100, b"c")]
    assert fed(tokens, HARMONY) == ("a <|end|> b", "c", None)


def test_a_channel_that_nobody_knows_is_text() -> None:
    assert fed(harmony("<|channel|>other to=x<|message|>{}"), HARMONY) == ("", "other to=x{}", None)


def test_a_marker_in_the_middle_of_a_character() -> None:
    markers = ReasoningMarkers(begin=("\ud800",), end=("\ud801",), controls={1: "\ud800", 2: "\ud801"})
    assert fed([(1, b""), (9, "é".encode()[:1]), (2, b""), (9, b"a")], markers) == ("\ufffd", "a", None)


# -- which markers a model has -----------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)

TEMPLATES = {
    "plain": (CHATML, None),
    "opens the reasoning": (CHATML + "<think>\n", "<think>"),
    "only removes it": ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", "<think>"),
    "may switch it off": (CHATML + "{% if no_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>"),
    "brackets": (
        "[SYSTEM_PROMPT]Draft in [THINK]...[/THINK] first.[/SYSTEM_PROMPT][INST]{{ messages[0].content }}[/INST]",
        "[THINK]",
    ),
    "seed": ("<seed:bos>{{ messages[0].content }}<seed:eos>{% set end = '</seed:think>' %}", "<seed:think>"),
    "start and end": ("<|USER|>{{ messages[0].content }}<|CHATBOT|><|START_THINKING|>", "<|START_THINKING|>"),
    "channels": (
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}",
        "<|channel|>analysis<|message|>",
    ),
    "half-open channels": ("{{ '<|channel>thought\\n' + m.reasoning + '<channel|>' }}", "<|channel>thought"),
    "thoughts": ("[|assistant|]<thought>\n", "<thought>"),
    "prefix and suffix": ("<|assistant_start|>{{ '<|inner_prefix|>' + t + '<|inner_suffix|>' }}", "<|inner_prefix|>"),
    "two parts": (
        "Write your thoughts between <think></think> and your response between <response></response>.",
        "<think>",
    ),
    "solution": ("Use <|begin_of_thought|> and <|end_of_thought|>, then the solution.", "<|begin_of_thought|>"),
    "tools, not thoughts": (CHATML + "<tool_response>{{ x }}</tool_response>", None),
}


@all_cases("name", TEMPLATES)
def test_the_template_says_which_markers_there_are(name: str) -> None:
    template, begin = TEMPLATES[name]
    found = find_format(template)
    assert (None if found is None else found.begin[0]) == begin


@all_cases("found", FORMATS)
def test_each_format_with_and_without_control_tokens(found: ReasoningFormat) -> None:
    begin, end = found.begin[0], found.end[0]
    plain = make_markers(found, MarkerText(lambda _: None))
    assert (plain.begin, plain.end, plain.controls) == (found.begin, found.end, {})
    assert plain.is_opened_by(f"x {begin}\n")
    assert split(f"{begin}\na\n{end}\nb", [1] * 100, plain) == ("a", "b", None)
    controls = make_markers(found, MarkerText({begin: 7, end: 8}.get))
    assert fed([(7, b""), (9, b"a"), (8, b""), (9, b"b")], controls) == ("a", "b", None)


@all_cases("found", FORMATS)
@all_cases("is_control", [False, True])
def test_each_format_can_be_closed(found: ReasoningFormat, is_control: bool) -> None:
    ids: dict[str, int] = {}
    markers = make_markers(found, MarkerText(lambda text: ids.setdefault(text, len(ids)) if is_control else None))
    spelled = sorted(ids, key=len, reverse=True)

    def tokens(text: str) -> list[tuple[int, bytes]]:
        parts = re.split(f"({'|'.join(map(re.escape, spelled))})", text) if spelled else [text]
        return [(ids[part], b"") if part in ids else (100, part.encode()) for part in parts if part]

    said = fed([*tokens(f"{found.begin[0]}a"), *tokens(markers.closed_by), *tokens("b")], markers)
    assert said == ("a", "b", None)


def test_a_response_in_markers_of_its_own() -> None:
    found = find_format(TEMPLATES["two parts"][0])
    assert found is not None
    markers = make_markers(found, MarkerText(lambda _: None))
    assert split("<think>a</think>\n<response>b</response>", [3] * 30, markers) == ("a", "b", None)
