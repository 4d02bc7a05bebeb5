"""Models in several files, as llama.cpp's splitter names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from uma_trio.models.gguf_header import AGAIN, GgufError

PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part; numbers begin with 1."""


def part_name(stem: str, number: int, count: int) -> str:
    """Name of the part ``number``, from 1."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def parts_of(path: Path, count: int) -> list[Path]:
    """The paths of all parts of a model, of which ``path`` is the first.

    Args:
        count: parts that the header of ``path`` claims.

    Raises:
        GgufError: the name is not that of the first part, or a part is missing.
    """
    if count == 1:
        return [path]
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        expected = part_name("NAME", 1, count)
        raise GgufError(f"it is one of {count} parts, and its name does not end as {expected}", "give it its old name")
    if int(match["number"]) != 1:
        raise GgufError(
            f"it is part {int(match['number'])} of {count}", f"give the first one: {part_name(match['stem'], 1, count)}"
        )
    found = [path.with_name(part_name(match["stem"], number, count)) for number in range(1, count + 1)]
    missing = [each.name for each in found if not each.exists()]
    if missing:
        raise GgufError(f"{len(missing)} of its {count} parts are missing, the first one {missing[0]}", AGAIN)
    return found
