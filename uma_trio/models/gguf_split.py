"""The files of a split model."""

from __future__ import annotations

from pathlib import Path

from uma_trio.engine.split import PART, part_name
from uma_trio.models.gguf_header import AGAIN, GgufError


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
