"""How models write calls of tools: found in their chat templates.  Pure."""

from __future__ import annotations

from typing import Final

import attrs

from uma_trio.models.marker_text import MarkerText
from uma_trio.sampling import CallMarkers


@attrs.frozen(kw_only=True)
class ToolFormat:
    """Markers as a template spells them; the other fields are those of ``CallMarkers``."""

    name: str
    signs: tuple[str, ...]
    """A template that has all of these is of this format,"""
    not_signs: tuple[str, ...] = ()
    """unless it has one of these."""
    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    bare: bool = False
    named: bool = False
    quote: str | None = None
    dropped: tuple[str, ...] = ()
    written: tuple[str, str, str]
    around: tuple[str, str] = ("", "")
    separator: str | None = None


HERMES: Final = ToolFormat(
    name="hermes",
    signs=("<tool_call>",),
    not_signs=("<function=", "<arg_key>", "<invoke"),
    begin=("<tool_call>",),
    end=("</tool_call>",),
    written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    separator="\n",
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
    return [each.name for each in FORMATS]


def by_name(name: str) -> ToolFormat:
    """The format called ``name``."""
    return next(each for each in FORMATS if each.name == name)


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of a chat template; ``None`` if it has none that is known."""
    for each in FORMATS:
        if all(sign in template for sign in each.signs) and not any(sign in template for sign in each.not_signs):
            return each
    return None


def make_call_markers(found: ToolFormat, text: MarkerText) -> CallMarkers:
    """The markers in the form in which output is searched for them."""
    before, between, after = map(text.searched, found.written)
    return CallMarkers(
        begin=tuple(map(text.searched, found.begin)),
        end=tuple(map(text.searched, found.end)),
        bare=found.bare,
        named=found.named,
        quote=None if found.quote is None else text.searched(found.quote),
        dropped=tuple(map(text.searched, found.dropped)),
        written=(before, between, after),
        around=(text.searched(found.around[0]), text.searched(found.around[1])),
        separator=None if found.separator is None else text.searched(found.separator),
        controls=text.controls,
    )
