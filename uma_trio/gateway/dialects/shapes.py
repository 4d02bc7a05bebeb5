"""What the shapes of answers have in common.  The OpenAPI document says them.  Endpoints make answers of them, or write
dictionaries that tests compare with them.

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


Object = dict[str, Any]
"""An object whose fields are described elsewhere."""
