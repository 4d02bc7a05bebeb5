"""What a check of ``uma-trio doctor`` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import attrs

Verdict = Literal["ok", "warning", "problem"]


@attrs.frozen
class Finding:
    """One line of the report: the result of a check."""

    name: str
    verdict: Verdict
    message: str
    fix: str | None = None


def guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Run a check.  A check that raises an exception is a finding too."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  (a defect in one check must not hide the others)
        message = f"the check failed: {type(error).__name__}: {error}"
        yield Finding(name, "problem", message, "please report this as a bug")
