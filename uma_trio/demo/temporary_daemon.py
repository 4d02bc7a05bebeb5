"""Runs ``uma-trio serve`` in a child process, on a private socket."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

from uma_trio.connect.connector import can_connect
from uma_trio.connect.errors import NoDaemon
from uma_trio.processes.interpreter import package_environment, python_module

POLL_S: Final = 0.02
START_S: Final = 120.0
"""How long a daemon may take to accept connections."""
LOG_TAIL: Final = 2000


class DaemonStartError(NoDaemon):
    """The daemon did not start; the reason has the end of its output."""


@attrs.frozen
class TemporaryDaemon:
    """A running daemon."""

    path: Path
    pid: int


@contextlib.asynccontextmanager
async def temporary_daemon(flags: Sequence[str] = ()) -> AsyncIterator[TemporaryDaemon]:
    """Run ``uma-trio serve`` with ``flags``; entered when it accepts connections.

    Leaving the block stops the daemon and removes its files.

    Raises:
        DaemonStartError: the daemon exited, or was not ready after ``START_S``.
    """
    with tempfile.TemporaryDirectory(prefix="uma-") as folder:
        path, log = Path(folder, "uma.sock"), Path(folder, "log")
        command = [*python_module("uma_trio"), "serve", "--socket", os.fspath(path), *flags]
        environment = {**os.environ, **package_environment()}
        with open(log, "wb") as sink:  # noqa: ASYNC230 - a new file in a private folder
            async with trio.open_nursery() as nursery:
                # A cancelled run_process sends SIGTERM, and SIGKILL after 5 s.
                process: trio.Process = await nursery.start(
                    partial(
                        trio.run_process, command, check=False, stdout=sink, stderr=subprocess.STDOUT, env=environment
                    )
                )
                try:
                    await _ready(process, path, log)
                    yield TemporaryDaemon(path, process.pid)
                finally:
                    nursery.cancel_scope.cancel()


async def _ready(process: trio.Process, path: Path, log: Path) -> None:
    with trio.move_on_after(START_S):
        while process.returncode is None:
            if can_connect(path):
                return
            await trio.sleep(POLL_S)
            process.poll()
    ended = process.returncode is not None
    output = await trio.Path(log).read_text(errors="replace")
    raise DaemonStartError(
        f"the daemon {'exited while starting' if ended else f'was not ready after {START_S:g} s'}: "
        f"{output.strip()[-LOG_TAIL:] or 'it printed nothing'}",
        "uma-trio doctor looks for the reason",
    )
