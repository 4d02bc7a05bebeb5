"""From the fields of a request to what the sampler takes.  Pure; ``admission`` compares token ids with the vocabulary."""

from __future__ import annotations

import attrs
import numpy as np

from uma_trio.engine.records import ModelFacts, TokenIds
from uma_trio.protocol.messages import BANNED, Generate
from uma_trio.sampling import Bias, SamplingParams


def sampling_params(request: Generate) -> SamplingParams:
    """Of one answer."""
    assert request.seed is not None
    return SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        repeat_last_n=request.repeat_last_n,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )


def answers(request: Generate, seed: int) -> list[tuple[Generate, int | None]]:
    """What is asked for each answer alone, and its index where there are several.

    Args:
        seed: of the first one; the others follow, within the bounds of the field.
    """
    if request.n == 1:
        return [(attrs.evolve(request, seed=seed), None)]
    return [(attrs.evolve(request, n=1, seed=(seed + i) % 2**63), i) for i in range(request.n)]


def logit_edits(request: Generate, facts: ModelFacts) -> tuple[TokenIds | None, Bias | None]:
    """Ids that must not be chosen, and what is added to the logits of others."""
    banned = [token for token, bias in request.logit_bias.items() if bias == BANNED]
    if request.ignore_eos:
        banned += facts.eog_ids
    added = {token: bias for token, bias in request.logit_bias.items() if bias not in (BANNED, 0)}
    mask = np.array(banned, np.int32) if banned else None
    bias = Bias(np.array([*added], np.int32), np.array([*added.values()], np.float32)) if added else None
    return mask, bias
