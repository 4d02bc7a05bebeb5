"""The context of a request: how many tokens prompt and answer may have together, why, and what gives them more."""

from __future__ import annotations

from typing import Final

from uma_trio.config import MB, Limits
from uma_trio.engine_link.defaults import DEFAULT_WINDOW, KV_CELL_MULTIPLE
from uma_trio.engine_link.messages import ModelInfo

SHORT_ANSWER: Final = 512
"""Tokens that an answer of open length gets at least, if the context has room for them."""


BYTES_PER_TOKEN: Final = 8
"""A text of more bytes has more tokens than there is room for, unless it is mostly blanks.  English has about four."""
MIN_PROMPT_BYTES: Final = 256 * 1024


def max_prompt_bytes(limits: Limits, info: ModelInfo) -> int:
    """The largest prompt in bytes."""
    return limits.max_prompt_bytes or max(MIN_PROMPT_BYTES, BYTES_PER_TOKEN * info.max_request_tokens)


def explain_context(info: ModelInfo) -> str:
    """The context of a request, and where the number comes from."""
    n = info.max_request_tokens
    if info.n_ctx_seq >= info.n_ctx_train:
        return f"{n} tokens for a request, as many as the model was trained with"
    if _is_shared(info):
        return f"{n} tokens for a request, which is the whole KV cache"
    return f"{n} tokens for a request: a KV cache of {info.n_ctx} tokens, divided among {info.n_seq_max} sequences"


def more_context(info: ModelInfo, wanted: int | None = None) -> str | None:
    """The settings of ``uma-trio serve`` that give a request more context; ``None`` if the model allows no more.

    Each alternative is complete.  The layout and the number of sequences decide about a default of ``--ctx``, and on
    some GPUs ``--ctx`` decides about the layout.

    Args:
        wanted: tokens of prompt and answer, for which each alternative suffices.  Without it they aim at what a request
            has by default.
    """
    target = min(wanted or DEFAULT_WINDOW, info.n_ctx_train)
    target += -target % KV_CELL_MULTIPLE
    if info.n_ctx_seq >= min(target, info.n_ctx_train) or (wanted or 0) > info.n_ctx_train:
        return None
    n_sequences = 1 if info.unified else info.n_seq_max
    if info.kv_mem_limited:
        larger = f"--kv-mem-limit-mb {1 + int(n_sequences * target * info.kv_bytes_per_token / MB)}"
    else:
        larger = f"--ctx {n_sequences * target}"
    if _is_shared(info):
        return larger if info.n_seq_max == 1 else f"--kv-unified on {larger}"
    ways = [larger]
    if info.n_ctx >= target or not info.kv_mem_limited:
        ways.append(f"--kv-unified on --ctx {max(info.n_ctx, target)}")
    if info.n_ctx >= target or not wanted:
        ways.append(f"--parallel {max(1, info.n_ctx // target)} --ctx {info.n_ctx}")
    return f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else larger


def is_short(info: ModelInfo, limits: Limits) -> bool:
    """A prompt as long as a short answer leaves no room for one, although the model could serve both."""
    return info.n_ctx_seq < min(2 * (limits.default_max_tokens or SHORT_ANSWER), info.n_ctx_train)


def _is_shared(info: ModelInfo) -> bool:
    """One request can have all cells."""
    return info.unified or info.n_seq_max == 1
