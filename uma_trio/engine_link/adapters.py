"""Which LoRA adapters tokens are computed with.

Keys and values depend on the adapters, so tokens that were computed with one set of adapters are of no use for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import attrs

Scales: TypeAlias = tuple[tuple[int, float], ...]
"""The LoRA adapters of a sequence: pairs (number of the adapter in ``ModelInfo.adapters``, scale), in ascending order of numbers.
Empty: the model as it is."""


@attrs.frozen
class AdapterSet:
    """The adapters of a request."""

    scales: Scales = ()
    key: str = ""
    """The contents of their files and the exact scales; ``""`` without adapters.  It means the same after a restart."""


NO_ADAPTERS: Final = AdapterSet()


def adapter_set(scales: Mapping[int, float], fingerprints: Mapping[int, str]) -> AdapterSet:
    """The set of the adapters ``scales``.  One with the scale 0 has no effect and is left out.

    Args:
        fingerprints: of the content of each adapter's file.
    """
    chosen = tuple([(number, scale) for number, scale in sorted(scales.items()) if scale])
    if not chosen:
        return NO_ADAPTERS
    return AdapterSet(chosen, ",".join([f"{fingerprints[number]}*{scale.hex()}" for number, scale in chosen]))
