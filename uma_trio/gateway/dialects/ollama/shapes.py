"""Shapes of answers in Ollama's API.  Of an answer that is streamed, each line has the shape of the whole."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from uma_trio.gateway.dialects.common.shapes import Object, Shape, TokenProbability, Warned


class Line(Warned, kw_only=True):
    """What answers have in common.  Counts and durations, in nanoseconds, come with ``done``."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload", "deadlock"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenProbability] | UnsetType = UNSET


class AnswerMessage(Shape, tag_field="role", tag="assistant"):
    """The answer of the model, or a part of it."""

    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Object] | UnsetType = UNSET


class ChatAnswer(Line):
    """An answer to a chat."""

    message: AnswerMessage


class Generated(Line):
    """An answer to a prompt."""

    response: str
    thinking: str | UnsetType = UNSET


class Embedded(Warned):
    """Vectors in the order of the texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(Warned):
    """The vector of one text."""

    embedding: list[float]


class Version(Shape):
    """The version of Ollama's API."""

    version: str


class Details(Shape):
    """More about a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(Shape, kw_only=True):
    """A model in a list."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class ModelTags(Shape):
    """All models."""

    models: list[Listed]


class Shown(Warned):
    """What is known about one model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: Object
    capabilities: list[str]
    modified_at: str
