"""Says in the perf log what decided the tokens of an answer, so that it can be computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from uma_trio.daemon.serving.answer import Answer
from uma_trio.protocol.parameters import BUILT_IN, PARAMETERS
from uma_trio.telemetry.perf_records import Replay

Kept = Literal["off", "hashes", "prompts"]

OF_THE_REQUEST = (
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "constraint",
    "adapters",
    "dry_sequence_breakers",
)
"""Fields that decide tokens next to the sampling parameters, and that a replay sends again."""


def replay_of(answer: Answer, kept: Kept) -> Replay | None:
    """What decided the tokens of ``answer``; ``None`` if nothing is to be kept."""
    if kept == "off":
        return None
    request, params, grammar = answer.request, answer.sampling.params, answer.sampling.grammar
    values = {row.name: getattr(params, row.name) for row in PARAMETERS}
    sampling: dict[str, Any] = {name: value for name, value in values.items() if value != BUILT_IN[name]}
    if not params.greedy:
        sampling["seed"] = params.seed
    rules: dict[str, Any] = {
        name: value for name in OF_THE_REQUEST if (value := getattr(request, name)) not in (None, [], {}, False)
    }
    rules["max_tokens"] = answer.max_tokens
    plain = msgspec.to_builtins(rules, str_keys=True)
    inexact = _why_inexact(answer)
    replay = Replay(
        prompt_hash=hash_of(answer.prompt.tokens),
        answer_hash=hash_of(answer.tokens),
        rules_hash=hashlib.sha256(
            msgspec.json.encode([plain, answer.adapters.key, grammar and grammar.key], order="sorted")
        ).hexdigest(),
        sampling=sampling,
        adapters=[answer.adapters.key] if answer.adapters.key else [],
        cached_tokens=answer.n_cached,
        steps_alone=answer.n_steps[0],
        steps_shared=answer.n_steps[1],
        inexact=inexact,
    )
    if kept == "prompts":
        replay.answer = [*answer.tokens]
        if not inexact:
            replay.fields = {**plain, **values, "seed": params.seed, "prompt": answer.prompt.tokens.tolist()}
    return replay


def hash_of(tokens: Iterable[int]) -> str:
    """SHA-256 of token ids as 32-bit integers, little endian."""
    return hashlib.sha256(np.fromiter(tokens, "<i4").tobytes()).hexdigest()


def _why_inexact(answer: Answer) -> str:
    """Why a request with the tokens of the prompt does not compute the same; empty if it does."""
    reasons = {
        "a controller made it": answer.control.exists,
        "it has pictures": bool(answer.prompt.media),
        "tools decide what may follow": answer.prompt.calling is not None,
        "its reasoning was limited": answer.bounds.budget is not None,
        "it was changed while it was written": answer.bounds.was_steered,
    }
    return ", ".join([reason for reason, holds in reasons.items() if holds])
