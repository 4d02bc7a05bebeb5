"""What llama-server says next to an answer in all of its APIs: timings, the progress of the prefill, ``__verbose``.

Source: the README of llama.cpp's server.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
from msgspec import UNSET

import uma_trio
from uma_trio.client import Eos, Event, ModelDescription, PrefillProgress, Reasoning, Token
from uma_trio.gateway.dialects.openai.sampling import SamplingFields
from uma_trio.gateway.dialects.openai.shapes import LlamaAnswer, StopType
from uma_trio.gateway.endpoint import Call
from uma_trio.protocol.events import Logprob, Logprobs
from uma_trio.protocol.parameters import DEFAULT_BREAKERS, PARAMETERS
from uma_trio.protocol.requests import BANNED
from uma_trio.protocol.usage import Timings, Usage

STOP_TYPES: Final[Mapping[str, StopType]] = {"length": "limit", "stop": "eos"}
"""Finish reasons of the protocol in llama-server's words, unless a stop string has ended the answer."""

ANY_SEED: Final = -1
NO_LIMIT: Final = -1


async def head_of(call: Call, id: str, wanted: str | None) -> dict[str, Any]:
    """What all completions of OpenAI's API have, and each chunk of one.

    Raises:
        HttpError: the daemon cannot be reached.
    """
    model = await call.daemon.model(wanted)
    name, fingerprint = wanted or model.name, fingerprint_of(model)
    return {"id": id, "created": int(time.time()), "model": name, "system_fingerprint": fingerprint}


def fingerprint_of(model: ModelDescription) -> str:
    """Changes with the version of this program, the model file and its adapters.

    As with llama-server it begins with the letter b, for build.
    """
    adapters = [(adapter.name, adapter.size_bytes) for adapter in model.adapters]
    known = (uma_trio.__version__, model.name, model.description, model.size_bytes, model.created_at, adapters)
    return f"b{hashlib.sha256(repr(known).encode()).hexdigest()[:12]}"


# -- timings and progress ----------------------------------------------------------------------------------


def timings(usage: Usage, durations: Timings) -> dict[str, float]:
    """Tokens and durations of an answer that has ended."""
    first_ms = durations.total_ms if durations.ttft_ms is None else durations.ttft_ms
    return _timings(
        cached=usage.cached_tokens,
        prefilled=usage.prompt_tokens - usage.cached_tokens,
        prefill_ms=first_ms - durations.queue_ms,
        generated=usage.completion_tokens,
        decode_ms=durations.total_ms - first_ms,
    )


def _timings(*, cached: int, prefilled: int, prefill_ms: float, generated: int, decode_ms: float) -> dict[str, float]:
    """The first token costs no decode step, so rates of the answer are those of the others."""
    steps = max(generated - 1, 0)
    return {
        "cache_n": cached,
        "prompt_n": prefilled,
        "prompt_ms": prefill_ms,
        "prompt_per_token_ms": prefill_ms / prefilled if prefilled else 0.0,
        "prompt_per_second": 1e3 * prefilled / prefill_ms if prefill_ms > 0 else 0.0,
        "predicted_n": generated,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / steps if steps else 0.0,
        "predicted_per_second": 1e3 * steps / decode_ms if decode_ms > 0 else 0.0,
    }


@attrs.define
class _Answer:
    """What the events of one answer have said so far.  Times are those at which they came, in seconds."""

    began_at: float
    cached: int
    prefilled: int = 0
    first_token_at: float | None = None
    generated: int = 0

    def timings(self, now: float) -> dict[str, float]:
        first = now if self.first_token_at is None else self.first_token_at
        return _timings(
            cached=self.cached,
            prefilled=self.prefilled,
            prefill_ms=1e3 * (first - self.began_at),
            generated=self.generated,
            decode_ms=1e3 * (now - first),
        )


class Streamable(Protocol):
    """A request whose answer may be streamed."""

    stream: bool | None
    return_progress: bool
    timings_per_token: bool


class Extras:
    """Follows an answer, and says what llama-server has next to its text.

    Args:
        request: says how much of that the client wants; ``None``: only timings at the end.
        description: for ``__verbose`` of OpenAI's API; ``None``: the client does not want it.
        now: a clock in seconds.
    """

    def __init__(
        self,
        request: Streamable | None = None,
        description: Description | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        streamed = request if request is not None and request.stream else None
        self._progress = streamed is not None and streamed.return_progress
        self._per_token = streamed is not None and streamed.timings_per_token
        self._description = description
        self._now = now
        self._answers: dict[int, _Answer] = {}
        self._texts: dict[int, list[str]] = {}

    @property
    def fields(self) -> dict[str, Any]:
        """What the request needs for it, in the socket protocol."""
        return {"progress": True} if self._progress or self._per_token else {}

    def of(self, event: Event) -> dict[str, Any]:
        """The fields for ``event``: ``prompt_progress``, ``timings``, both or none."""
        if self._description is not None and isinstance(event, Token):
            self._texts.setdefault(event.index or 0, []).append(event.text)
        match event:
            case Eos():
                return {"timings": timings(event.usage, event.timings)}
            case PrefillProgress():
                return self._of_prefill(event)
            case Token() | Reasoning() if self._per_token:
                now = self._now()
                answer = self._answers.setdefault(event.index or 0, _Answer(now, 0))
                if answer.first_token_at is None:
                    answer.first_token_at = now
                answer.generated += 1
                return {"timings": answer.timings(now)}
        return {}

    def _of_prefill(self, event: PrefillProgress) -> dict[str, Any]:
        now = self._now()
        answer = self._answers.setdefault(event.index or 0, _Answer(now, event.prefilled_tokens))
        answer.prefilled = max(0, event.prefilled_tokens - answer.cached)
        fields: dict[str, Any] = {}
        if self._progress:
            fields["prompt_progress"] = {
                "total": event.prompt_tokens,
                "cache": answer.cached,
                "processed": event.prefilled_tokens,
                "time_ms": round(1e3 * (now - answer.began_at)),
            }
        if self._per_token:
            fields["timings"] = answer.timings(now)
        return fields

    def at_end(self, ends: Sequence[Eos]) -> dict[str, Any]:
        """The fields for all answers together: those of the first one."""
        first = min(ends, key=lambda eos: eos.index or 0)
        fields = self.of(first)
        if self._description is not None:
            text = first.text or "".join(self._texts.get(first.index or 0, ()))
            fields["verbose"] = self._description.of(first, text, [], has_new_line="\n" in text)
        return fields


# -- the request and its answer in llama-server's words ------------------------------------------------------


def generation_settings(
    model: ModelDescription,
    sampling: Mapping[str, Any],
    *,
    n_probs: int | None = None,
    stream: bool | None = None,
) -> dict[str, Any]:
    """All parameters of a request, those that it does not give included.

    Args:
        model: which has the defaults.
        sampling: fields of the socket protocol.
    """
    known = {**model.sampling, **{name: value for name, value in sampling.items() if value is not None}}
    n_predict = known.get("max_tokens", NO_LIMIT)
    biases = [
        {"token": int(token), "bias": None if bias <= BANNED else bias}
        for token, bias in (known.get("logit_bias") or {}).items()
    ]
    if known.get("ignore_eos"):
        biases += [{"token": token, "bias": None} for token in model.eog_tokens]
    stop = known.get("stop") or []
    return {
        "seed": known.get("seed", ANY_SEED),
        **{name: known[row.name] for row in PARAMETERS for name in row.names_in("llama-server") if row.name in known},
        "dry_sequence_breakers": known.get("dry_sequence_breakers", DEFAULT_BREAKERS),
        "stop": [stop] if isinstance(stop, str) else stop,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "ignore_eos": bool(known.get("ignore_eos")),
        "stream": bool(stream),
        "logit_bias": biases,
        "n_probs": n_probs or 0,
        "n_cmpl": known.get("n") or 1,
    }


@attrs.frozen(kw_only=True)
class Description:
    """What llama-server says about an answer in its own API, and as ``__verbose`` in OpenAI's."""

    model: str
    """Its name."""
    settings: Mapping[str, Any]
    """Parameters of the request."""
    prompts: Sequence[str | list[int]]
    """The prompt of each answer."""
    limit: int | None
    """The longest answer in tokens, if there is a limit other than the context."""
    probabilities: bool
    """Whether the client wants them."""
    warnings: Sequence[str]

    def of(self, eos: Eos, content: str, tokens: list[int], *, has_new_line: bool) -> LlamaAnswer:
        """The fields for the end of an answer."""
        index, usage = eos.index or 0, eos.usage
        prompt = self.prompts[index]
        was_cut = eos.reason == "length"
        logprobs = eos.logprobs if self.probabilities else None
        return LlamaAnswer(
            index=index,
            content=content,
            tokens=tokens,
            stop=True,
            model=self.model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings={**self.settings, **({} if eos.seed is None else {"seed": eos.seed})},
            prompt=prompt if isinstance(prompt, str) else UNSET,
            has_new_line=has_new_line,
            truncated=was_cut and (self.limit is None or usage.completion_tokens < self.limit),
            stop_type="word" if eos.stop else STOP_TYPES.get(eos.reason, "none"),
            stopping_word=eos.stop or "",
            tokens_cached=usage.prompt_tokens + usage.completion_tokens,
            timings=timings(usage, eos.timings),
            completion_probabilities=UNSET if logprobs is None else [*map(probabilities_of, logprobs)],
            warnings=[*self.warnings] or UNSET,
        )


async def describe(
    call: Call,
    request: SamplingFields,
    sampling: Mapping[str, Any],
    prompts: Sequence[Any],
    *,
    n_probs: int | None = None,
    warnings: Sequence[str] = (),
) -> Description:
    """The description of a request with these prompts, each of which has ``n`` answers.

    Raises:
        HttpError: the daemon cannot be reached.
    """
    model = await call.daemon.model(request.model)
    return Description(
        model=request.model or model.name,
        settings=generation_settings(model, sampling, n_probs=n_probs, stream=request.stream),
        prompts=[prompt for prompt in prompts for _ in range(sampling.get("n") or 1)],
        limit=sampling.get("max_tokens") or call.config.limits.default_max_tokens or None,
        probabilities=bool(n_probs),
        warnings=warnings,
    )


async def render_prompt(call: Call, **fields: Any) -> str:
    """The prompt of a chat, as the chat template writes it.

    Raises:
        HttpError: the daemon cannot be reached, or refuses.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return (await call.daemon.tokenize_chat(given)).text or ""


def probabilities_of(of: Logprobs) -> dict[str, Any]:
    """A token of the answer with its most likely alternatives."""
    return {**_probability(of), "top_logprobs": [_probability(alternative) for alternative in of.top_logprobs]}


def _probability(of: Logprob) -> dict[str, Any]:
    return {"id": of.token_id, "token": of.text, "bytes": of.bytes, "logprob": of.logprob}
