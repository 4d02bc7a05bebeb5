"""Settings that must fit each other."""

from __future__ import annotations

from uma_trio.config.fields import DEFAULT_BATCH, Config, Model
from uma_trio.config.lists import NO_DEVICES
from uma_trio.config.power import parse_power_limit
from uma_trio.config.refusal import ConfigError


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
    if scheduling.power_limit is not None:
        parse_power_limit(scheduling.power_limit)
    if model.type_v not in ("auto", "f16") and model.flash_attn == "off":
        raise ConfigError(
            f"type_v is {model.type_v} and flash_attn off, but llama.cpp quantizes V with flash attention only: make "
            "flash_attn auto, or type_v f16"
        )
    _check_devices(model)
    _check_reproducible(model)
    if scheduling.min_chunk_tokens > batch_tokens - model.parallel:
        raise ConfigError(
            f"min_chunk_tokens is {scheduling.min_chunk_tokens}, but a tick has room for only "
            f"{batch_tokens - model.parallel} tokens of prompts (batch_tokens less parallel): make "
            "min_chunk_tokens smaller, or batch_tokens larger"
        )


def _check_reproducible(model: Model) -> None:
    """Check that nothing contradicts ``reproducible``."""
    others = {
        "kv_unified is on": model.kv_unified == "on",
        "flash_attn is off": model.flash_attn == "off",
        "there are adapters": bool(model.adapters),
        "gpu_layers is above 0": model.gpu_layers > 0,
    }
    obstacles = [what for what, holds in others.items() if holds]
    if model.reproducible and obstacles:
        raise ConfigError(
            f"reproducible needs a CPU, per-sequence KV, flash attention and no adapters, and {obstacles[0]}: leave out one of them"
        )


def _check_devices(model: Model) -> None:
    """Check what does not depend on the devices that there are."""
    devices, mode, shares = model.devices, model.split_mode, model.tensor_split
    if NO_DEVICES in devices and (model.gpu_layers > 0 or shares or mode in ("row", "tensor")):
        what = "gpu_layers" if model.gpu_layers > 0 else "tensor_split" if shares else f"split_mode {mode}"
        raise ConfigError(f"devices is none, the CPU alone, and {what} needs devices: remove one of them")
    if shares and mode == "none":
        raise ConfigError(
            "tensor_split divides the model between devices, and split_mode none keeps it on one: remove one of them"
        )
    if shares and devices and len(shares) != len(devices):
        raise ConfigError(
            f"tensor_split has {len(shares)} shares for {len(devices)} devices: give one for each, 0 for nothing"
        )
    if model.main_gpu and mode != "none":
        raise ConfigError(
            f"main_gpu is {model.main_gpu}, which counts with split_mode none only: set split_mode to none, or name one of "
            "the devices with devices"
        )
    if devices and model.main_gpu >= len(devices):
        raise ConfigError(f"main_gpu is {model.main_gpu}, and devices names {len(devices)}: count from 0")
    if mode == "tensor" and model.flash_attn == "off":
        raise ConfigError("split_mode tensor needs flash attention, and flash_attn is off: set it to auto")
    if mode == "tensor" and model.adapters:
        raise ConfigError(
            "llama.cpp cannot apply LoRA adapters with split_mode tensor: set split_mode to layer, or leave out adapters"
        )
