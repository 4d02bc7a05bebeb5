"""Which markers a model puts around its reasoning: found in its chat template.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.models.markers import ReasoningMarkers


@attrs.frozen(kw_only=True)
class ReasoningFormat(ReasoningMarkers):
    """Markers as a template spells them: ``make_markers`` makes those that output is searched for."""

    signs: tuple[str, ...]
    """A template that has one of these is of this format."""


def _pair(begin: str, end: str, *, dropped: tuple[str, ...] = (), signs: tuple[str, ...] = ()) -> ReasoningFormat:
    return ReasoningFormat(signs=signs or (begin, end), begin=(begin,), end=(end,), dropped=dropped)


FORMATS: Final = (
    ReasoningFormat(  # gpt-oss: channels; what is not analysis is for the user
        signs=("<|channel|>analysis",),
        begin=("<|channel|>analysis<|message|>",),
        end=("<|end|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        dropped=(
            *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            *("<|end|>", "<|return|>"),
        ),
        repeats=True,
        closed_by="<|end|><|start|>assistant<|channel|>final<|message|>",  # after the end alone it may reason again
    ),
    ReasoningFormat(  # Gemma 4: a channel, which may come again
        signs=("<|channel>thought", "<channel|>"),
        begin=("<|channel>thought",),
        end=("<channel|>",),
        dropped=("<channel|>",),
        repeats=True,
    ),
    _pair(  # Solar Open
        "<|think|>",
        "<|end|>",
        dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
        signs=("assistant<|think|>",),
    ),
    _pair(  # Apriel
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", dropped=("[END FINAL RESPONSE]",)
    ),
    _pair(  # Command A Reasoning
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    _pair(  # OpenThinker
        "<|begin_of_thought|>", "<|end_of_thought|>", dropped=("<|begin_of_solution|>", "<|end_of_solution|>")
    ),
    _pair("<seed:think>", "</seed:think>"),  # Seed-OSS
    _pair("[THINK]", "[/THINK]"),  # Magistral
    _pair("◁think▷", "◁/think▷"),  # Kimi
    _pair("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    _pair("<thought>", "</thought>"),  # EXAONE Deep
    _pair("<mm:think>", "</mm:think>"),  # MiniMax M3
    _pair("<think>", "</think>", dropped=("<response>", "</response>"), signs=("<response></response>",)),  # Granite
    _pair("<think>", "</think>"),  # DeepSeek R1, Qwen 3, QwQ, GLM, Nemotron, MiniMax
)
"""The first one whose sign is in the template counts.  Source: the chat templates that come with these models."""


def find_format(template: str) -> ReasoningFormat | None:
    """The format of a chat template; ``None`` if the template has no markers of reasoning."""
    for reasoning_format in FORMATS:
        if any(sign in template for sign in reasoning_format.signs):
            return reasoning_format
    return None


def make_markers(form: ReasoningFormat, text: MarkerText) -> ReasoningMarkers:
    """The markers in the form in which output is searched for them."""

    def searched(markers: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(text.searched, markers))

    return ReasoningMarkers(
        begin=searched(form.begin),
        end=searched(form.end),
        dropped=searched(form.dropped),
        repeats=form.repeats,
        controls=text.controls,
        opened_by=form.begin,
        closed_by=form.closed_by or form.end[0],
    )
