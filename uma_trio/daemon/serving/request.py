"""Makes answers from the fields of a request, or refuses what the model or the server cannot serve.

Everything here happens before any work, and every refusal has the numbers.
"""

from __future__ import annotations

import math
import secrets
from typing import Final

import attrs
import numpy as np
import trio

from uma_trio.config import Config
from uma_trio.daemon.policy.view import Priority
from uma_trio.daemon.prompts.prompt import Prompt, fit_prompt, tokens_to_generate
from uma_trio.daemon.serving.answer import Answer, EventSink
from uma_trio.daemon.serving.answer_parts import AnswerSampling, TokenTimes
from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.serving.controllers.state import ControlledRequest
from uma_trio.daemon.serving.token_history import TokenHistory
from uma_trio.engine_link.adapters import NO_ADAPTERS, AdapterSet, adapter_set
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.engine_link.sampling import Bias, SamplingParams
from uma_trio.errors import AdapterNotFound, BadRequest
from uma_trio.grammar.compiler import Grammar
from uma_trio.models.purpose import IN_WORDS, Purpose
from uma_trio.principal import Principal
from uma_trio.protocol.parameters import given
from uma_trio.protocol.requests import BANNED, Generate, PoolingRequest, Slo


@attrs.frozen(eq=False)
class PreparedRequest:
    """A request for text with all that is needed to serve it: prompt, constraint and controller are made."""

    request: Generate
    prompt: Prompt
    sink: EventSink
    """Where its events go."""
    principal: Principal
    grammar: Grammar | None = None
    """Allows what its constraint allows."""
    controlled: ControlledRequest | None = None
    """Under which the runtime has its controller."""
    record: AnswerRecord | None = None
    """Keeps the tokens of the only answer, which begins with those that it has.  Their events are sent again."""
    deadline_at: float = math.inf
    """When it is to be complete, on trio's clock."""


def make_answers(
    prepared: PreparedRequest, info: ModelInfo, config: Config, *, saves_states: bool = False
) -> list[Answer]:
    """The answers of a request that has just arrived: one for each of its ``n``.

    Args:
        saves_states: what a session leaves in the KV cache is saved before its cells go.

    Raises:
        BadRequest: the prompt is empty, a token id is not in the vocabulary, or an adapter is named twice.
        AdapterNotFound: the model has no such adapter.
        PromptTooLarge, MaxTokensTooLarge, ContextTooSmall: more than the server or the model can serve.
    """
    request, limits = prepared.request, config.limits
    prompt = fit_prompt(prepared.prompt, request, info, limits)
    max_tokens = tokens_to_generate(request, len(prompt.tokens), info, limits)
    _check_token_ids(request, info)
    adapters = adapters_of(request, info)
    seed = config.sampling.seed if request.seed is None else request.seed
    if seed is None:
        seed = secrets.randbits(63)
    values = given(config.sampling) | given(request)
    params = [SamplingParams(**{**values, "seed": (seed + index) % 2**63}) for index in range(request.n)]
    now = trio.current_time()
    return [
        Answer(
            request=request,
            index=index if request.n > 1 else None,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=_sampling(request, params[index], prompt, max_tokens, info, prepared.grammar),
            end_ids=frozenset((*info.eog_ids, *request.stop_token_ids)),
            sink=prepared.sink,
            principal=prepared.principal,
            priority=Priority[request.slo.priority.upper()],
            adapters=adapters,
            times=TokenTimes(now),
            deadline_at=prepared.deadline_at,
            due_at=now + _target_ttft_ms(request.slo, config) / 1e3,
            grace_s=max(0.0, config.scheduling.target_ttft_ms - _target_ttft_ms(request.slo, config)) / 1e3,
            target_itl_ms=_target_itl_ms(request, config),
            max_rows=info.max_rows,
            durable=saves_states and request.session_id is not None,
            record=prepared.record,
            exact_rows=0 if prepared.record is None else info.exact_rows,
        )
        for index in range(request.n)
    ]


def adapters_of(request: Generate | PoolingRequest, info: ModelInfo) -> AdapterSet:
    """The adapters that ``request`` names.

    Raises:
        BadRequest: it names one twice.
        AdapterNotFound: the model has no such adapter; the message names those that it has.
    """
    if not request.adapters:
        return NO_ADAPTERS
    numbers = {adapter.name: number for number, adapter in enumerate(info.adapters)}
    scales: dict[int, float] = {}
    for choice in request.adapters:
        number = numbers.get(choice.name)
        if number is None:
            there = f"it has {', '.join(numbers)}" if numbers else "it has none: see serve --adapter"
            raise AdapterNotFound(f"the model {info.name} has no adapter {choice.name!r}; {there}", field="adapters")
        if number in scales:
            raise BadRequest(f"adapters names {choice.name!r} twice", field="adapters")
        scales[number] = info.adapters[number].scale if choice.scale is None else choice.scale
    return adapter_set(scales, {number: adapter.fingerprint for number, adapter in enumerate(info.adapters)})


INSTEAD: Final[dict[Purpose, str]] = {
    **IN_WORDS,
    "embed": f"{IN_WORDS['embed']}: ask it for embeddings",
    "rank": f"{IN_WORDS['rank']}: send it a rerank request",
}
"""What a model does, and how to ask for it, as part of a refusal."""


def check_generates(info: ModelInfo) -> None:
    """Raise BadRequest unless the model generates text."""
    if info.purpose != "generate":
        raise BadRequest(
            f"the model {info.served_name} generates no text. It {INSTEAD[info.purpose]}, or name a model that generates",
            field="model",
        )


def check_embeds(info: ModelInfo, dimensions: int | None) -> None:
    """Raise BadRequest unless the model gives embeddings with so many dimensions."""
    if not info.can_embed:
        raise BadRequest(f"the model {info.served_name} gives no embeddings. It {INSTEAD[info.purpose]}", field="model")
    width = info.n_embd_out
    if dimensions is not None and dimensions > width:
        raise BadRequest(f"dimensions is {dimensions}; embeddings of this model have {width}", field="dimensions")


def check_ranks(info: ModelInfo) -> None:
    """Raise BadRequest unless the model ranks documents."""
    if info.purpose != "rank":
        raise BadRequest(
            f"the model {info.served_name} does not rank documents. It {INSTEAD[info.purpose]}. To rank documents, serve a "
            "reranker: a GGUF with pooling_type rank and a classification head, such as bge-reranker-v2-m3",
            field="model",
        )


def _check_token_ids(request: Generate, info: ModelInfo) -> None:
    for field, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        for token in ids:
            if not 0 <= token < info.n_vocab:
                raise BadRequest(
                    f"{field} names the token {token}; this model has 0 to {info.n_vocab - 1}", field=field
                )


def _sampling(
    request: Generate,
    params: SamplingParams,
    prompt: Prompt,
    max_tokens: int,
    info: ModelInfo,
    grammar: Grammar | None,
) -> AnswerSampling:
    banned = [token for token, bias in request.logit_bias.items() if bias == BANNED]
    if request.ignore_eos:
        banned += info.eog_ids
    added = {token: bias for token, bias in request.logit_bias.items() if bias not in (BANNED, 0)}
    return AnswerSampling(
        params=params,
        banned=np.array(banned, np.int32) if banned else None,
        bias=Bias(np.array([*added], np.int32), np.array([*added.values()], np.float32)) if added else None,
        history=TokenHistory(prompt.text_tokens, params, max_tokens) if params.has_penalties else None,
        logprobs=request.logprobs,
        grammar=grammar,
    )


def _target_ttft_ms(slo: Slo, config: Config) -> float:
    return config.scheduling.target_ttft_ms if slo.target_ttft_ms is None else slo.target_ttft_ms


def _target_itl_ms(request: Generate, config: Config) -> float:
    if request.slo.target_itl_ms is not None:
        return request.slo.target_itl_ms
    nobody_reads = request.slo.priority == "background" or not request.stream
    return config.scheduling.background_itl_ms if nobody_reads else config.scheduling.target_itl_ms
