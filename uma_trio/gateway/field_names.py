"""Says errors of the daemon in the words of a dialect: which of its own fields a client has to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

FieldNames = Mapping[str, str | Sequence[str]]
"""For a field of the socket protocol, the field of a body that it comes from.  If there are several, the first one that a
body has counts.  ``[]`` stands for an index: ``tools[].parameters``."""

_PLACE: Final = re.compile(r"(?<![\w.'/-])[a-z]\w*(?:\[\d+\]|\.\w+)*(?![\w'/-])")
"""A field and what is inside it; not a flag, and nothing that is quoted."""
_INDEX: Final = re.compile(r"\[\d+\]")
_STEP: Final = re.compile(r"(?=[.\[])")


def field_renamer(names: FieldNames, given: Container[str]) -> Callable[[str], str]:
    """A function that replaces names of fields in a message by those of a dialect.

    A word without an underscore is the name of a field at the beginning of a message only: the rest is English.

    Args:
        given: the fields of the body.
    """

    def renamed(match: re.Match[str]) -> str:
        place = match[0]
        if match.start() and "_" not in place:
            return place
        steps = _STEP.split(place)
        for n in range(len(steps), 0, -1):
            known = "".join(steps[:n])
            if (found := _chosen(names.get(_INDEX.sub("[]", known)), given)) is not None:
                for index in _INDEX.findall(known):
                    found = found.replace("[]", index, 1)
                return found + "".join(steps[n:])
        return place

    return lambda message: _PLACE.sub(renamed, message)


def _chosen(found: str | Sequence[str] | None, given: Container[str]) -> str | None:
    if found is None or isinstance(found, str):
        return found
    return next((name for name in found if name.partition(".")[0] in given), None)
