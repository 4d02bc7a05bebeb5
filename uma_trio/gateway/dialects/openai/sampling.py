"""Fields that requests of OpenAI's completions and of llama-server's own share: how to sample, which adapters, which session.

Source: the OpenAI API reference; vLLM's and llama-server's names for parameters that OpenAI's API does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from uma_trio.config.lists import MAX_ADAPTERS
from uma_trio.errors import AdapterNotFound
from uma_trio.gateway.dialects.common.fields import fields_of, with_fields_of
from uma_trio.gateway.dialects.openai.constraints import Constrained
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.requests import MAX_BIASES


class StreamOptions(msgspec.Struct):
    """What a stream contains."""

    include_usage: bool = False
    resumable: bool = False
    """Chunks have ids, after which another request can go on; only of chat completions."""


class Lora(msgspec.Struct):
    """An adapter of the model by its number, as llama-server names it."""

    id: int
    scale: float = 1.0


@with_fields_of("openai")
class SamplingFields(Constrained, kw_only=True):
    """Fields of a request that chat and plain completions share.  Bounds are those of the socket protocol."""

    model: str | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    lora: Annotated[list[Lora], Meta(max_length=MAX_ADAPTERS)] | None = None
    """LoRA adapters by their numbers, as in llama-server; those that it does not name are not used."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    """llama-server's: report in a stream how far the prefill is."""
    timings_per_token: bool = False
    """llama-server's: report timings with each event of a stream, and not only at its end."""
    verbose: bool = False
    """llama-server's: describe the request and its answer as ``__verbose``."""
    session_id: str | None = None
    """The session that this conversation is, as ``prompt_cache_key`` but with exactly this name."""
    prompt_cache_key: str | None = None
    """Names the client's own session; see ``dialects.common.conversation``."""
    user: Any = None
    """This and the next five have no effect, and need none."""
    metadata: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def is_resumable(self) -> bool:
        """Whether a stream goes on without its client, who can come back to it."""
        return self.stream_options is not None and self.stream_options.resumable

    def fields(self) -> dict[str, Any]:
        """These fields in the socket protocol.

        More ``max_tokens`` than there is room for count as no limit, here and in all dialects but the native one: clients
        often have a large number in their settings, and an answer that fills the context says so.
        """
        given = {"model": self.model, "logit_bias": self.logit_bias, "constraint": self.constraint}
        return {**given, "fit_max_tokens": True, **fields_of(self, "openai")}


async def adapters_of(call: Call, request: SamplingFields) -> list[dict[str, Any]] | None:
    """The adapters that ``request`` chooses by their numbers, as in the socket protocol; ``None``: none.

    Raises:
        HttpError: the model has no such adapter.
    """
    if not request.lora:
        return None
    model = await call.daemon.model(request.model)
    adapters = []
    for number, chosen in enumerate(request.lora):
        if not 0 <= chosen.id < len(model.adapters):
            there = f"{len(model.adapters)} adapters" if model.adapters else "no adapters (--adapter NAME=FILE)"
            message = f"lora names the adapter {chosen.id}; {model.name} has {there}"
            raise HttpError(AdapterNotFound, message, parameter=f"lora[{number}].id")
        adapters.append({"name": model.adapters[chosen.id].name, "scale": chosen.scale})
    return adapters


def session_fields(session_id: str | None, prompts: Sequence[object]) -> dict[str, Any]:
    """The fields of the socket protocol for the session of a prompt.

    Raises:
        HttpError: several prompts would be one session.
    """
    if session_id is not None and len(prompts) > 1:
        raise invalid("a session has one prompt at a time", parameter="session_id")
    return {} if session_id is None else {"session_id": session_id, "history": "replace"}
