"""A child process that answers one question at a time, within limits of memory and time; replaced after it died.

A child that somebody kills or stops is replaced as well, and gets the question again.

For what cannot be bounded in this process: programs and grammars from anywhere.  The child sets its own limits.

Protocol: one JSON object per line.  The first line on the child's stdin is its setup, every later line a question.  Each
gets one line on its stdout.  A child that wants to be replaced adds ``LAST`` to its answer.  It ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final, TypeVar

import psutil

from uma_trio.processes.interpreter import package_environment
from uma_trio.processes.stopped import LOOK_S, StopDetector

T = TypeVar("T")

log = logging.getLogger(__name__)

START_SECONDS: Final = 30.0
"""Longest wait for a new child that imports its libraries: 50 to 500 ms on an idle machine."""

LEAST_WAIT_S: Final = 0.05
"""Between two looks at what a child has computed."""

LAST: Final = "last"

ENDED_FROM_OUTSIDE: Final = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
"""How a child ends that has done nothing wrong: by a user, or by a system that is short of memory."""
END_S: Final = 5.0
"""Longest wait for the end of a child that has closed its stdout."""


class CannotStart(Exception):
    """The child refuses its setup, or the system starts no process; the message says why."""


class NoAnswer(Exception):
    """The child died, or took too long; says which."""


class Interrupted(NoAnswer):
    """Not the question's fault: somebody else has ended the child, or the machine has left it no time."""


class Ended(Interrupted):
    """Somebody has killed or stopped the child, and the one after it; says how."""


class Sandbox:
    """The child process.  Starts at the first question, and again after it died.

    Thread-safe; questions from several threads take turns.  The process lives as long as this object, or the daemon.

    Args:
        command: a program and its arguments.
        setup: makes the first message of each new process.
        seconds: longest wait for an answer.
        busy_seconds: longest wait on a machine so busy that the child has not had ``seconds`` of CPU time yet, or
            ``START_SECONDS`` for its start.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: Callable[[], Mapping[str, Any]],
        seconds: float,
        busy_seconds: float = 0.0,
    ) -> None:
        self._command = command
        self._setup = setup
        self._seconds, self._busy_seconds = seconds, busy_seconds
        self._lock = threading.Lock()
        self._child = _Child()
        self._started_with: Mapping[str, Any] = {}
        weakref.finalize(self, self._child.stop)

    @property
    def is_running(self) -> bool:
        """Whether there is a process now."""
        return self._child.is_running

    def start(self) -> Mapping[str, Any]:
        """Start the process, unless it runs; returns what it has answered to its setup.

        Raises:
            CannotStart: the child refuses its setup, or no process can be started.
            Ended: somebody has ended it twice.
        """
        with self._lock:
            self._try_twice(self._ensure_started)
            return self._started_with

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to ``question``.  Blocks for ``seconds`` or ``busy_seconds``, plus a start and the turns of other threads.

        Raises:
            CannotStart: the child refuses its setup, or no process can be started.
            NoAnswer: it died, or took too long.
            Interrupted: the same, but not for what was asked.
        """

        def ask() -> dict[str, Any]:
            self._ensure_started()
            return self._child.ask(question, self._seconds, self._busy_seconds)

        with self._lock:
            answer = self._try_twice(ask)
            if answer.pop(LAST, False):
                self._child.stop()
            return answer

    def stop(self) -> None:
        """Kill the process and wait for its end.  The next question starts another one."""
        with self._lock:
            self._child.stop()

    def _try_twice(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Ended as error:
            log.warning("%s: %s; another one is asked", " ".join(self._command[-2:])[:200], error)
            return work()

    def _ensure_started(self) -> None:
        if self._child.is_running:
            return
        self._child.stop()  # closes the pipes of a process that something else has killed
        try:
            self._child.start(self._command)
            answer = self._child.ask(self._setup(), START_SECONDS, self._busy_seconds)
        except Ended:
            raise
        except (OSError, NoAnswer) as error:  # no memory, no file descriptors
            raise CannotStart(str(error)) from None
        if "error" in answer:
            self._child.stop()
            raise CannotStart(answer["error"])
        self._started_with = answer


class _Child:
    """The process itself, or none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str]) -> None:
        # In its own process group: Ctrl-C is for the daemon.  When the daemon ends, stdin closes and the child ends too.
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env={**os.environ, **package_environment()},
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a child that does not read must not stop this thread

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes the pipes and waits
                process.kill()

    def ask(self, question: Mapping[str, Any], seconds: float, busy_seconds: float = 0.0) -> dict[str, Any]:
        """Send one message and wait for its answer.  Stops a process that gives none."""
        try:
            return self._exchange(question, seconds, busy_seconds)
        except BaseException:
            self.stop()  # or the next question would get this one's answer
            raise

    @property
    def _cpu_s(self) -> float:
        """CPU time of the process so far; 0 if it has ended."""
        assert self._process is not None
        with contextlib.suppress(psutil.Error, OSError):
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _exchange(self, question: Mapping[str, Any], seconds: float, busy_seconds: float) -> dict[str, Any]:
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        began, computed_s = time.monotonic(), self._cpu_s
        deadline = began + seconds
        detector = StopDetector(self._process.pid)

        def wait_for(pipe: IO[bytes], event: int) -> None:
            nonlocal deadline
            poll = select.poll()
            poll.register(pipe, event)
            while not poll.poll(1000 * min(LOOK_S, max(0.0, deadline - time.monotonic()))):
                if detector.look():
                    raise Ended("its process was stopped by a signal")
                if time.monotonic() < deadline:
                    continue
                left_s = min(computed_s + seconds - self._cpu_s, began + busy_seconds - time.monotonic())
                if left_s <= 0:
                    raise self._too_slow(computed_s, seconds, busy_seconds)
                deadline = time.monotonic() + max(left_s, LEAST_WAIT_S)

        left = memoryview(json.dumps(question, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        with contextlib.suppress(BrokenPipeError):  # the process died; read() will return b""
            while left:
                wait_for(stdin, select.POLLOUT)
                left = left[stdin.write(left) or 0 :]
        answer = bytearray()
        while not answer.endswith(b"\n"):
            wait_for(stdout, select.POLLIN)
            chunk = stdout.read(1 << 20)
            if not chunk:
                raise self._died()
            answer += chunk
        decoded: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
        return decoded

    def _too_slow(self, computed_s: float, seconds: float, busy_seconds: float) -> NoAnswer:
        if busy_seconds and (used_s := self._cpu_s - computed_s) < seconds:
            return Interrupted(
                f"the machine is busy: in {busy_seconds:g} s its process got {max(0, used_s):.1f} s of CPU time"
            )
        return NoAnswer(f"it takes longer than {seconds:g} s")

    def _died(self) -> NoAnswer:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_S)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if code in ENDED_FROM_OUTSIDE:
                return Ended(f"its process was ended by {how}")
            return NoAnswer(
                f"its process died ({how}): it takes too much memory or time, or a library has a fault there"
            )
        return NoAnswer("its process closed its output and did not end")


def limit_memory(n_bytes: int) -> None:
    """Limit the address space of this process.  macOS does not enforce this; there, only the deadline bounds memory."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def limit_cpu(seconds: float) -> None:
    """End this process after ``seconds`` to ``seconds + 1`` more of CPU time, also if the parent is gone."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime + seconds) + 1, hard))
