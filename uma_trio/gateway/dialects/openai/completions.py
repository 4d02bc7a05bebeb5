"""``POST /v1/completions`` of OpenAI's API: text that continues prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from uma_trio.client import Eos, Event, PrefillProgress, Token
from uma_trio.gateway.answer import COMMENT, EVENT_STREAM, PLACE, PreparedEvent, json_response, sse
from uma_trio.gateway.dialects.llama.extras import Extras, describe, head_of
from uma_trio.gateway.dialects.llama.tokens import Tokens, Translation
from uma_trio.gateway.dialects.openai.shapes import Completion
from uma_trio.gateway.dialects.openai.shared import (
    OPENAI,
    Sampling,
    adapters_of,
    check_session,
    error_body,
    finish_reason,
    usage_body,
)
from uma_trio.gateway.dialects.parts import logprobs_of
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.protocol.events import Logprob, Logprobs

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""

MAX_PROMPTS: Final = 128
"""Prompts of one request."""


class CompletionRequest(Sampling, kw_only=True):
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
        if self.best_of not in (None, self.fields().get("n", 1)):
            raise invalid("best_of is not supported; use n, and choose among the answers", parameter="best_of")
        if self.echo and self.logprobs is not None:
            raise invalid("echo does not go with logprobs: there are none of the prompt", parameter="logprobs")


async def complete(call: Call) -> Response:
    """Continue prompts, streamed or whole."""
    request, warnings = await call.read(CompletionRequest)
    request.check()
    async with Translation(call, request.model) as translation:
        prompts = await translation.prompts(request.prompt, "prompt", most=MAX_PROMPTS)
    check_session(request.session_id, prompts)
    asked = [_asked(prompt, request.suffix) for prompt in prompts]
    session = {} if request.session_id is None else {"session_id": request.session_id, "history": "replace"}
    adapters = await adapters_of(call, request)
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **request.fields()}
    n = sampling.get("n") or 1
    head = {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": int(time.time()),
        **await head_of(call, request.model),
    }
    description = None
    if request.verbose or call.config.http.verbose:
        each = [prompt for prompt in prompts for _ in range(n)]
        description = await describe(call, request, head, sampling, each)
    extras = Extras(request, description)
    requests = [
        call.for_daemon(
            **sampling,
            adapters=adapters,
            **session,
            **fields,
            logprobs=request.logprobs,
            echo=request.echo,
            constraint=request.constraint,
            **extras.fields,
        )
        for fields in asked
    ]
    if request.stream:
        renderer = TextChunks(head, call.id, extras, n=n, usage=request.includes_usage, warnings=warnings)
        return call.stream(requests, renderer)
    ends = await call.unless_disconnected(call.daemon.complete_all(requests))
    choices = [
        {
            "text": eos.text or "",
            "index": index,
            "logprobs": _text_logprobs(eos.logprobs, 0) if eos.logprobs is not None else None,
            "finish_reason": finish_reason(eos),
        }
        for index, eos in enumerate(ends)
    ]
    body = {**head, "choices": choices, "usage": _usage(ends, n), **extras.at_end(ends)}
    return json_response(body, warnings=warnings)


def _asked(prompt: str | Tokens, suffix: str | None) -> dict[str, Any]:
    """A prompt, or the gap after it, in the socket protocol.

    Raises:
        HttpError: the prompt has tokens, and a suffix.
    """
    if not suffix:
        return {"prompt": prompt}
    if not isinstance(prompt, str):
        raise invalid("suffix goes with a prompt that is a text, not tokens", parameter="suffix")
    return {"infill": {"prefix": prompt, "suffix": suffix}}


def _usage(ends: Sequence[Eos], n: int) -> dict[str, Any]:
    """The usage of all prompts together.  Each prompt has ``n`` answers, and counts once."""
    bodies = [usage_body(*ends[first : first + n]) for first in range(0, len(ends), n)]
    cached = sum(body["prompt_tokens_details"]["cached_tokens"] for body in bodies)
    counts = {
        name: sum(body[name] for body in bodies) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def _text_logprobs(found: Sequence[Logprobs], offset: int) -> dict[str, Any]:
    """Log probabilities in the shape of text completions.

    Args:
        offset: characters of the answer before them.
    """
    offsets = []
    for each in found:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [{top.text: top.logprob for top in _alternatives(each)} for each in found],
        "text_offset": offsets,
    }


def _alternatives(of: Logprobs) -> Sequence[Logprob]:
    """The most likely tokens, and the one that was drawn."""
    return of.top_logprobs if any(top.token_id == of.token_id for top in of.top_logprobs) else [*of.top_logprobs, of]


class TextChunks:
    """Writes text completions as server-sent events.

    Args:
        head: fields of each chunk.
        extras: further fields of chunks.
        n: answers of each prompt.
        usage: whether a last chunk has the usage.
        warnings: for the first chunk.
    """

    media_type = EVENT_STREAM
    keep_alive_frame = COMMENT

    def __init__(
        self, head: dict[str, Any], request_id: str, extras: Extras, *, n: int, usage: bool, warnings: list[str]
    ) -> None:
        self._head = head
        self._request_id = request_id
        self._extras = extras
        self._n = n
        self._usage = usage
        self._warnings = warnings
        self._ends: list[Eos] = []
        self._offsets: dict[int, int] = {}
        self._prepared: dict[int, PreparedEvent] = {}

    def begin(self) -> bytes:
        """Nothing.  The warnings are in the first chunk: clients expect a choice in each."""
        return b""

    def render(self, event: Event) -> bytes:
        """One chunk for each event that has something new."""
        more = self._extras.of(event)
        match event:
            case Token():
                return self._text(event, more)
            case PrefillProgress() if more:
                return sse({**self._chunk(event.index or 0, ""), **more})
            case Eos():
                self._ends.append(event)
                chunk = self._chunk(event.index or 0, "", finish_reason=finish_reason(event))
                return sse(chunk if self._usage else {**chunk, **self._extras.at_end([event])})
        return b""

    def fail(self, error: HttpError) -> bytes:
        """An error in the middle of the stream."""
        return sse(error_body(error, self._request_id))

    def end(self) -> bytes:
        """The usage, if it is wanted, and the mark of the end."""
        usage = b""
        if self._usage:
            ends = sorted(self._ends, key=lambda eos: eos.index or 0)
            usage = sse({**self._head, "choices": [], "usage": _usage(ends, self._n), **self._extras.at_end(ends)})
        return usage + b"data: [DONE]\n\n"

    def _text(self, event: Token, more: Mapping[str, Any]) -> bytes:
        if not event.text and event.logprob is None:
            return b""
        index = event.index or 0
        if event.logprob is None and not more and not self._warnings:
            if index not in self._prepared:
                self._prepared[index] = PreparedEvent(self._chunk(index, PLACE))
            return self._prepared[index].of(event.text)
        chunk = self._chunk(index, event.text)
        if (logprobs := logprobs_of(event)) is not None:
            offset = self._offsets.get(index, 0)
            chunk["choices"][0]["logprobs"] = _text_logprobs([logprobs], offset)
            self._offsets[index] = offset + len(event.text)
        return sse({**chunk, **more})

    def _chunk(self, index: int, text: str, *, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"text": text, "index": index, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice], **({"usage": None} if self._usage else {})}
        if self._warnings:
            chunk["warnings"], self._warnings = self._warnings, []
        return chunk


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        dialect=OPENAI,
        answer=complete,
        shapes=(Completion,),
        event_shape=Completion,
        body=CompletionRequest,
    ),
)
