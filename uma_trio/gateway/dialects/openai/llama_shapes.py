"""Shapes of answers in llama-server's own API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from uma_trio.gateway.dialects.common.shapes import Object, Shape

StopType = Literal["none", "eos", "limit", "word"]


class LlamaAnswer(msgspec.Struct, kw_only=True):
    """An answer of llama-server's own API, or an event of a stream.  ``response_fields`` selects others."""

    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    generation_settings: Object | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    timings: Object | UnsetType = UNSET
    completion_probabilities: list[Any] | UnsetType = UNSET
    prompt_progress: Object | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class SlotInfo(Shape):
    """Room for one answer."""

    id: int
    n_ctx: int
    is_processing: bool


class LoraAdapter(Shape):
    """A LoRA adapter of the model."""

    id: int
    path: str
    """Its name."""
    scale: float


class Props(Shape):
    """llama-server's description of itself."""

    default_generation_settings: Object
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
