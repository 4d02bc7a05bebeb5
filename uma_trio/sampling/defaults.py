"""Sampling parameters that a request does not give: of the server, of the model file, or built in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs

from uma_trio import config
from uma_trio.sampling.params import SamplingParams

BUILT_IN: Final[Mapping[str, float]] = {
    name: default
    for name, default in zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
    if name != "seed"
}
"""All parameters with a default, by name.  The settings and the fields of a request have the same names."""

GGUF_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}
"""Where a model file recommends a parameter.  Source: llama.h, ``LLAMA_MODEL_META_KEY_SAMPLING_*``."""


@attrs.frozen
class SamplingDefault:
    """The value of a parameter that a request does not give."""

    value: float
    source: Literal["server", "model", "built in"]


def given(fields: object) -> dict[str, Any]:
    """The parameters that a request or the settings give, by name."""
    return {name: value for name in BUILT_IN if (value := getattr(fields, name)) is not None}


def recommended(metadata: Callable[[str], str | None]) -> tuple[dict[str, float], list[str]]:
    """What a model file recommends.

    Args:
        metadata: returns the value of a key of the file as text.

    Returns:
        The parameters by name, and why others are left out.
    """
    found: dict[str, float] = {}
    problems = []
    known = {setting.name: setting for setting in config.settings() if setting.section == "sampling"}
    for name, key in GGUF_KEYS.items():
        text = metadata(key)
        if text is None:
            continue
        if name in ("top_k", "repeat_last_n") and text.startswith("-"):  # llama.cpp: all tokens
            text = "0" if name == "top_k" else f"{known[name].bounds['le']:g}"
        try:
            found[name] = known[name].convert(text, key)
        except config.ConfigError as error:
            problems.append(str(error))
    return found, problems


def sampling_defaults(settings: config.Sampling, of_model: Mapping[str, float]) -> dict[str, SamplingDefault]:
    """Each parameter with its default: of the server's settings, of the model, or built in, in this order."""
    of_server = given(settings)
    found = {}
    for name, value in BUILT_IN.items():
        if name in of_server:
            found[name] = SamplingDefault(of_server[name], "server")
        elif name in of_model:
            found[name] = SamplingDefault(of_model[name], "model")
        else:
            found[name] = SamplingDefault(value, "built in")
    return found
