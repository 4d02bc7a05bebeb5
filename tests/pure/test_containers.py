"""The files for containers."""

from __future__ import annotations

import re
from pathlib import Path

CONTAINERS = Path(__file__).parents[2] / "docs" / "containers"


def test_the_unit_names_only_units_that_are_next_to_it() -> None:
    """The generator of Podman refuses a unit that names, for example, a ``.volume`` that does not exist."""
    unit = (CONTAINERS / "uma-trio.container").read_text()
    named = re.findall(r"^\w+=([\w-]+\.(?:volume|network|pod|build|image|container))\b", unit, re.MULTILINE)
    assert [name for name in named if not (CONTAINERS / name).exists()] == []
