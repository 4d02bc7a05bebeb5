"""Many small cases in one test: to collect and report a case of ``pytest.mark.parametrize`` takes longer than most of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def all_cases(
    names: str | Sequence[str], values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, but in one test: all cases run, and those that fail are reported together.

    The cases share their fixtures.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    cases = [dict(zip(keys, _values_of(value, len(keys)), strict=True)) for value in values]
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for case in cases:
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001  (raised below)
                    failure.add_note(f"the case {case!r:.1000}")
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(cases)} cases", failures)

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def _values_of(value: Any, n: int) -> Sequence[Any]:
    if hasattr(value, "marks"):  # pytest.param
        assert not value.marks, "a case with a mark is a test of its own"
        return value.values  # type: ignore[no-any-return]
    return value if n > 1 else [value]
