"""Names of the files of a split model, as llama.cpp's splitter gives them."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Final

PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part; numbers begin with 1."""


def part_name(stem: str, number: int, count: int) -> str:
    """Name of the part ``number``, from 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def model_stem(path: PurePath) -> str:
    """Name of a model's file without ``.gguf`` and without the number of the part."""
    match = PART.fullmatch(path.name)
    if match is not None:
        return match["stem"]
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def existing_parts(path: Path) -> list[Path]:
    """Return ``path``; if its name is that of a model's first part, also the other parts that exist, in order."""
    match = PART.fullmatch(path.name)
    if match is None or int(match["number"]) != 1:
        return [path]
    others = (
        path.with_name(part_name(match["stem"], n, int(match["count"]))) for n in range(2, int(match["count"]) + 1)
    )
    return [path, *(part for part in others if part.exists())]
