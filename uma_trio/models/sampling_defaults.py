"""Sampling parameters that a request does not give: of the server, of the model file, or built in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import attrs

from uma_trio import config
from uma_trio.protocol.parameters import BUILT_IN, PARAMETERS, given


@attrs.frozen
class SamplingDefault:
    """The value of a parameter that a request does not give."""

    value: float
    source: Literal["server", "model", "built in"]


def recommended(metadata: Callable[[str], str | None]) -> tuple[dict[str, float], list[str]]:
    """What a model file recommends.

    Args:
        metadata: returns the value of a key of the file as text.

    Returns:
        The parameters by name, and why others are left out.
    """
    parameters: dict[str, float] = {}
    problems = []
    known = {setting.name: setting for setting in config.settings() if setting.section == "sampling"}
    for row in PARAMETERS:
        if row.gguf is None or (text := metadata(row.gguf)) is None:
            continue
        if row.minus_one != -1 and text.startswith("-"):
            text = f"{row.minus_one:g}"
        try:
            parameters[row.name] = known[row.name].convert(text, row.gguf)
        except config.ConfigError as error:
            problems.append(str(error))
    return parameters, problems


def sampling_defaults(settings: config.Sampling, of_model: Mapping[str, float]) -> dict[str, SamplingDefault]:
    """Each parameter with its default: of the server's settings, of the model, or built in, in this order."""
    of_server = given(settings)
    defaults = {}
    for name, value in BUILT_IN.items():
        if name in of_server:
            defaults[name] = SamplingDefault(of_server[name], "server")
        elif name in of_model:
            defaults[name] = SamplingDefault(of_model[name], "model")
        else:
            defaults[name] = SamplingDefault(value, "built in")
    return defaults
