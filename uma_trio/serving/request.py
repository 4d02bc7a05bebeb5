"""From the fields of a request to sequences: what is asked is compared with what the model and the server can give.

Everything here happens before any work, and every refusal says the numbers.
"""

from __future__ import annotations

import secrets

import attrs
import numpy as np
import trio

from uma_trio.config import Config, Limits
from uma_trio.engine.messages import ModelInfo
from uma_trio.errors import BadRequest, ContextTooSmall, MaxTokensTooLarge, PromptTooLarge
from uma_trio.models.prompt import Prompt
from uma_trio.principal import Principal
from uma_trio.protocol.messages import BANNED, Generate, Slo
from uma_trio.sampling import Bias, SamplingParams, TokenHistory
from uma_trio.scheduling.view import Priority
from uma_trio.serving.sequence import EventSink, Sampling, Sequence


def admit(
    request: Generate,
    prompt: Prompt,
    sink: EventSink,
    principal: Principal,
    info: ModelInfo,
    config: Config,
    *,
    durable: bool,
) -> list[Sequence]:
    """The sequences of a request that has just arrived: one for each of its ``n`` answers.

    Args:
        durable: what the sequence leaves in the KV cache is saved before its cells go.

    Raises:
        BadRequest: the prompt is empty, or a token id is not in the vocabulary.
        PromptTooLarge, MaxTokensTooLarge, ContextTooSmall: more than the server or the model can serve.
    """
    limits = config.limits
    prompt = fit_prompt(prompt, request, info, limits)
    max_tokens = tokens_to_generate(request, len(prompt.tokens), info, limits)
    _check_token_ids(request, info)
    seed = secrets.randbits(63) if request.seed is None else request.seed
    now = trio.current_time()
    return [
        Sequence(
            request=request,
            index=index if request.n > 1 else None,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=_sampling(request, (seed + index) % 2**63 if index else seed, prompt, max_tokens, info),
            end_ids=frozenset((*info.eog_ids, *request.stop_token_ids)),
            sink=sink,
            principal=principal,
            priority=Priority[request.slo.priority.upper()],
            arrived_at=now,
            due_at=now + _target_ttft_ms(request.slo, config) / 1e3,
            target_itl_s=_target_itl_ms(request.slo, config) / 1e3,
            durable=durable,
        )
        for index in range(request.n)
    ]


def fit_prompt(prompt: Prompt, request: Generate, info: ModelInfo, limits: Limits) -> Prompt:
    """``prompt``, without the oldest tokens behind the first ``n_keep`` if the request allows that and it is too long.

    What stays is computed again.  llama.cpp could shift the cached values instead, but they would still depend on the
    dropped tokens, and the same session would answer differently after a restart.
    """
    n_drop = surplus_tokens(len(prompt.tokens), request, info, limits)
    if not n_drop:
        return prompt
    assert request.n_keep is not None
    kept = np.concatenate([prompt.tokens[: request.n_keep], prompt.tokens[request.n_keep + n_drop :]])
    return attrs.evolve(prompt, tokens=kept, dropped=prompt.dropped + n_drop)


def surplus_tokens(n_prompt: int, request: Generate, info: ModelInfo, limits: Limits) -> int:
    """How many prompt tokens must go so that prompt and answer fit; 0 without ``n_keep``, or if ``n_keep`` is too large.

    A multiple of half of what can go: a session that has filled its context can then go on for many turns before the
    prompt is computed again.
    """
    if request.n_keep is None:
        return 0
    room = prompt_room(request, info, limits)
    step = (room - request.n_keep) // 2
    if n_prompt <= room or step < 1:
        return 0
    return -(-(n_prompt - room) // step) * step


def prompt_room(request: Generate, info: ModelInfo, limits: Limits) -> int:
    """Prompt tokens that fit into the context together with the answer."""
    wanted = request.max_tokens or min(limits.default_max_tokens, limits.max_tokens)
    return info.max_request_tokens - wanted + 1


def tokens_to_generate(request: Generate, n_prompt: int, info: ModelInfo, limits: Limits) -> int:
    """How many tokens the request may generate.

    The last sampled token is never computed, so prompt and answer need one cell less than they have tokens.

    Raises:
        BadRequest: the prompt has no tokens.
        PromptTooLarge: more than ``max_prompt_tokens``.
        MaxTokensTooLarge: more than ``limits.max_tokens`` asked for.
        ContextTooSmall: prompt and answer can never fit.
    """
    if n_prompt == 0:
        raise BadRequest("the prompt has no tokens")
    if n_prompt > limits.max_prompt_tokens:
        raise PromptTooLarge(f"the prompt has {n_prompt} tokens; this server takes {limits.max_prompt_tokens}")
    context = info.max_request_tokens
    room = context - n_prompt + 1
    if room < 1:
        raise ContextTooSmall(f"the prompt has {n_prompt} tokens, the context has room for {context}")
    wanted = request.max_tokens
    if wanted is None:
        return min(limits.default_max_tokens, limits.max_tokens, room)
    if wanted > limits.max_tokens:
        raise MaxTokensTooLarge(f"max_tokens is {wanted}; this server gives {limits.max_tokens}")
    if wanted > room:
        raise ContextTooSmall(
            f"{n_prompt} prompt tokens and max_tokens {wanted} exceed the context of {context}; ask for at most {room}"
        )
    return wanted


def _check_token_ids(request: Generate, info: ModelInfo) -> None:
    for field, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        for token in ids:
            if not 0 <= token < info.n_vocab:
                raise BadRequest(f"{field} names the token {token}; this model has 0 to {info.n_vocab - 1}")


def _sampling(request: Generate, seed: int, prompt: Prompt, max_tokens: int, info: ModelInfo) -> Sampling:
    params = SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=seed,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        repeat_last_n=request.repeat_last_n,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )
    banned = [token for token, bias in request.logit_bias.items() if bias == BANNED]
    if request.ignore_eos:
        banned += info.eog_ids
    added = {token: bias for token, bias in request.logit_bias.items() if bias not in (BANNED, 0)}
    return Sampling(
        params=params,
        banned=np.array(banned, np.int32) if banned else None,
        bias=Bias(np.array([*added], np.int32), np.array([*added.values()], np.float32)) if added else None,
        history=TokenHistory(prompt.tokens, params, max_tokens) if params.has_penalties else None,
        logprobs=request.logprobs,
    )


def _target_ttft_ms(slo: Slo, config: Config) -> float:
    return config.scheduling.target_ttft_ms if slo.target_ttft_ms is None else slo.target_ttft_ms


def _target_itl_ms(slo: Slo, config: Config) -> float:
    if slo.target_tbt_ms is not None:
        return slo.target_tbt_ms
    scheduling = config.scheduling
    return scheduling.background_tbt_ms if slo.priority == "background" else scheduling.target_tbt_ms
