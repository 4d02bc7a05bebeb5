"""Measurements of a model on this machine, kept from one run to the next: what ticks cost, and the KV layout chosen.

A large model takes too long to measure before its first client, so a start uses what the last run learned.  All of it
is best effort: a missing, outdated or damaged file is ignored, and so is a failure to write one.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import platformdirs

from uma_trio.engine.layout import KeptLayout, LayoutChoice
from uma_trio.engine.split import existing_parts
from uma_trio.scheduling.cost import MAX_MARGIN, N_FEATURES, N_MARGINS, CostModel, LinearModel
from uma_trio.scheduling.decode_split import DecodeCallTimes
from uma_trio.scheduling.row_curve import PrefillCurves, RowCurve

log = logging.getLogger("uma_trio.models")

FORMAT: Final = 3

SAMPLE_BYTES: Final = 1 << 20
"""Bytes hashed at each end of each file of a model: the header and some weights.  Hashing large files whole takes seconds."""

MAX_FILE_BYTES: Final = 1 << 16

GIVEN_UP_S: Final = 86_400.0
"""How long a layout trial that had no time is not repeated: the next start of a busy machine would find no time either."""

CERTAINTY_KEPT: Final = 0.1
"""Weight of an older run's measurements against new ones."""


def model_fingerprint(model: Path, *facts: object) -> str:
    """32 hex digits that name the model file, or all files of a split model, together with ``facts``.

    Without facts the name stands for the meaning of tokens.  With the engine's environment (library, devices, threads,
    layout) it stands for what ticks cost.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    for number, part in enumerate(existing_parts(model)):
        size = part.stat().st_size
        digest.update(repr((FORMAT, size, () if number else facts)).encode())
        with part.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def load_costs(name: str, folder: Path | None = None) -> CostModel | None:
    """The cost model saved under ``name``, with reduced certainty; ``None`` without a usable file.

    Args:
        folder: the user's cache folder by default.
    """
    fields = _read(name, folder)
    if fields is None:
        return None
    try:
        return CostModel(
            _linear_model(fields["decode_only"]),
            _linear_model(fields["mixed"]),
            DecodeCallTimes(_numbers(fields["call_times"])),
            knows_stairs=bool(fields["knows_stairs"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        _ignore(name, folder, error)
        return None


def save_costs(name: str, cost: CostModel, folder: Path | None = None) -> bool:
    """Save ``cost`` under ``name``, without the corrections that the present load needs.  Returns whether that succeeded."""
    fields = {
        "decode_only": attrs.asdict(cost.decode_only),
        "mixed": attrs.asdict(attrs.evolve(cost.mixed, corrections={})),
        "call_times": cost.call_times.ms,
        "knows_stairs": cost.knows_stairs,
    }
    return _write(name, fields, folder)


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
        fields = _read(self._name(environment), self._folder)
        if fields is None:
            return None
        found = fields.get("layout")
        if not isinstance(found, str):
            _ignore(self._name(environment), self._folder, "it has no layout")
            return None
        if "given_up_at" not in fields:
            return KeptLayout(found, was_measured=True)
        given_up_at, given_s = fields["given_up_at"], fields.get("trial_s")
        if not (isinstance(given_up_at, float) and isinstance(given_s, float)):
            return None
        is_recent = 0 <= time.time() - given_up_at < GIVEN_UP_S
        return KeptLayout(found, was_measured=False) if is_recent and trial_s <= given_s else None

    def save(self, environment: tuple[object, ...], choice: LayoutChoice, trial_s: float) -> bool:
        """Save the choice, with the times for people who look into the file.  Returns whether that succeeded."""
        fields: dict[str, Any] = {"layout": choice.layout.name}
        fields["ms"] = {each.layout.name: (each.decode_ms, each.mixed_ms) for each in choice.measured}
        if choice.why == "no time":
            fields |= {"given_up_at": time.time(), "trial_s": float(trial_s)}
        return _write(self._name(environment), fields, self._folder)

    def _name(self, environment: tuple[object, ...]) -> str:
        return model_fingerprint(self._model, "layout", *environment)


def load_corrections(name: str, folder: Path | None = None) -> dict[str, float]:
    """What the model took of each memory, as a multiple of what was predicted; empty without a usable file."""
    fields = _read(name, folder)
    if fields is not None and not all(type(value) is float for value in fields.values()):
        _ignore(name, folder, "it has other values than numbers")
        return {}
    return fields or {}


def save_corrections(name: str, corrections: dict[str, float], folder: Path | None = None) -> bool:
    """Save ``corrections`` under ``name``.  Returns whether that succeeded."""
    return _write(name, corrections, folder)


def cost_folder() -> Path:
    """The user's cache folder for measurements."""
    return Path(platformdirs.user_cache_dir("uma-trio")) / "costs"


def _path(name: str, folder: Path | None) -> Path:
    return (folder or cost_folder()) / f"{name}.json"


def _read(name: str, folder: Path | None) -> dict[str, Any] | None:
    """A JSON object with unchecked values; ``None`` if there is none."""
    try:
        with _path(name, folder).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _ignore(name, folder, error)
        return None


def _ignore(name: str, folder: Path | None, reason: object) -> None:
    """Log that a file is not used."""
    log.warning(
        "a measurement cannot be used, so it is made again",
        extra={"fields": {"file": str(_path(name, folder)), "reason": str(reason)}},
    )


def _write(name: str, fields: dict[str, Any], folder: Path | None) -> bool:
    """Replace the file atomically.  Returns whether that succeeded."""
    path = _path(name, folder)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(fields))
        os.replace(temporary, path)
    except OSError as error:
        log.debug("cannot save a measurement", extra={"fields": {"path": str(path), "reason": str(error)}})
        return False
    return True


def _linear_model(fields: dict[str, Any]) -> LinearModel:
    """Check every value: the file is as untrusted as a client."""
    rows = [_numbers(row, N_FEATURES) for row in fields["information"]]
    information = tuple(tuple(CERTAINTY_KEPT * value for value in row) for row in rows)
    unconstrained = None if fields["unconstrained"] is None else _numbers(fields["unconstrained"], N_FEATURES)
    coefficients = _numbers(fields["coefficients"], N_FEATURES)
    n_observed, error = int(fields["n_observed"]), float(fields["error"])
    if len(information) != N_FEATURES or min(coefficients) < 0 or not (n_observed >= 0 and 0 <= error < 10):
        raise ValueError("not a linear model")
    if any(information[i][i] <= 0 for i in range(N_FEATURES)):
        raise ValueError("no information about a coefficient")
    margins = _numbers(fields["margins"], N_MARGINS)
    if not 0 <= min(margins) <= max(margins) <= MAX_MARGIN:
        raise ValueError("not the share of a time")
    curves = None if fields["curves"] is None else _curves(fields["curves"])
    return LinearModel(coefficients, information, n_observed, error, unconstrained, margins, curves)


def _curves(fields: dict[str, Any]) -> PrefillCurves:
    mixed = None if fields["mixed"] is None else _curve(fields["mixed"])
    n_decodes = int(fields["n_decodes"])
    if not 0 <= n_decodes < 1 << 16:
        raise ValueError(f"{n_decodes} decodes")
    return PrefillCurves(_curve(fields["prompt"]), mixed, n_decodes)


def _curve(fields: dict[str, Any]) -> RowCurve:
    ms = _numbers(fields["ms"])
    rows = tuple(int(n) for n in _numbers(fields["rows"], len(ms)))
    rising = all(a < b for a, b in itertools.pairwise(rows)) and all(a <= b for a, b in itertools.pairwise(ms))
    if len(ms) < 2 or not rising or rows[0] < 1 or ms[0] < 0:
        raise ValueError("not a curve")
    return RowCurve(rows, ms)


def _numbers(values: Iterable[Any], n: int | None = None) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if (n is not None and len(found) != n) or not 1 <= len(found) <= 64 or not all(abs(f) < 1e15 for f in found):
        raise ValueError(f"{len(found)} numbers")
    return found
