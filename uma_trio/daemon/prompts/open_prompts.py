"""From the vocabulary and the chat template of a model to what makes its prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import structlog

from uma_trio.config import Config
from uma_trio.daemon.prompts.chat import BrokenTemplate, ChatTemplate
from uma_trio.daemon.prompts.chosen_template import TemplateSource
from uma_trio.daemon.prompts.context import max_prompt_bytes
from uma_trio.daemon.prompts.control_tokens import ControlTokens
from uma_trio.daemon.prompts.infill import find_infill_format
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.pairs import find_pair_format
from uma_trio.daemon.prompts.pictures import NoPictures, Pictures
from uma_trio.daemon.prompts.prompt import PromptMaker
from uma_trio.daemon.prompts.reasoning import find_format, make_markers
from uma_trio.daemon.prompts.tool_formats import HERMES, by_name, find_tool_format, make_call_markers
from uma_trio.daemon.prompts.tool_prompts import ToolStyle, ToolSupport, find_style
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.models.markers import ReasoningMarkers
from uma_trio.tokenizer.tokenizer import Tokenizer, VocabOnlyModel

log = structlog.get_logger("uma_trio.models")

OF_THE_MODEL: Final = "of the model file"
GIVE_A_TEMPLATE: Final = "--chat-template chatml, or another template that the model was trained with"


@contextlib.contextmanager
def open_prompts(
    config: Config,
    info: ModelInfo,
    vocabulary: VocabOnlyModel,
    given: TemplateSource | None,
    pictures: Pictures | NoPictures,
) -> Iterator[tuple[PromptMaker, TemplateSource | None]]:
    """What makes prompts for the model, and the chat template that it uses.  Blocks while the template is tried, in a
    process that ends with the context.

    Args:
        given: the template of the settings; the model's own by default.
        pictures: encodes the model's pictures.
    """
    tokenizer, of_the_model = vocabulary.tokenizer, vocabulary.chat_template
    chosen, chat = None, None
    if info.purpose == "generate":
        chosen = given or (None if of_the_model is None else TemplateSource(of_the_model, OF_THE_MODEL))
        chat = _chat_template(chosen, tokenizer)
    pairs = find_pair_format(vocabulary.metadata, tokenizer) if info.purpose == "rank" else None
    # a model that reasons does so with another template too
    templates = [text for text in (chosen.text if chosen else None, of_the_model) if text is not None]
    text = MarkerText(tokenizer.control_id)
    limits = attrs.evolve(config.limits, max_prompt_bytes=max_prompt_bytes(config.limits, info))
    with contextlib.ExitStack() as stack:
        if chat is not None:
            stack.callback(chat.close)
        if chat is None and (pictures.sees or pictures.hears):
            pictures.close()
            pictures = NoPictures("it has no chat template")
        tools = _tool_support(chat, templates, config.model.tool_format, text)
        reasoning = _reasoning_markers(templates, text)
        infill = find_infill_format(tokenizer, info)
        prompts = PromptMaker(tokenizer, chat, limits, reasoning, tools, pairs, infill, pictures)
        yield prompts, None if chat is None else chosen


def _reasoning_markers(templates: Sequence[str], text: MarkerText) -> ReasoningMarkers | None:
    """The markers of the first template that has some."""
    reasoning_format = next(filter(None, map(find_format, templates)), None)
    return None if reasoning_format is None else make_markers(reasoning_format, text)


def _tool_support(chat: ChatTemplate | None, templates: Sequence[str], name: str, text: MarkerText) -> ToolSupport:
    """How the model calls tools.

    Args:
        templates: the one that is used comes first.
        name: of the format, or ``auto``.
    """
    if name == "auto":
        form = next(filter(None, map(find_tool_format, templates)), HERMES)
        is_native = bool(templates) and find_tool_format(templates[0]) is not None
    else:
        form, is_native = by_name(name), True
    style = find_style(chat.render, named_ids=form.numbered) if chat is not None and is_native else ToolStyle()
    return ToolSupport(form, style, make_call_markers(form, text))


def _chat_template(source: TemplateSource | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The compiled template; a broken one of a model file costs the model its chats, and nothing else."""
    if source is None:
        log.warning("the model has no chat template; it serves plain prompts", hint=GIVE_A_TEMPLATE)
        return None
    name = "the model's chat template" if source.origin == OF_THE_MODEL else f"the chat template {source.origin}"
    try:
        controls = ControlTokens(tokenizer.control_tokens, tokenizer.user_defined_controls)
        return ChatTemplate(source.text, bos=tokenizer.bos, eos=tokenizer.eos, controls=controls, name=name)
    except (BrokenTemplate, ValueError) as error:
        log.warning(f"{name} cannot be used; the model serves plain prompts", reason=str(error), hint=GIVE_A_TEMPLATE)
        return None
