"""Sends a request for text from a terminal: waits for a daemon that loads, shows prefill, and cancels on Ctrl-C."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import trio

from uma_trio.cli.progress import ProgressBar
from uma_trio.cli.stdio import note
from uma_trio.client import Client, Eos, Event, open_client

T = TypeVar("T")


def new_id(command: str) -> str:
    """An id for a request of a command, by which ``uma-trio explain`` and ``replay`` find it."""
    return f"{command}-{secrets.token_hex(6)}"


def connected(
    socket: str | None, *, wait_s: float | None = None, **options: Any
) -> AbstractAsyncContextManager[Client]:
    """``open_client``, which by default waits for a daemon that loads and then says so."""
    return open_client(socket, wait_s=wait_s, on_loading=_say_that_it_loads, **options)


async def asked(socket: str | None, question: Callable[[Client], Awaitable[T]], **options: Any) -> T:
    """The answer to a question, on a connection of its own; ``options`` are those of ``connected``."""
    async with connected(socket, **options) as client:
        return await question(client)


async def generate(
    request: Mapping[str, Any],
    show: Callable[[Event], None],
    socket: str | None,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
    **options: Any,
) -> Eos | None:
    """Send ``request``, which has an ``id``, and hand each event to ``show``.

    A signal cancels the request in the daemon, whose last event then follows.  A second one does not wait for it.

    Args:
        signals: which ones; by default that of Ctrl-C.
        options: those of ``connected``.

    Returns:
        The last ``eos``; ``None`` after a second signal.

    Raises:
        ClientError: there is no answer.
    """
    last: Eos | None = None
    async with trio.open_nursery() as nursery, connected(socket, **options) as client:

        async def cancel_on_signal() -> None:
            with trio.open_signal_receiver(*signals) as arriving:
                await anext(arriving)
                await client.cancel(request["id"])
                await anext(arriving)
                nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_on_signal)
        with ProgressBar() as bar:
            async for event in client.generate(**request):
                bar.update(event)
                show(event)
                if isinstance(event, Eos):
                    last = event
        nursery.cancel_scope.cancel()
    return last


def _say_that_it_loads(path: Path) -> None:
    if sys.stderr.isatty():
        note(f"waiting for the daemon at {path}, which still loads its model; Ctrl-C gives up")
