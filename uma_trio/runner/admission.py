"""Whether a request can be served at all, decided before any work: pure arithmetic with the numbers in the answer."""

from __future__ import annotations

import attrs
import numpy as np

from uma_trio.config import Limits
from uma_trio.engine.records import ModelFacts
from uma_trio.errors import BadRequest, ContextTooSmall, MaxTokensTooLarge, PromptTooLarge
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Generate


def fitted(prompt: Prompt, request: Generate, facts: ModelFacts, limits: Limits) -> Prompt:
    """``prompt``, or if it does not fit and ``n_keep`` allows it, without the oldest tokens after the first ``n_keep``.

    What stays is computed anew: shifting what was computed, as llama.cpp can, would keep in it what is said to be gone,
    and not be the same after a restart.
    """
    dropped = surplus(len(prompt.tokens), request, facts, limits)
    if not dropped:
        return prompt
    assert request.n_keep is not None
    kept = np.concatenate([prompt.tokens[: request.n_keep], prompt.tokens[request.n_keep + dropped :]])
    return attrs.evolve(prompt, tokens=kept, dropped=prompt.dropped + dropped)


def surplus(n_prompt: int, request: Generate, facts: ModelFacts, limits: Limits) -> int:
    """How many of ``n_prompt`` tokens have to go, for prompt and answer to fit; 0 without ``n_keep``, or if it is too much.

    As many as are needed, in steps of half of what can go: then a session that has filled the context goes on for many
    turns on what is left of it, and nothing of that is computed twice.
    """
    if request.n_keep is None:
        return 0
    room = prompt_room(request, facts, limits)
    step = (room - request.n_keep) // 2
    if n_prompt <= room or step < 1:
        return 0
    return -(-(n_prompt - room) // step) * step


def prompt_room(request: Generate, facts: ModelFacts, limits: Limits) -> int:
    """Tokens of a prompt that fit into the context beside the answer."""
    wanted = request.max_tokens or min(limits.default_max_tokens, limits.max_tokens)
    return facts.window - wanted + 1


def check_token_ids(request: Generate, facts: ModelFacts) -> None:
    """See that the model has the tokens that the request names.

    Raises:
        BadRequest: one that it has not.
    """
    for field, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        for token in ids:
            if not 0 <= token < facts.n_vocab:
                raise BadRequest(f"{field} names the token {token}; this model has 0 to {facts.n_vocab - 1}")


def tokens_to_generate(request: Generate, n_prompt: int, facts: ModelFacts, limits: Limits) -> int:
    """How many tokens the request may generate.

    The last token that is sampled is never fed back, so prompt and answer together need one cell less
    than they have tokens.

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
    room = facts.window - n_prompt + 1
    if room < 1:
        raise ContextTooSmall(f"the prompt has {n_prompt} tokens, the context has room for {facts.window}")
    wanted = request.max_tokens
    if wanted is None:
        return min(limits.default_max_tokens, limits.max_tokens, room)
    if wanted > limits.max_tokens:
        raise MaxTokensTooLarge(f"max_tokens is {wanted}; this server gives {limits.max_tokens}")
    if wanted > room:
        raise ContextTooSmall(
            f"{n_prompt} prompt tokens and max_tokens {wanted} exceed the context of {facts.window}; "
            f"ask for at most {room}"
        )
    return wanted
