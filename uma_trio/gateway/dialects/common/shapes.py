"""What the shapes of answers have in common.  Endpoints make answers of them, and the OpenAPI document says them.

A field that may be missing is ``T | UnsetType``.  All other fields are always there.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object with these fields and no others."""


class Warned(Shape, kw_only=True):
    """An answer that names what had no effect."""

    warnings: list[str] | UnsetType = UNSET


class Probability(Shape):
    """A token and its log probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenProbability(Probability):
    """A token of the answer, and its most likely alternatives."""

    top_logprobs: list[Probability]


Object = dict[str, Any]
"""An object whose fields are described elsewhere."""
