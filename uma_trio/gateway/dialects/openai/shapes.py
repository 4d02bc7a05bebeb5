"""Shapes of answers in OpenAI's API and in llama-server's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from uma_trio.gateway.dialects.common.shapes import Object, Shape, TokenProbability, Warned
from uma_trio.protocol import usage as of_daemon

# -- llama-server's own API -------------------------------------------------------------------------------

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


# -- usage and log probabilities ------------------------------------------------------------------------


class PromptDetails(Shape):
    """More about the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Shape):
    """More about the answer's tokens."""

    reasoning_tokens: int


class Usage(Shape):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    energy_j: float | UnsetType = UNSET
    explanation: Object | UnsetType = UNSET


class ChatLogprobs(Shape):
    """Log probabilities of a chat completion."""

    content: list[TokenProbability]


class TextLogprobs(Shape):
    """Log probabilities of a text completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class Extended(Warned, kw_only=True):
    """An answer with what llama-server adds to OpenAI's API."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    timings: Object | UnsetType = UNSET
    verbose: LlamaAnswer | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ExtendedChunk(Extended, kw_only=True):
    """An event of a stream with what llama-server adds."""

    prompt_progress: Object | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


# -- chat completions -----------------------------------------------------------------------------------


class CalledFunction(Shape):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str


class Call(Shape, tag_field="type", tag="function"):
    """A call of a tool."""

    id: str | None
    function: CalledFunction


class AnswerMessage(Shape, tag_field="role", tag="assistant"):
    """The answer of the model."""

    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Shape):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Extended, tag_field="object", tag="chat.completion"):
    """All answers to a chat."""

    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Shape):
    """A part of a called function."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Shape):
    """A part of a call: id and name in the first one."""

    index: int
    function: FunctionDelta
    id: str | UnsetType | None = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Shape):
    """What is new in an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Shape):
    """A part of one of the answers."""

    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | UnsetType | None = UNSET


class ChatChunk(ExtendedChunk, tag_field="object", tag="chat.completion.chunk"):
    """An event of a streamed chat.  The last event is the text ``[DONE]``."""

    choices: list[ChunkChoice]


# -- completions, embeddings, models --------------------------------------------------------------------


class TextChoice(Shape):
    """A text, or a part of it."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str | None


class Completion(ExtendedChunk, tag_field="object", tag="text_completion"):
    """All texts, or an event of a stream.  The last event of a stream is the text ``[DONE]``."""

    choices: list[TextChoice]


class Embedding(Shape, tag_field="object", tag="embedding"):
    """A vector of length 1, as numbers or in base64."""

    index: int
    embedding: list[float] | str


class EmbeddingUsage(Shape):
    """Tokens of the texts."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: of_daemon.Usage) -> Self:
        """That of a request whose texts are all that is computed."""
        return cls(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens)


class EmbeddingList(Warned, tag_field="object", tag="list"):
    """Vectors in the order of the texts."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TranscriptionUsage(Shape, tag_field="type", tag="tokens"):
    """Tokens of a request with a file of sound."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(Warned):
    """The words that are spoken in a file."""

    text: str
    usage: TranscriptionUsage


class ModelMeta(Shape):
    """llama-server's description of a model."""

    n_ctx: int
    n_embd: int
    n_params: int
    size: int


class ModelStatus(Shape):
    """Whether a model is loaded."""

    value: Literal["unloaded", "loading", "loaded", "draining", "failed"]
    progress: float | UnsetType = UNSET
    """Loaded share of the weights, from 0 to 1, while it is loading."""


class Model(Shape, tag_field="object", tag="model"):
    """A model, and what one request may use."""

    id: str
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    capabilities: Sequence[str]
    meta: ModelMeta
    status: ModelStatus
    parent: str | UnsetType = UNSET
    """The model itself, of a model with an adapter."""


class ManagedModel(Warned):
    """A model after it was loaded, unloaded or reloaded."""

    success: bool
    model: Model


class ModelPage(Shape, tag_field="object", tag="list"):
    """All models."""

    data: list[Model]


# -- responses ------------------------------------------------------------------------------------------


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseHead(Warned):
    """What a response repeats of its request.  Its answer does not change it."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    instructions: str | None
    tools: list[Object]
    tool_choice: str | Object
    parallel_tool_calls: bool
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_logprobs: int | None
    reasoning: Object
    text: Object
    metadata: Object
    prompt_cache_key: str | None
    truncation: str
    store: bool
    background: bool
    previous_response_id: str | None
    conversation: Object | None


class ResponseObject(ResponseHead):
    """A response with its items."""

    status: ResponseStatus
    output: list[Object]
    error: Object | None
    incomplete_details: Object | None
    usage: Object | None


class DeletedObject(msgspec.Struct):
    """Something that is gone."""

    id: str
    object: str
    deleted: bool


class ConversationObject(Warned, tag_field="object", tag="conversation"):
    """A conversation."""

    id: str
    created_at: int
    metadata: Object


class ResponseEvent(msgspec.Struct):
    """An event of a streamed response.  Its other fields depend on its type."""

    type: str
    sequence_number: int


class InputTokens(Warned, tag_field="object", tag="response.input_tokens"):
    """The tokens of a conversation."""

    input_tokens: int


class PromptTokens(Warned):
    """The tokens of a prompt, as vLLM's render endpoints have them."""

    token_ids: list[int]


# -- files and batches ----------------------------------------------------------------------------------


class File(Warned, tag_field="object", tag="file"):
    """A file, without its content."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FilePage(Shape, tag_field="object", tag="list"):
    """Files of a client."""

    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Shape, tag_field="object", tag="file"):
    """A file that was deleted."""

    id: str
    deleted: Literal[True]


class RequestCounts(Shape):
    """How far a batch is."""

    total: int
    completed: int
    failed: int


class BatchObject(Warned, tag_field="object", tag="batch"):
    """A batch.  Times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal["validating", "in_progress", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    completed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    finalizing_at: None
    failed_at: None
    errors: None
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None


class BatchPage(Shape, tag_field="object", tag="list"):
    """Batches of a client."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
