"""Settings that must fit each other."""

from __future__ import annotations

from uma_trio.config.fields import DEFAULT_BATCH, Config
from uma_trio.config.values import ConfigError


def check_consistency(config: Config) -> None:
    """Check that settings fit each other.  The guarantees of the scheduling policy rest on the first check.

    Raises:
        ConfigError: two of them contradict each other.
    """
    model, scheduling = config.model, config.scheduling
    batch_tokens = model.batch_tokens or DEFAULT_BATCH
    for name, tokens in (("batch_tokens", batch_tokens), ("ctx", model.ctx)):
        needed = model.parallel + scheduling.prefill_burst_tokens
        if 0 < tokens < needed:
            raise ConfigError(
                f"{name} is {tokens}, but a tick must have room for a token of each of {model.parallel} sequences "
                f"(parallel) and for {scheduling.prefill_burst_tokens} tokens of a prompt (prefill_burst_tokens): "
                f"make {name} at least {needed}, or one of the others smaller"
            )
    if model.type_v not in ("auto", "f16") and model.flash_attn == "off":
        raise ConfigError(
            f"type_v is {model.type_v} and flash_attn off, but llama.cpp quantizes V with flash attention only: make "
            "flash_attn auto, or type_v f16"
        )
    if scheduling.min_chunk_tokens > batch_tokens - model.parallel:
        raise ConfigError(
            f"min_chunk_tokens is {scheduling.min_chunk_tokens}, but a tick has room for only "
            f"{batch_tokens - model.parallel} tokens of prompts (batch_tokens less parallel): make "
            "min_chunk_tokens smaller, or batch_tokens larger"
        )
