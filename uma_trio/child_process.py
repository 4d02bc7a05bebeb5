"""A child process of the daemon: started with a socket, ended with the daemon, its log lines in the daemon's log."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import trio

import uma_trio
from uma_trio.parent_process import LOG_MARK

LogRecord = tuple[int, str, str, dict[str, Any]]
"""Level, logger, message, fields."""

LAST_LINES: Final = 20
"""Lines of plain text on the child's stderr that are kept, to say why it ended."""

ASSERTION: Final = re.compile(r"GGML_ASSERT\(.*\) failed|GGML_ABORT|ggml_abort|terminate called|CUDA error|what\(\):")


class ChildProcess:
    """A module of this package that runs in an interpreter of its own: ``python -m MODULE FD ARGUMENTS``.

    The child ends with this process in any case: its socket closes, a thread of its own watches its standard input, and
    if it is stopped the kernel sends ``SIGHUP`` and ``SIGCONT`` to its process group, which becomes an orphan.

    Args:
        module: what the child runs.
        sock: inherited by the child.  The caller closes its own copy.
        arguments: further arguments of the module.
        name: how the reason of its end calls it, such as ``engine``.
        extra: fields of each of its log records.
    """

    def __init__(
        self, module: str, sock: socket.socket, *arguments: str, name: str, extra: Mapping[str, str] | None = None
    ) -> None:
        package = Path(uma_trio.__file__).parent.parent
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module, str(sock.fileno()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[sock.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # Ctrl-C in a terminal asks the daemon to drain, which needs its children
        )
        self.pid: int | None = self._popen.pid
        self._module = module
        self._name = name
        self._extra = extra
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self._popen.returncode is None:
            self._popen.kill()

    async def wait(self) -> str:
        """Pass the child's log lines on until it ends; returns how it ended."""
        assert self._popen.stdin is not None
        assert self._popen.stderr is not None
        try:
            async with trio.lowlevel.FdStream(os.dup(self._popen.stderr.fileno())) as stream:
                await self._pass_lines_on(stream)
            code = await trio.to_thread.run_sync(self._popen.wait, abandon_on_cancel=True)
        finally:
            if self._popen.poll() is None:  # the daemon does not wait any more
                self._popen.kill()
                self._popen.wait()
            self._popen.stdin.close()
            self._popen.stderr.close()
        return self._ended(code)

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        if self._popen.returncode is None:
            self._popen.terminate()

    @property
    def was_killed(self) -> bool:
        """Whether it has ended by a SIGKILL, which is not its own fault."""
        return self._popen.returncode == -signal.SIGKILL

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        with contextlib.suppress(psutil.Error, OSError):
            return bool(psutil.Process(self._popen.pid).status() == psutil.STATUS_STOPPED)
        return False

    def usage(self) -> dict[str, float]:
        """Resident memory in bytes and CPU time in seconds; empty if it has ended."""
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(self._popen.pid)
            times = process.cpu_times()
            return {"rss_bytes": process.memory_info().rss, "cpu_s": round(times.user + times.system, 3)}
        return {}

    async def _pass_lines_on(self, stream: trio.abc.ReceiveStream) -> None:
        rest = b""
        async for data in stream:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._pass_on(line.decode("utf-8", "replace"))
        if rest:
            self._pass_on(rest.decode("utf-8", "replace"))

    def _pass_on(self, line: str) -> None:
        level, name, text = logging.WARNING, self._module, line
        fields: dict[str, Any] = {}
        if line.startswith(LOG_MARK):
            with contextlib.suppress(msgspec.DecodeError):
                level, name, text, fields = msgspec.json.decode(line[len(LOG_MARK) :], type=LogRecord)
        elif line.strip():
            self._lines.append(line.strip())
        if text.strip():
            extra = {**(self._extra or {}), "fields": fields}
            logging.getLogger(name).log(level, "%s", text.rstrip(), extra=extra)

    def _ended(self, code: int) -> str:
        said = next((line for line in self._lines if ASSERTION.search(line)), self._lines[-1] if self._lines else "")
        if code >= 0:
            how = f"the {self._name} process ended with exit code {code}"
        else:
            named = [number.name for number in signal.Signals if number == -code]
            how = f"the {self._name} process was ended by {named[0] if named else f'signal {-code}'}"
        return f"{how}: {said}" if said else how
