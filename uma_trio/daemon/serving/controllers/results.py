"""What a step and a controller make of a controlled answer: the sampled token, or what the controller chose instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.controllers.answers import control_of
from uma_trio.daemon.serving.controllers.state import Phase
from uma_trio.daemon.serving.new_tokens import NewTokens, append_tokens, no_tokens
from uma_trio.engine_link.messages import MASK_LATE
from uma_trio.engine_link.sampling import TokenLogprobs
from uma_trio.errors import ControllerFailed, KvFull

MAX_REMOVED: Final = 16
"""A controller may remove this many tokens for each of ``max_tokens``, in all answers of its request together."""


def complete_sample(
    answer: Answer, token: int, scores: Sequence[TokenLogprobs | None], cache: KvCache
) -> NewTokens | None:
    """Add the token that was sampled for a controlled answer, or what its controller chose instead.

    If the mask was late, there is no token, and the next step uses the mask.

    Returns:
        ``None`` if the step ran ahead, and the controller did not want a token.
    """
    control = control_of(answer)
    assert answer.allocation is not None
    if control.splice is not None:
        return splice(answer, cache)
    if token == MASK_LATE:
        cache.backtrack(answer.allocation, answer.n_known - 1)
        answer.go_on()
        is_late = control.mask_requested or control.phase in (Phase.POST_PENDING, Phase.AWAITING_PRE)
        control.mask_requested, control.n_sampled_in_row = False, 0
        if not is_late:
            return None
        if control.phase in (Phase.AWAITING_MASK, Phase.MASK_READY):
            control.needs_mask_first = True
        return no_tokens(answer)
    new = append_tokens(answer, (token,), scores, None)
    control.n_sampled += len(new.tokens)
    control.n_sampled_in_row += 1
    control.set_post(new.tokens)
    answer.state = State.DECODE
    return new


def splice(answer: Answer, cache: KvCache) -> NewTokens:
    """Remove the last tokens of a controlled answer and append others, as its controller has said."""
    control = control_of(answer)
    assert control.splice is not None
    assert answer.allocation is not None
    reported = control.splice.ff_tokens, control.splice.backtrack
    n_removed = max(0, control.splice.backtrack - 1)  # the wire counts the token that would be sampled
    tokens, n_removed = _without_prompt(answer, control.splice.ff_tokens, n_removed)
    n_before = len(answer.tokens) - n_removed
    control.request.n_removed += n_removed if tokens else max(1, n_removed)
    if n_before < 0:
        return no_tokens(
            answer,
            ControllerFailed(f"the controller removes {n_removed} tokens of an answer of {len(answer.tokens)}"),
        )
    if control.request.n_removed > MAX_REMOVED * answer.max_tokens:
        failure = ControllerFailed(
            f"the controller has removed {control.request.n_removed} tokens, more than {MAX_REMOVED} times the longest "
            f"answer of {answer.max_tokens} (max_tokens)"
        )
        return no_tokens(answer, failure)
    length = len(answer.prompt.tokens) + n_before - (not tokens)
    if not cache.backtrack(answer.allocation, length):
        reason = "the controller removes tokens from before a fork, and there is no room to compute others"
        return no_tokens(answer, KvFull(reason))
    del answer.tokens[n_before:]
    control.set_post(*reported)
    return append_inserted(answer, tokens, n_removed)


def _without_prompt(answer: Answer, tokens: Sequence[int], n_removed: int) -> tuple[Sequence[int], int]:
    """What a splice changes of the answer, if it removes tokens of the prompt and appends the same ones again.

    So a controller gets back to the very start of the answer that cannot remove tokens without appending one.
    """
    n = n_removed - len(answer.tokens)
    if 0 < n <= len(answer.prompt.tokens) and [*tokens[:n]] == answer.prompt.tokens[-n:].tolist():
        return tokens[n:], n_removed - n
    return tokens, n_removed


def append_inserted(answer: Answer, tokens: Sequence[int], n_removed: int = 0) -> NewTokens:
    """Append tokens that the controller of ``answer`` has chosen, up to ``max_tokens``."""
    control = control_of(answer)
    new = append_tokens(answer, tokens, (), None)
    new.paused, new.by_controller, new.n_removed = True, True, n_removed
    control.n_sampled_in_row = 0
    control.n_inserted += len(new.tokens)
    if answer.allocation is not None:
        answer.go_on()
    return new
