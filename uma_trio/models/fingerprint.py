"""Names for files of models, by what is in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from uma_trio.models.split import existing_parts

FORMAT: Final = 3
"""Version of the files that are kept under such names; another one makes all names new."""

SAMPLE_BYTES: Final = 1 << 20
"""Bytes hashed at each end of each file of a model: the header and some weights.  Hashing large files whole takes seconds."""


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


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.  Blocks while it reads the file.  Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
