"""llama-server's own API, which is older than its OpenAI-compatible one, and its paths without ``/v1``.

Source: the README of llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
from starlette.responses import Response

from uma_trio.client import Eos, Event, PrefillProgress, Token
from uma_trio.gateway.answer import COMMENT, EVENT_STREAM, json_response, sse
from uma_trio.gateway.dialects import openai_chat, openai_models, openai_responses
from uma_trio.gateway.dialects.llama_tokens import Tokens, Translation, is_several
from uma_trio.gateway.dialects.openai import (
    FIELD_NAMES,
    OPENAI,
    Sampling,
    adapters_of,
    check_session,
    error_body,
    length_fields,
    model_name,
)
from uma_trio.gateway.dialects.openai_completions import MAX_PROMPTS
from uma_trio.gateway.dialects.openai_shapes import LlamaAnswer, LoraAdapter, Props
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.parts import logprobs_of
from uma_trio.protocol.events import Logprob, Logprobs, Timings, Usage

STOP_TYPES: Final = {"length": "limit", "stop": "eos"}
"""Finish reasons of the protocol in llama-server's words, unless a stop string has ended the answer."""

MAX_WINDOW: Final = 4096
"""The protocol's largest ``repeat_last_n``."""


class LlamaRequest(Sampling, kw_only=True):
    """A request for text that continues one prompt or several."""

    prompt: Any
    """A text; tokens, with texts among them; ``{"prompt_string": text}``; or a list of these."""
    max_tokens: int | None = None
    """Another name for ``n_predict``.  -1 is no limit."""
    n_cmpl: int | None = None
    """Another name for ``n``."""
    n_probs: int | None = None
    """How many alternatives of each token to report."""
    logit_bias: Any = None
    """Pairs of a token or a text and a bias, as a list or an object.  A bias of ``false`` excludes the token."""
    repeat_last_n: int | None = None
    """Window of ``repeat_penalty``.  -1 is as long as possible."""
    return_tokens: bool = False
    """Report the tokens of an answer that is not streamed."""
    return_progress: bool = False
    """Report in a stream how far the prefill is."""
    response_fields: list[str] | None = None
    """Report only these fields.  A slash leads into an object."""
    id_slot: Any = None
    """Has no effect: any sequence can reuse the prefix of any other one."""

    @property
    def limit(self) -> int | None:
        """The longest answer in tokens; ``None`` if it may be as long as there is room."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given == -1 else given

    @property
    def window(self) -> int | None:
        """The protocol's ``repeat_last_n``."""
        return MAX_WINDOW if self.repeat_last_n == -1 else self.repeat_last_n

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.n_cmpl or self.n or 1


async def complete_as_llama_server(call: Call) -> Response:
    """Continue prompts, streamed or whole, in llama-server's own format."""
    request, warnings = await call.read(LlamaRequest)
    async with Translation(call, request.model) as translation:
        prompts = await translation.prompts(request.prompt, "prompt", most=MAX_PROMPTS)
        check_session(request.session_id, prompts)
        bias = await translation.logit_bias(request.logit_bias)
    logprobs = request.n_probs or (0 if request.return_tokens and not request.stream else None)
    adapters = await adapters_of(call, request)
    sampling = {**request.sampling_fields(), "n": request.answers, "logit_bias": bias, "repeat_last_n": request.window}
    requests = [
        call.for_daemon(
            **sampling,
            adapters=adapters,
            prompt=prompt,
            **length_fields(request.limit),
            logprobs=logprobs,
            constraint=request.constraint,
            progress=request.return_progress or None,
            session_id=request.session_id,
            history=None if request.session_id is None else "replace",
        )
        for prompt in prompts
    ]
    settings = {"n_predict": -1 if request.limit is None else request.limit, **sampling}
    description = Description(
        {"model": await model_name(call, request.model), **({"warnings": warnings} if warnings else {})},
        {name: value for name, value in settings.items() if value is not None},
        [prompt for prompt in prompts for _ in range(request.answers)],
        limit=request.limit or call.config.limits.default_max_tokens or None,
        probabilities=bool(request.n_probs),
    )
    if request.stream:
        return call.stream(requests, LlamaEvents(description, call.id))
    ends: list[Eos] = await call.unless_disconnected(call.daemon.complete_all(requests))
    found = []
    for eos in ends:
        text, tokens = eos.text or "", [each.token_id for each in eos.logprobs or ()]
        body = description.of(eos, text, tokens if request.return_tokens else [], has_new_line="\n" in text)
        found.append(body if not request.response_fields else _chosen(body, request.response_fields))
    return json_response(found[0] if len(found) == 1 and not is_several(request.prompt) else found)


def _chosen(body: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    found = {}
    for field in fields:
        value: Any = body
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[field] = value
    return found


class Description:
    """What llama-server says about an answer.

    Args:
        head: fields of all answers.
        settings: parameters of the request.
        prompts: the prompt of each answer.
        limit: the longest answer in tokens, if there is a limit other than the context.
        probabilities: whether the client wants them.
    """

    def __init__(
        self,
        head: dict[str, Any],
        settings: dict[str, Any],
        prompts: Sequence[str | Tokens],
        *,
        limit: int | None,
        probabilities: bool,
    ) -> None:
        self._head = head
        self._settings = settings
        self._prompts = prompts
        self._limit = limit
        self.probabilities = probabilities

    def of(self, eos: Eos, content: str, tokens: Tokens, *, has_new_line: bool) -> dict[str, Any]:
        """The fields for the end of an answer."""
        index, usage = eos.index or 0, eos.usage
        prompt = self._prompts[index]
        was_cut = eos.reason == "length"
        body = {
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": True,
            **self._head,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": {**self._settings, **({} if eos.seed is None else {"seed": eos.seed})},
            **({"prompt": prompt} if isinstance(prompt, str) else {}),
            "has_new_line": has_new_line,
            "truncated": was_cut and (self._limit is None or usage.completion_tokens < self._limit),
            "stop_type": "word" if eos.stop else STOP_TYPES.get(eos.reason, "none"),
            "stopping_word": eos.stop or "",
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": timings(usage, eos.timings),
        }
        if self.probabilities and eos.logprobs is not None:
            body["completion_probabilities"] = [_probabilities(each) for each in eos.logprobs]
        return body


def timings(usage: Usage, found: Timings) -> dict[str, float]:
    """Tokens and durations.  The first token costs no decode step, so rates of the answer are those of the others."""
    prompt_n, predicted_n = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    first_ms = found.total_ms if found.ttft_ms is None else found.ttft_ms
    prompt_ms, predicted_ms, steps = first_ms - found.queue_ms, found.total_ms - first_ms, max(predicted_n - 1, 0)
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms > 0 else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1e3 * steps / predicted_ms if predicted_ms > 0 else 0.0,
    }


def _probabilities(of: Logprobs) -> dict[str, Any]:
    return {**_probability(of), "top_logprobs": [_probability(each) for each in of.top_logprobs]}


def _probability(of: Logprob) -> dict[str, Any]:
    return {"id": of.token_id, "token": of.text, "bytes": of.bytes, "logprob": of.logprob}


class LlamaEvents:
    """Writes answers as llama-server does: without names of events, and without a mark of the end.

    A token whose text is held back comes with the next text.
    """

    media_type = EVENT_STREAM
    keep_alive_frame = COMMENT

    def __init__(self, description: Description, request_id: str) -> None:
        self._description = description
        self._request_id = request_id
        self._held: dict[int, list[Token]] = {}
        self._has_new_line: set[int] = set()
        self._cached: dict[int, int] = {}

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def render(self, event: Event) -> bytes:
        """One event for each that has something new."""
        match event:
            case Token():
                return self._text(event)
            case PrefillProgress():
                return self._progress(event)
            case Eos():
                has_new_line = (event.index or 0) in self._has_new_line
                return sse(self._description.of(event, "", [], has_new_line=has_new_line))
        return b""

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return sse(error_body(error, self._request_id))

    def end(self) -> bytes:
        """Nothing: the last event of each answer has ``stop``."""
        return b""

    def _text(self, event: Token) -> bytes:
        index = event.index or 0
        held = self._held.setdefault(index, [])
        held.append(event)
        if not event.text:
            return b""
        if "\n" in event.text:
            self._has_new_line.add(index)
        tokens = [each.token_id for each in held if each.token_id is not None]
        body: dict[str, Any] = {"index": index, "content": event.text, "tokens": tokens, "stop": False}
        if self._description.probabilities:
            body["completion_probabilities"] = [
                _probabilities(found) for each in held if (found := logprobs_of(each)) is not None
            ]
        held.clear()
        return sse(body)

    def _progress(self, event: PrefillProgress) -> bytes:
        index = event.index or 0
        cached = self._cached.setdefault(index, event.prefilled_tokens)
        progress = {"total": event.prompt_tokens, "cache": cached, "processed": event.prefilled_tokens}
        return sse({"index": index, "content": "", "tokens": [], "stop": False, "prompt_progress": progress})


async def lora_adapters(call: Call) -> Response:
    """The adapters of the default model, by their numbers.  ``scale`` is that of requests that give none."""
    model = (await call.ask(lambda client: client.models()))[0]
    return json_response(
        [{"id": number, "path": each.name, "scale": each.scale} for number, each in enumerate(model.adapters)]
    )


async def props(call: Call) -> Response:
    """What llama-server says about itself: the context of a request, and the chat template."""
    model = (await call.ask(lambda client: client.models()))[0]
    return json_response(
        {
            "default_generation_settings": {"n_ctx": model.context_per_request},
            "total_slots": model.parallel,
            "model_alias": model.name,
            "model_path": f"{model.name}.gguf",
            "chat_template": model.chat_template or "",
            "modalities": {"vision": False, "audio": False},
        }
    )


ENDPOINTS = (
    *(
        Endpoint(
            method="POST",
            path=path,
            dialect=OPENAI,
            answer=complete_as_llama_server,
            shapes=(LlamaAnswer, list[LlamaAnswer]),
            event_shape=LlamaAnswer,
            summary="Text that continues one prompt or several, in llama-server's own format",
            body=LlamaRequest,
            field_names=FIELD_NAMES,
            media_types=("application/json", EVENT_STREAM),
        )
        for path in ("/completion", "/completions")
    ),
    *(
        attrs.evolve(endpoint, path=endpoint.path.removeprefix("/v1"))
        for endpoint in (*openai_chat.ENDPOINTS, *openai_models.ENDPOINTS, *openai_responses.ENDPOINTS)
    ),
    Endpoint(
        method="GET",
        path="/lora-adapters",
        dialect=OPENAI,
        answer=lora_adapters,
        shapes=(list[LoraAdapter],),
        summary="The LoRA adapters of the model",
    ),
    Endpoint(
        method="GET",
        path="/props",
        dialect=OPENAI,
        answer=props,
        shapes=(Props,),
        summary="llama-server's description of itself",
    ),
)
