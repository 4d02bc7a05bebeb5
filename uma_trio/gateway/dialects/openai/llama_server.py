"""llama-server's own API, which is older than its OpenAI-compatible one.

Source: the README of llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import Eos, Event, PrefillProgress, Token
from uma_trio.gateway.answer import json_response, sse
from uma_trio.gateway.dialects.common.shapes import logprobs_of
from uma_trio.gateway.dialects.openai.completions import MAX_PROMPTS
from uma_trio.gateway.dialects.openai.dialect import OPENAI, OpenAIRenderer
from uma_trio.gateway.dialects.openai.extras import (
    Description,
    Extras,
    describe,
    fingerprint_of,
    generation_settings,
    probabilities_of,
)
from uma_trio.gateway.dialects.openai.prompts import Translation, is_several
from uma_trio.gateway.dialects.openai.sampling import SamplingFields, adapters_of, session_fields
from uma_trio.gateway.dialects.openai.shapes import LlamaAnswer, LoraAdapter, Props, SlotInfo
from uma_trio.gateway.endpoint import Call
from uma_trio.protocol.requests import MAX_INFILL_FILES


class LlamaFields(SamplingFields, kw_only=True):
    """What requests of llama-server's own API share."""

    n_probs: int | None = None
    """How many alternatives of each token to report."""
    logit_bias: Any = None
    """Pairs of a token or a text and a bias, as a list or an object.  A bias of ``false`` excludes the token."""
    return_tokens: bool = False
    """Report the tokens of an answer that is not streamed."""
    response_fields: list[str] | None = None
    """Report only these fields.  A slash leads into an object."""
    id_slot: Any = None
    """Has no effect: any sequence can reuse the prefix of any other one."""
    n_keep: Any = None
    """Has no effect: an answer never outgrows its context, so nothing is shifted that had to keep its beginning."""


class LlamaRequest(LlamaFields, kw_only=True):
    """A request for text that continues one prompt or several."""

    prompt: Any
    """A text; tokens, with texts among them; ``{"prompt_string": text}``; or a list of these."""


class ExtraFile(msgspec.Struct):
    """A piece of another file that tells the model more."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields, kw_only=True):
    """A request to fill the gap in a text."""

    input_prefix: str
    """What stands before the gap."""
    input_suffix: str
    """What stands after the gap."""
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_INFILL_FILES)] = msgspec.field(default_factory=list)
    """Pieces of other files, the most important one last."""
    prompt: str = ""
    """How the missing text begins."""


async def complete_as_llama_server(call: Call) -> Response:
    """Continue prompts, streamed or whole, in llama-server's own format."""
    request, warnings = await call.read(LlamaRequest)
    async with Translation(call, request.model) as translation:
        prompts = await translation.prompts(request.prompt, "prompt", most=MAX_PROMPTS)
    session = session_fields(request.session_id, prompts)
    asked = [{"prompt": prompt, **session} for prompt in prompts]
    return await _answer(call, request, asked, prompts, warnings, is_list=is_several(request.prompt))


async def fill_as_llama_server(call: Call) -> Response:
    """Fill the gap in a text, streamed or whole."""
    request, warnings = await call.read(InfillRequest)
    infill = {
        "prefix": request.input_prefix,
        "suffix": request.input_suffix,
        "files": [{"filename": file.filename, "text": file.text} for file in request.input_extra],
    }
    shown = f"{request.input_prefix}{request.prompt}"
    return await _answer(call, request, [{"prompt": request.prompt, "infill": infill}], [shown], warnings)


async def _answer(
    call: Call,
    request: LlamaFields,
    asked: Sequence[Mapping[str, Any]],
    prompts: Sequence[Any],
    warnings: list[str],
    *,
    is_list: bool = False,
) -> Response:
    """Answer a request in llama-server's own format.

    Args:
        asked: fields of the socket protocol for each prompt.
        prompts: what the answers say that these were.
        is_list: whether the answer is a list, even of a single prompt.
    """
    async with Translation(call, request.model) as translation:
        bias = await translation.logit_bias(request.logit_bias)
    logprobs = request.n_probs or (0 if request.return_tokens and not request.stream else None)
    adapters = await adapters_of(call, request)
    sampling = {**request.fields(), "logit_bias": bias}
    extras = Extras(request)
    requests = [
        call.for_daemon(
            **sampling,
            adapters=adapters,
            **fields,
            logprobs=logprobs,
            **extras.fields,
        )
        for fields in asked
    ]
    description = await describe(call, request, sampling, prompts, n_probs=request.n_probs, warnings=warnings)
    renderer = LlamaEvents(description, extras, request, call.id, is_list=is_list)
    return await call.answers(*requests, renderer=renderer, is_streamed=request.stream)


def _choose(body: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    chosen = {}
    for field in fields:
        value: Any = body
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[field] = value
    return chosen


class LlamaEvents(OpenAIRenderer):
    """Writes answers as llama-server does: without names of events, and without a mark of the end.

    A token whose text is held back comes with the next text.
    """

    def __init__(
        self, description: Description, extras: Extras, request: LlamaFields, request_id: str, *, is_list: bool
    ) -> None:
        super().__init__(request_id)
        self._description = description
        self._extras = extras
        self._request = request
        self._is_list = is_list
        self._held: dict[int, list[Token]] = {}
        self._has_new_line: set[int] = set()

    def render(self, event: Event) -> bytes:
        """One event for each that has something new."""
        more = self._extras.of(event)
        match event:
            case Token():
                return self._text(event, more)
            case PrefillProgress() if more:
                return sse(LlamaAnswer(index=event.index or 0, content="", tokens=[], stop=False, **more))
            case Eos():
                has_new_line = (event.index or 0) in self._has_new_line
                return sse(self._description.of(event, "", [], has_new_line=has_new_line))
        return b""

    def whole(self, ends: Sequence[Eos]) -> object:
        """One answer, or a list of them."""
        answers = [*map(self._whole, ends)]
        return answers[0] if len(answers) == 1 and not self._is_list else answers

    def _whole(self, eos: Eos) -> object:
        text, fields = eos.text or "", self._request.response_fields
        tokens = [token.token_id for token in eos.logprobs or ()] if self._request.return_tokens else []
        body = self._description.of(eos, text, tokens, has_new_line="\n" in text)
        return _choose(msgspec.to_builtins(body), fields) if fields else body

    def _text(self, event: Token, more: Mapping[str, Any]) -> bytes:
        index = event.index or 0
        held = self._held.setdefault(index, [])
        held.append(event)
        if not event.text:
            return b""
        if "\n" in event.text:
            self._has_new_line.add(index)
        tokens = [token.token_id for token in held if token.token_id is not None]
        body = LlamaAnswer(index=index, content=event.text, tokens=tokens, stop=False, **more)
        if self._description.probabilities:
            body.completion_probabilities = [
                probabilities_of(logprobs) for token in held if (logprobs := logprobs_of(token)) is not None
            ]
        held.clear()
        return sse(body)


async def lora_adapters(call: Call) -> Response:
    """The adapters of the default model, by their numbers.  ``scale`` is that of requests that give none."""
    model = (await call.ask(lambda client: client.models()))[0]
    adapters = enumerate(model.adapters)
    return json_response(
        [LoraAdapter(id=number, path=adapter.name, scale=adapter.scale) for number, adapter in adapters]
    )


async def props(call: Call) -> Response:
    """What llama-server says about itself: the context of a request, its default parameters, and the chat template."""
    model = (await call.ask(lambda client: client.models()))[0]
    settings = generation_settings(model, {"max_tokens": call.config.limits.default_max_tokens or None})
    return json_response(
        Props(
            default_generation_settings={"n_ctx": model.context_per_request, "params": settings},
            total_slots=model.parallel,
            model_alias=model.name,
            model_path=f"{model.name}.gguf",
            chat_template=model.chat_template or "",
            modalities={"vision": "vision" in model.capabilities, "audio": "audio" in model.capabilities},
            build_info=fingerprint_of(model),
        )
    )


async def slots(call: Call) -> Response:
    """As many slots as answers are generated at a time; those of the client's own running requests are busy.

    A slot says nothing about a request: there are no slots here, and nobody sees other people's prompts.
    """
    model = (await call.ask(lambda client: client.models()))[0]
    snapshot = await call.daemon.metrics()
    account = call.daemon.account
    if account is None:
        n_running = snapshot.get("running", 0)
    else:
        own = snapshot.get("principals", {}).get(account.tenant.principal.name, {})
        n_running = own.get("running", 0)
    return json_response(
        [
            SlotInfo(id=number, n_ctx=model.context_per_request, is_processing=number < n_running)
            for number in range(model.parallel)
        ]
    )


ENDPOINTS = (
    *(
        OPENAI.post(
            path, complete_as_llama_server, LlamaRequest, LlamaAnswer, list[LlamaAnswer], event_shape=LlamaAnswer
        )
        for path in ("/completion", "/completions")
    ),
    OPENAI.post(
        "/infill",
        fill_as_llama_server,
        InfillRequest,
        LlamaAnswer,
        event_shape=LlamaAnswer,
        field_names={"infill": "input_prefix"},
    ),
    OPENAI.get("/lora-adapters", lora_adapters, list[LoraAdapter]),
    OPENAI.get("/props", props, Props),
    OPENAI.get("/slots", slots, list[SlotInfo]),
)
