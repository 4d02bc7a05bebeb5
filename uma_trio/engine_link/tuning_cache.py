"""Files of measurements of a model on this machine, kept from one run to the next.

A large model takes too long to measure before its first client, so a start uses what the last run learned.  All of it
is best effort: a missing, outdated or damaged file is ignored, and so is a failure to write one.  The daemon keeps what
ticks cost (``saved_costs``), the engine the layouts that it chose and the memory that models took (``saved_layouts``).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

import msgspec
import platformdirs

log = logging.getLogger("uma_trio.models")

MAX_FILE_BYTES: Final = 1 << 16


def cost_folder() -> Path:
    """The user's cache folder for measurements."""
    return Path(platformdirs.user_cache_dir("uma-trio")) / "costs"


def _path(name: str, folder: Path | None) -> Path:
    return (folder or cost_folder()) / f"{name}.json"


def read(name: str, folder: Path | None) -> dict[str, Any] | None:
    """A JSON object with unchecked values; ``None`` if there is none."""
    try:
        with _path(name, folder).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        ignore(name, folder, error)
        return None


def ignore(name: str, folder: Path | None, reason: object) -> None:
    """Log that a file is not used."""
    log.warning(
        "a measurement cannot be used, so it is made again",
        extra={"fields": {"file": str(_path(name, folder)), "reason": str(reason)}},
    )


def write(name: str, fields: dict[str, Any], folder: Path | None) -> bool:
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
