"""What was learned of a model's ticks on this machine, kept from one run to the next.

A large model has no time to be measured well before its first client; what its last run learned is a better start than
a guess.  Nothing depends on it: a file that is missing, old, damaged or of other circumstances is passed over, and
one that cannot be written is not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import platformdirs
import structlog

from uma_trio.scheduling.cost import N_FEATURES, CostModel, DecodeCallTimes, LinearModel

log = structlog.get_logger("uma_trio.models")

FORMAT: Final = 2
SAMPLE_BYTES: Final = 1 << 20
"""Of each end of a model file: its header, and some weights.  Reading all of a large one would take seconds."""

LARGEST_BYTES: Final = 1 << 16
FADED: Final = 0.1
"""What is left of an older run's certainty."""


def circumstances(model: Path, *facts: object) -> str:
    """A name for ``model`` under ``facts``: library, devices, threads, layout; all that decides what ticks cost."""
    size = model.stat().st_size
    digest = hashlib.sha256(repr((FORMAT, size, facts)).encode())
    with model.open("rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - SAMPLE_BYTES))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def folder() -> Path:
    """Where they are kept."""
    return Path(platformdirs.user_cache_dir("uma-trio")) / "costs"


def recall(name: str, where: Path | None = None) -> CostModel | None:
    """What was kept as ``name``, less sure than it was; ``None`` if there is nothing of use."""
    try:
        fields = read(name, where)
        return CostModel(
            _linear_model(fields["decode_only"]),
            _linear_model(fields["mixed"]),
            DecodeCallTimes(_numbers(fields["call_times"])),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("learned costs cannot be used", name=name, reason=str(error))
        return None


def keep(name: str, cost: CostModel, where: Path | None = None) -> bool:
    """Keep ``cost`` as ``name``; whether that went well."""
    fields = {
        "decode_only": attrs.asdict(cost.decode_only),
        "mixed": attrs.asdict(cost.mixed),
        "call_times": cost.call_times.ms,
    }
    return write(name, fields, where)


def read(name: str, where: Path | None = None) -> Any:
    """What was written as ``name``; to be checked.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    with ((where or folder()) / f"{name}.json").open("rb") as file:
        return msgspec.json.decode(file.read(LARGEST_BYTES))


def write(name: str, fields: dict[str, Any], where: Path | None = None) -> bool:
    """Keep ``fields``, whole or not at all; whether that went well."""
    path = (where or folder()) / f"{name}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(fields))
        os.replace(temporary, path)
    except OSError as error:
        log.debug("what was learned cannot be kept", path=str(path), reason=str(error))
        return False
    return True


def _linear_model(fields: dict[str, Any]) -> LinearModel:
    """Checked: a file is no more to be trusted than a client."""
    information = tuple(tuple(FADED * k for k in _numbers(row, N_FEATURES)) for row in fields["information"])
    unconstrained = None if fields["unconstrained"] is None else _numbers(fields["unconstrained"], N_FEATURES)
    coefficients = _numbers(fields["coefficients"], N_FEATURES)
    n_observed, error = int(fields["n_observed"]), float(fields["error"])
    if len(information) != N_FEATURES or min(coefficients) < 0 or not (n_observed >= 0 and 0 <= error < 10):
        raise ValueError("not a linear model")
    if any(information[i][i] <= 0 for i in range(N_FEATURES)):
        raise ValueError("not a certainty")
    return LinearModel(coefficients, information, n_observed, error, unconstrained)


def _numbers(values: Iterable[Any], n: int | None = None) -> tuple[float, ...]:
    found = tuple(float(value) for value in values)
    if (n is not None and len(found) != n) or not 1 <= len(found) <= 64 or not all(abs(f) < 1e15 for f in found):
        raise ValueError(f"{len(found)} numbers")
    return found
