"""Runs trio from a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

T = TypeVar("T")


def run(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run ``function`` with ``trio.run`` and unwrap exception groups.

    If all errors in a group have the same type, the first one is raised by itself, so that a command can catch it.
    A group of different errors is raised as it is, for its traceback.
    """
    try:
        return trio.run(function, *args)
    except BaseExceptionGroup as group:
        errors = _leaves(group)
        if len({type(error) for error in errors}) > 1:
            raise
        raise errors[0] from None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
