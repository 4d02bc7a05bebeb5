"""Commands of ``uma-trio`` that start in a fork of a process that has imported them: the imports are most of a start.

The server that forks is that of ``multiprocessing``; it ends with this process, and the commands end with the server.
A daemon learns what ticks cost from its ticks: it measures nothing before the first client comes, which takes longer than
most tests.  Its gateway has no standby without ``WITH_STANDBY`` in the environment.  What reads the environment while it is imported, as ``huggingface_hub`` does, is not among the imports.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PRELOADED: Final = [
    "__main__",
    "tests.support.forked",
    *(f"uma_trio.cli.{name}" for name in ("ask", "keys", "metrics", "models", "pull", "serve", "sessions", "tokenize")),
    "uma_trio.daemon.logs",
    "uma_trio.daemon.server",
]
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)
PR_SET_PDEATHSIG: Final = 1
WITH_STANDBY: Final = {"PYTEST_UMA_TRIO_STANDBY": "1"}
"""A standby is another process that imports all of the gateway, some seconds after each start."""


class Forked:
    """What the tests use of ``subprocess.Popen``."""

    def __init__(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], out: Path, err: Path | None = None
    ) -> None:
        """Start the command without stdin.  It appends to the files, by default all to ``out``."""
        self._process = CONTEXT.Process(target=_run, args=(arguments, cwd, environment, out, err or out))
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


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a command with these variables more may start in a fork: if nothing about its Python is special.

    Programs that measure coverage begin with a process.
    """
    special = any(name.startswith("PYTHON") for name in environment)
    return sys.platform == "linux" and not special and "COVERAGE_PROCESS_START" not in os.environ


def run_forked(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command, as ``subprocess.run`` does; it is killed after a time."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = Forked(arguments, cwd, environment, out, err)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def _run(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Become the command: its arguments, folder, environment, and standard streams."""
    from uma_trio.__main__ import run
    from uma_trio.daemon import gateway_process
    from uma_trio.daemon.engines.calibrate import calibrate

    defaults: Any = calibrate.__kwdefaults__
    defaults["budget_s"] = 0.0
    if not WITH_STANDBY.items() <= environment.items():
        gateway_process.FIRST_STANDBY_S = math.inf  # type: ignore[misc]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    append = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for fd, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (out, append), (err, append))):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv = ["uma-trio", *map(str, arguments)]
    run()
