"""Layouts of the KV cache that were chosen, and the memory that models took, kept by the engine.  See ``tuning_cache``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from uma_trio.engine.layout import KeptLayout, LayoutChoice
from uma_trio.engine_link import tuning_cache
from uma_trio.models.fingerprint import model_fingerprint

GIVEN_UP_S: Final = 86_400.0
"""How long a layout trial that had no time is not repeated: the next start of a busy machine would find no time either."""


class FileLayoutCache:
    """Layouts chosen for one model; implements ``engine.layout.LayoutCache``.

    Args:
        model: the GGUF file.
        folder: the user's cache folder by default.
    """

    def __init__(self, model: Path, folder: Path | None = None) -> None:
        self._model = model
        self._folder = folder

    def load(self, environment: tuple[object, ...], trial_s: float) -> KeptLayout | None:
        """The layout chosen in ``environment``; ``None`` without a usable file.

        A trial that was given up is repeated after ``GIVEN_UP_S``, or with more time.
        """
        fields = tuning_cache.read(self._name(environment), self._folder)
        if fields is None:
            return None
        name = fields.get("layout")
        if not isinstance(name, str):
            tuning_cache.ignore(self._name(environment), self._folder, "it has no layout")
            return None
        if "given_up_at" not in fields:
            return KeptLayout(name, was_measured=True)
        given_up_at, given_s = fields["given_up_at"], fields.get("trial_s")
        if not (isinstance(given_up_at, float) and isinstance(given_s, float)):
            return None
        is_recent = 0 <= time.time() - given_up_at < GIVEN_UP_S
        return KeptLayout(name, was_measured=False) if is_recent and trial_s <= given_s else None

    def save(self, environment: tuple[object, ...], choice: LayoutChoice, trial_s: float) -> bool:
        """Save the choice, with the times for people who look into the file.  Returns whether that succeeded."""
        fields: dict[str, Any] = {"layout": choice.layout.name}
        fields["ms"] = {measured.layout.name: (measured.decode_ms, measured.mixed_ms) for measured in choice.measured}
        if choice.why == "no time":
            fields |= {"given_up_at": time.time(), "trial_s": float(trial_s)}
        return tuning_cache.write(self._name(environment), fields, self._folder)

    def _name(self, environment: tuple[object, ...]) -> str:
        return model_fingerprint(self._model, "layout", *environment)


def load_corrections(name: str, folder: Path | None = None) -> dict[str, float]:
    """What the model took of each memory, as a multiple of what was predicted; empty without a usable file."""
    fields = tuning_cache.read(name, folder)
    if fields is not None and not all(type(value) is float for value in fields.values()):
        tuning_cache.ignore(name, folder, "it has other values than numbers")
        return {}
    return fields or {}


def save_corrections(name: str, corrections: dict[str, float], folder: Path | None = None) -> bool:
    """Save ``corrections`` under ``name``.  Returns whether that succeeded."""
    return tuning_cache.write(name, corrections, folder)
