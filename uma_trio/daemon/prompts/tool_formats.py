"""How models write calls of tools: found in their chat templates.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.models.markers import CallMarkers, ParameterTags


@attrs.frozen(kw_only=True)
class ToolFormat(CallMarkers):
    """Markers as a template spells them: ``make_call_markers`` makes those that output is searched for."""

    name: str
    signs: tuple[str, ...]
    """A template that has all of these is of this format,"""
    not_signs: tuple[str, ...] = ()
    """unless it has one of these."""


HERMES: Final = ToolFormat(
    name="hermes",
    signs=("<tool_call>",),
    not_signs=("<function=", "<arg_key>", "<invoke"),
    begin=("<tool_call>",),
    end=("</tool_call>",),
    written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    separator="\n",
)

_DSML: Final = ParameterTags(
    begin_call='<｜DSML｜invoke name="',
    end_call="\n</｜DSML｜invoke>",
    before_key='\n<｜DSML｜parameter name="',
    before_value='" string="true">',
    before_json='" string="false">',
    after_value="</｜DSML｜parameter>",
)

FORMATS: Final = (
    HERMES,  # Hermes, Qwen 2.5, Qwen 3, QwQ, Granite 4
    ToolFormat(
        name="mistral-args",  # Mistral Small 3.2 and later
        signs=("[TOOL_CALLS]", "[ARGS]"),
        begin=("[TOOL_CALLS]",),
        named=True,
        written=("[TOOL_CALLS]", "[ARGS]", ""),
        separator="",
    ),
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        begin=("[TOOL_CALLS]",),
        written=('{"name": "', '", "arguments": ', "}"),
        around=("[TOOL_CALLS][", "]"),
        separator=", ",
    ),
    ToolFormat(
        name="deepseek-json",  # DeepSeek V3, R1 and its distillations
        signs=("<｜tool▁call▁begin｜>", "```json"),
        begin=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
        end=("<｜tool▁call▁end｜>",),
        named=True,
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        written=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="\n",
    ),
    ToolFormat(
        name="deepseek",  # DeepSeek V3.1
        signs=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        begin=("<｜tool▁call▁begin｜>",),
        end=("<｜tool▁call▁end｜>",),
        named=True,
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        written=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="",
    ),
    ToolFormat(
        name="gpt-oss",
        signs=("<|channel|>commentary", "functions."),
        begin=("<|channel|>commentary to=functions.", " to=functions."),
        end=("<|call|>",),
        named=True,
        written=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    ),
    ToolFormat(
        name="gemma",  # Gemma 4
        signs=("<|tool_call>call:", '<|"|>'),
        begin=("<|tool_call>call:",),
        end=("<tool_call|>",),
        named=True,
        quote='<|"|>',
        written=("<|tool_call>call:", "", "<tool_call|>"),
        separator="",
    ),
    ToolFormat(
        name="qwen3-coder",  # Qwen3-Coder, Qwen 3.5, Nemotron 3, StepFun 3.5
        signs=("<tool_call>", "<function=", "<parameter="),
        begin=("<tool_call>", "<function="),  # Qwen3-Coder leaves the first one out at times
        end=("</tool_call>",),
        tags=ParameterTags(
            begin_call="<function=",
            end_call="\n</function>",
            before_key="\n<parameter=",
            before_value=">",
            padding="\n",
            after_value="</parameter>",
        ),
        written=("<tool_call>\n<function=", ">", "\n</function>\n</tool_call>"),
        separator="\n",
    ),
    ToolFormat(
        name="seed-oss",
        signs=("seed:tool_call>", "<function=", "<parameter="),
        begin=("<seed:tool_call>",),
        end=("</seed:tool_call>",),
        tags=ParameterTags(
            begin_call="<function=",
            end_call="\n</function>",
            before_key="\n<parameter=",
            before_value=">",
            after_value="</parameter>",
        ),
        written=("<seed:tool_call>\n<function=", ">", "\n</function>\n</seed:tool_call>"),
        separator="\n",
    ),
    ToolFormat(
        name="glm",  # GLM 4.5 and later, Ling 3, Laguna, Spark 2.5
        signs=("<tool_call>", "<arg_key>", "<arg_value>"),
        begin=("<tool_call>",),
        tags=ParameterTags(
            end_call="\n</tool_call>",
            before_key="\n<arg_key>",
            before_value="</arg_key>\n<arg_value>",
            after_value="</arg_value>",
        ),
        written=("<tool_call>", "", "\n</tool_call>"),
        separator="\n",
    ),
    ToolFormat(
        name="kimi",  # Kimi K2
        signs=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        begin=("<|tool_call_begin|>",),
        end=("<|tool_call_end|>",),
        named=True,
        numbered=True,
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        written=("<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        separator="",
    ),
    ToolFormat(
        name="minimax",  # MiniMax M2
        signs=("minimax:tool_call>", '<invoke name="', '<parameter name="'),
        begin=("<minimax:tool_call>",),
        end=("</minimax:tool_call>",),
        tags=ParameterTags(
            begin_call='<invoke name="',
            end_call="\n</invoke>",
            before_key='\n<parameter name="',
            before_value='">',
            after_value="</parameter>",
        ),
        written=('<invoke name="', '">', "\n</invoke>"),
        around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        separator="\n",
    ),
    ToolFormat(
        name="deepseek-v3.2",
        signs=("｜DSML｜", "function_calls>", "parameter name="),
        begin=("<｜DSML｜function_calls>",),
        end=("</｜DSML｜function_calls>",),
        tags=_DSML,
        written=('<｜DSML｜invoke name="', '">', "\n</｜DSML｜invoke>"),
        around=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
        separator="\n",
    ),
    ToolFormat(
        name="deepseek-v4",
        signs=("｜DSML｜", "tool_calls>", "parameter name="),
        begin=("<｜DSML｜tool_calls>",),
        end=("</｜DSML｜tool_calls>",),
        tags=_DSML,
        written=('<｜DSML｜invoke name="', '">', "\n</｜DSML｜invoke>"),
        around=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
        separator="\n",
    ),
    ToolFormat(
        name="llama3",
        signs=('"parameters": ', "ipython"),
        begin=("<|python_tag|>",),
        bare=True,
        written=('{"name": "', '", "parameters": ', "}"),
    ),
)
"""The first one whose signs are in the template counts.  Source: the chat templates that come with these models."""


def names() -> list[str]:
    """Names of the formats."""
    return [form.name for form in FORMATS]


def by_name(name: str) -> ToolFormat:
    """The format called ``name``."""
    return next(form for form in FORMATS if form.name == name)


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of a chat template; ``None`` if it has none that is known."""
    for form in FORMATS:
        if all(sign in template for sign in form.signs) and not any(sign in template for sign in form.not_signs):
            return form
    return None


def write_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]], n_before: int = 0) -> str:
    """Names of tools with their arguments, as a model writes them.

    Args:
        n_before: calls before these, in the whole conversation.
    """
    written = [
        _write_call(form, name, _write_arguments(form.tags, arguments), n)
        for n, (name, arguments) in enumerate(calls, start=n_before)
    ]
    return form.around[0] + ("\n" if form.separator is None else form.separator).join(written) + form.around[1]


def write_example(form: ToolFormat) -> str:
    """A call as a description of the format shows it."""
    arguments = "{...}" if form.tags is None else _write_arguments(form.tags, {"KEY": "VALUE"})
    return form.around[0] + _write_call(form, "NAME", arguments, 0) + form.around[1]


def _write_call(form: ToolFormat, name: str, arguments: str, n: int) -> str:
    before, between, after = form.written
    number = f":{n}" if form.numbered else ""
    return f"{before}{name}{number}{between}{arguments}{after}"


def _write_arguments(tags: ParameterTags | None, arguments: Mapping[str, Any]) -> str:
    if tags is None:
        return json.dumps(arguments, ensure_ascii=False)
    return "".join(_write_argument(tags, key, value) for key, value in arguments.items())


def _write_argument(tags: ParameterTags, key: str, value: Any) -> str:
    before = tags.before_value if isinstance(value, str) or tags.before_json is None else tags.before_json
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return tags.before_key + key + before + tags.padding + text + tags.padding + tags.after_value


def make_call_markers(form: ToolFormat, text: MarkerText) -> CallMarkers:
    """The markers in the form in which output is searched for them."""
    fields = {field.name: _searched(getattr(form, field.name), text) for field in attrs.fields(CallMarkers)}
    return CallMarkers(**{**fields, "controls": text.controls})


def _searched(spelled: Any, text: MarkerText) -> Any:
    """The texts in ``spelled`` in that form; anything else as it is."""
    if isinstance(spelled, str):
        return text.searched(spelled) if spelled else ""
    if isinstance(spelled, tuple):
        return tuple(_searched(item, text) for item in spelled)
    if isinstance(spelled, ParameterTags):
        return ParameterTags(**{name: _searched(tag, text) for name, tag in attrs.asdict(spelled).items()})
    return spelled
