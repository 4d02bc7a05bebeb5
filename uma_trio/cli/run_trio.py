"""Runs trio from a command, and ends its work when a signal comes."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

T = TypeVar("T")


class Interrupted(Exception):
    """A signal interrupted the work."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


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


async def until_interrupted(work: Callable[[], Awaitable[T]]) -> T:
    """Await ``work()``; SIGINT, SIGTERM and SIGHUP cancel it, so that it can stop its child processes.

    Raises:
        Interrupted: a signal arrived, and the cleanup of ``work`` has finished.
    """
    caught: list[int] = []
    results: list[T] = []
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                async for number in signals:
                    caught.append(number)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            results.append(await work())
            nursery.cancel_scope.cancel()
    if not results:
        raise Interrupted(caught[0])
    return results[0]
