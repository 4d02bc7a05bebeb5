"""The setting ``power_limit``."""

from __future__ import annotations

import re

import attrs

from uma_trio.config.refusal import ConfigError, shown


@attrs.frozen
class PowerLimit:
    """How much the device may work.  Exactly one of the two is set."""

    share: float | None = None
    """Share of the time in which it computes, above 0 and at most 1."""
    watts: float | None = None
    """Mean power."""


def parse_power_limit(text: str) -> PowerLimit:
    """
    Raises:
        ConfigError: it is neither a share nor a power.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(%|W)", text.strip(), re.ASCII | re.IGNORECASE)
    value = 0.0 if match is None else float(match[1])
    if match is not None and match[2] == "%" and 1 <= value <= 100:
        return PowerLimit(share=value / 100)
    if match is not None and match[2] != "%" and value > 0:
        return PowerLimit(watts=value)
    raise ConfigError(f"power_limit is {shown(text)}: give a share of the time from 1% to 100%, or a power such as 40W")
