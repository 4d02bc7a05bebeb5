"""A child process of the daemon: ended with the daemon, its log lines in the daemon's log."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import trio

from uma_trio.processes.interpreter import package_environment, python_module
from uma_trio.processes.parent_process import LAST_WORDS, LOG_MARK, READY
from uma_trio.processes.stopped import LOOK_S, StopDetector

LogRecord = tuple[int, str, str, dict[str, Any]]
"""Level, logger, message, fields."""

LAST_LINES: Final = 20
"""Lines of plain text on the child's stderr that are kept, to say why it ended."""

LAST_LINES_S: Final = 1.0
"""How long to wait for the end of the stderr of a child that has ended."""

POLL_S: Final = 0.1
"""How often to look whether a child has ended, where the system does not report it."""

ASSERTION: Final = re.compile(
    r"GGML_ASSERT\(.*\) failed|GGML_ABORT|ggml_abort|terminate called|CUDA error|what\(\):|^Fatal Python error"
)
TRACE: Final = re.compile(r"\s*File \"|Current thread|Thread 0x|Extension modules:|<no Python frame>")
"""A line of a traceback, which does not say why the child has ended."""


class ChildProcess:
    """A program that runs next to the daemon, in a process group of its own.

    The child ends with this process in any case.  Its standard input closes and its parent changes.  Its process group
    becomes an orphan: if the child is stopped, the kernel sends ``SIGHUP`` and ``SIGCONT`` to the group.  ``kill`` and the end of the
    child end its own children as well.

    Args:
        command: the program and its arguments.
        name: how the reason of its end calls it, such as ``engine``.
        logger: for lines of plain text.
        pass_fds: descriptors that the child inherits.  The caller closes its own copies.
        environment: variables, in addition to those of this process.
        folder: working directory.
        keep_stdout: its standard output belongs to the log as well.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        logger: str,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        keep_stdout: bool = False,
    ) -> None:
        self._output, output = os.pipe()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output if keep_stdout else subprocess.DEVNULL,
                stderr=output,
                pass_fds=pass_fds,
                env={**os.environ, **(environment or {})},
                cwd=folder,
                process_group=0,  # Ctrl-C in a terminal asks the daemon to drain, which needs its children
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(output)
        self.pid: int | None = self._popen.pid
        self._name = name
        self._logger = logger
        self.extra: Mapping[str, str] = {}
        """Fields of each of its log records."""
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._was_stopped = False
        self.ready = trio.Event()
        """Set when the child reports that it can do its work."""
        self.cannot_start: str | None = None
        """Why it could not start."""

    @classmethod
    def of_module(
        cls,
        module: str,
        sock: socket.socket,
        *arguments: str,
        name: str,
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        """Start a module of this package in an interpreter of its own: ``python -m MODULE FD ARGUMENTS``.

        Args:
            sock: inherited by the child.  The caller closes its own copy.
        """
        command = [*python_module(module), str(sock.fileno()), *arguments]
        fds = [sock.fileno()]
        variables = {**package_environment(), **(environment or {})}
        return cls(command, name=name, logger=module, pass_fds=fds, environment=variables)

    def kill(self) -> None:
        """End the child at once, whatever it does, with all that it has started."""
        if self._popen.returncode is None:  # so its number is not yet that of another process
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def discard(self) -> None:
        """End a child for which ``wait`` was not called, and will not be.  Blocks until it has ended."""
        assert self._popen.stdin is not None
        self.kill()
        self._popen.wait()
        self._popen.stdin.close()
        os.close(self._output)

    async def wait(self) -> str:
        """Pass the child's log lines on until it ends, and kill it if a signal stops it; return how it ended."""
        assert self._popen.stdin is not None
        try:
            async with trio.lowlevel.FdStream(self._output) as stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_lines_on, stream)
                async with trio.open_nursery() as watch:
                    watch.start_soon(self._kill_if_stopped)
                    await self._ended_or_zombie()
                    watch.cancel_scope.cancel()
                self.kill()  # its own children may hold its stderr open
                nursery.cancel_scope.deadline = trio.current_time() + LAST_LINES_S
            code = self._popen.wait()
        finally:
            if self._popen.poll() is None:  # the daemon does not wait any more
                self.kill()
                self._popen.wait()
            self._popen.stdin.close()
        return self._ended(code)

    async def _ended_or_zombie(self) -> None:
        try:
            descriptor = os.pidfd_open(self._popen.pid)
        except (AttributeError, OSError):  # not Linux, or an old one
            while self._popen.poll() is None:  # noqa: ASYNC110  (nothing else reports it)
                await trio.sleep(POLL_S)
        else:
            try:
                await trio.lowlevel.wait_readable(descriptor)
            finally:
                os.close(descriptor)

    async def _kill_if_stopped(self) -> None:
        """Kill the child if a signal has stopped it: its callers would wait for ever."""
        detector = StopDetector(self._popen.pid)
        while not self._was_stopped:
            await trio.sleep(LOOK_S)
            self._was_stopped = detector.look()
        self.kill()

    def begin(self) -> None:
        """Let a child begin its work that waits for its turn (``parent_process.wait_for_turn``).  To be called once."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is closed: ``wait`` says why
            os.write(self._popen.stdin.fileno(), b"\n")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self._popen.returncode is None:
            self._popen.send_signal(number)

    @property
    def was_killed(self) -> bool:
        """Whether it has ended by a SIGKILL, which is not its own fault."""
        return self._popen.returncode == -signal.SIGKILL

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
        level, name, text = logging.WARNING, self._logger, line
        fields: dict[str, Any] = {}
        if line == READY:
            self.ready.set()
            return
        if line.startswith(LAST_WORDS):
            self.cannot_start = line.removeprefix(LAST_WORDS)
            return
        if line.startswith(LOG_MARK):
            with contextlib.suppress(msgspec.DecodeError):
                level, name, text, fields = msgspec.json.decode(line[len(LOG_MARK) :], type=LogRecord)
        elif line.strip() and not TRACE.match(line):
            self._lines.append(line.strip())
        if text.strip():
            extra = {**self.extra, "fields": fields}
            logging.getLogger(name).log(level, "%s", text.rstrip(), extra=extra)

    def _ended(self, code: int) -> str:
        said = next((line for line in self._lines if ASSERTION.search(line)), self._lines[-1] if self._lines else "")
        if self._was_stopped:
            how = f"the {self._name} process was stopped by a signal, and killed"
        elif code >= 0:
            how = f"the {self._name} process ended with exit code {code}"
        else:
            named = [number.name for number in signal.Signals if number == -code]
            how = f"the {self._name} process was ended by {named[0] if named else f'signal {-code}'}"
        return f"{how}: {said}" if said else how
