"""``POST /v1/completions`` of OpenAI's API: text that continues prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import Response

from uma_trio.client import Eos, Event, Token
from uma_trio.gateway.answer import json_response, sse
from uma_trio.gateway.dialects.common.shapes import logprobs_of
from uma_trio.gateway.dialects.openai.chunks import Chunks, finish_reason
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.extras import Extras, describe, head_of
from uma_trio.gateway.dialects.openai.prompts import Tokens, Translation
from uma_trio.gateway.dialects.openai.sampling import SamplingFields, adapters_of, session_fields
from uma_trio.gateway.dialects.openai.shapes import Completion, PromptTokens, TextChoice, TextLogprobs
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.events import Logprob, Logprobs

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""

MAX_PROMPTS: Final = 128
"""Prompts of one request."""


class CompletionRequest(SamplingFields, kw_only=True):
    """A request for text that continues one prompt or several."""

    prompt: Any
    """A text, a list of texts, a list of token ids, or a list of texts and such lists.  llama-server's forms too."""
    logprobs: int | None = None
    """How many alternatives of each token to report."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    """What stands after the answer, which fills the gap between a prompt and this."""

    def check(self) -> None:
        """
        Raises:
            HttpError: something is not supported.
        """
        if self.best_of is not None and self.best_of != self.fields().get("n", 1):
            raise invalid("best_of is not supported; use n, and choose among the answers", parameter="best_of")
        if self.echo and self.logprobs is not None:
            raise invalid("echo does not go with logprobs: there are none of the prompt", parameter="logprobs")


async def complete(call: Call) -> Response:
    """Continue prompts, streamed or whole."""
    request, warnings = await call.read(CompletionRequest)
    request.check()
    async with Translation(call, request.model) as translation:
        prompts = await translation.prompts(request.prompt, "prompt", most=MAX_PROMPTS)
    asked = [_prompt_fields(prompt, request.suffix) for prompt in prompts]
    session = session_fields(request.session_id, prompts)
    adapters = await adapters_of(call, request)
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **request.fields()}
    n = sampling.get("n") or 1
    head = await head_of(call, f"cmpl-{call.id}", request.model)
    description = None
    if request.verbose or call.config.http.verbose:
        description = await describe(call, request, sampling, prompts)
    extras = Extras(request, description)
    requests = [
        call.for_daemon(
            **sampling,
            adapters=adapters,
            **session,
            **fields,
            logprobs=request.logprobs,
            echo=request.echo,
            **extras.fields,
        )
        for fields in asked
    ]
    renderer = TextChunks(head, call.id, extras, n=n, has_usage=request.includes_usage, warnings=warnings)
    return await call.answers(*requests, renderer=renderer, is_streamed=request.stream)


async def render(call: Call) -> Response:
    """The tokens of each prompt, as a request would prefill them."""
    request, _ = await call.read(CompletionRequest)
    if request.suffix:
        raise invalid("a prompt with a suffix is not rendered here", parameter="suffix")
    call.count_request()
    async with Translation(call, request.model) as translation:
        prompts = await translation.prompts(request.prompt, "prompt", most=MAX_PROMPTS)
        return json_response([PromptTokens(token_ids=await translation.tokens(prompt)) for prompt in prompts])


def _prompt_fields(prompt: str | Tokens, suffix: str | None) -> dict[str, Any]:
    """A prompt, or the gap after it, in the socket protocol.

    Raises:
        HttpError: the prompt has tokens, and a suffix.
    """
    if not suffix:
        return {"prompt": prompt}
    if not isinstance(prompt, str):
        raise invalid("suffix goes with a prompt that is a text, not tokens", parameter="suffix")
    return {"infill": {"prefix": prompt, "suffix": suffix}}


def _text_logprobs(logprobs: Sequence[Logprobs], offset: int) -> TextLogprobs:
    """Log probabilities in the shape of text completions.

    Args:
        offset: characters of the answer before them.
    """
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return TextLogprobs(
        tokens=[token.text for token in logprobs],
        token_logprobs=[token.logprob for token in logprobs],
        top_logprobs=[{top.text: top.logprob for top in _alternatives(token)} for token in logprobs],
        text_offset=offsets,
    )


def _alternatives(of: Logprobs) -> Sequence[Logprob]:
    """The most likely tokens, and the one that was drawn."""
    return of.top_logprobs if any(top.token_id == of.token_id for top in of.top_logprobs) else [*of.top_logprobs, of]


class TextChunks(Chunks):
    """Writes text completions."""

    shape = whole_shape = Completion

    def begin(self) -> bytes:
        """The warnings, if there are any, next to an empty text: clients expect a choice in each chunk."""
        empty = TextChoice(text="", index=0, logprobs=None, finish_reason=None)
        return sse(self._chunk([empty], {"warnings": self._warnings})) if self._warnings else b""

    def choice(self, event: Event) -> TextChoice:
        """What is new of an answer, or all of it."""
        choice = TextChoice(text="", index=getattr(event, "index", None) or 0, logprobs=None, finish_reason=None)
        logprobs = None
        match event:
            case Token():
                choice.text = event.text
                logprobs = None if (one := logprobs_of(event)) is None else [one]
            case Eos():
                choice.text, logprobs, choice.finish_reason = event.text or "", event.logprobs, finish_reason(event)
        if logprobs is not None:
            offset = self._offsets.get(choice.index, 0)
            choice.logprobs = _text_logprobs(logprobs, offset)
            self._offsets[choice.index] = offset + len(choice.text)
        return choice

    def whole_choice(self, event: Eos) -> TextChoice:
        """All of an answer."""
        return self.choice(event)


ENDPOINTS = (
    OPENAI.post("/v1/completions", complete, CompletionRequest, Completion, event_shape=Completion, is_batched=True),
    OPENAI.post("/v1/completions/render", render, CompletionRequest, list[PromptTokens]),
)
