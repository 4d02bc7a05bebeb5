"""Commands of ``uma-trio`` that start in a fork of a process that has imported them: the imports are most of a start.

The server that forks is that of ``multiprocessing``; it ends with this process, and the commands end with the server.
A daemon learns what ticks cost from its ticks: it measures nothing before the first client comes, which takes longer than
most tests.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PRELOADED: Final = [
    "__main__",
    "tests.support.forked",
    "uma_trio.cli.serve",
    "uma_trio.daemon.logs",
    "uma_trio.daemon.server",
]
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)
PR_SET_PDEATHSIG: Final = 1


class Forked:
    """What the tests use of ``subprocess.Popen``."""

    def __init__(self, arguments: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._process = CONTEXT.Process(target=_run, args=(arguments, log, cwd, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid: Final = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("uma-trio", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _run(arguments: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
    """Become the command: its arguments, folder, environment, and standard streams."""
    from uma_trio.__main__ import run
    from uma_trio.daemon.engines.calibrate import calibrate

    defaults: Any = calibrate.__kwdefaults__
    defaults["budget_s"] = 0.0
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for path, flags, fds in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, (1, 2))):
        opened = os.open(path, flags, 0o666)
        for fd in fds:
            os.dup2(opened, fd)
        os.close(opened)
    sys.argv = ["uma-trio", *map(str, arguments)]
    run()
