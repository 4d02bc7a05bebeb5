"""A daemon of one's own: the real command line in a process, on a socket that nobody else knows."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import attrs
import trio

T = TypeVar("T")

POLL_S: Final = 0.02
LOG_TAIL: Final = 2000


class NoDaemon(Exception):
    """It did not come up; says what it said."""


class Interrupted(Exception):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@attrs.frozen
class OwnDaemon:
    """A running one."""

    path: Path
    pid: int


@contextlib.asynccontextmanager
async def own_daemon(flags: Sequence[str] = (), *, timeout_s: float = 120.0) -> AsyncIterator[OwnDaemon]:
    """``uma-trio serve`` with ``flags``, ready to be asked; stopped, and its files removed, at the end.

    Raises:
        NoDaemon: it ended, or was not ready after ``timeout_s``.
    """
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        path, log = Path(folder, "uma.sock"), Path(folder, "log")
        command = [sys.executable, "-m", "uma_trio", "serve", "--socket", os.fspath(path), *flags]
        with open(log, "wb") as sink:  # noqa: ASYNC230 - a new file in a folder of ours
            async with trio.open_nursery() as nursery:
                # A cancelled run_process sends SIGTERM, and SIGKILL after 5 s.
                process: trio.Process = await nursery.start(
                    partial(trio.run_process, command, check=False, stdout=sink, stderr=subprocess.STDOUT)
                )
                try:
                    await _ready(process, path, log, timeout_s)
                    yield OwnDaemon(path, process.pid)
                finally:
                    nursery.cancel_scope.cancel()


async def _ready(process: trio.Process, path: Path, log: Path, timeout_s: float) -> None:
    with trio.move_on_after(timeout_s):
        while process.returncode is None:
            with contextlib.suppress(OSError):
                async with await trio.open_unix_socket(path):
                    return
            await trio.sleep(POLL_S)
            process.poll()
    ended = process.returncode is not None
    said = await trio.Path(log).read_text(errors="replace")
    raise NoDaemon(
        f"the daemon {'ended at its start' if ended else f'was not ready after {timeout_s:g} s'}: "
        f"{said.strip()[-LOG_TAIL:] or 'it said nothing'}"
    )


async def until_interrupted(work: Callable[[], Awaitable[T]]) -> T:
    """``await work()``; SIGINT, SIGTERM and SIGHUP cancel it, so that what it started is stopped.

    Raises:
        Interrupted: when its cleaning up is done.
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
