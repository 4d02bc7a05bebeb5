"""The daemon of ``uma-trio run``: found or started, and kept running for as long as a ``run`` needs it.

Each ``run`` locks a file, and the daemon ends when nobody has that file locked (``uma_trio.daemon.unlocked``).  The kernel
unlocks it when a ``run`` ends, whatever ended it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from uma_trio.cli.stdio import note
from uma_trio.connect.connector import connect_blocking
from uma_trio.connect.errors import ClientError, Loading, NoDaemon
from uma_trio.connect.reasons import RUN_YOUR_OWN, is_locked
from uma_trio.files import state_folder
from uma_trio.processes.interpreter import package_environment, python_module

POLL_S: Final = 0.05
"""How often to look whether a daemon that was started serves."""
KEEP: Final = b"keep"
"""See ``uma_trio.daemon.unlocked``."""


class NotStarted(ClientError):
    """A daemon was started, and has ended."""


@contextlib.contextmanager
def used(socket: Path, model: str, *, keep: bool, http: str | None) -> Iterator[bool]:
    """Have a daemon at ``socket`` until the end of the context, and one that was started so end after it.  Blocks.

    Args:
        model: the first one of a daemon that is started.
        keep: the daemon does not end with its last user.
        http: its address for HTTP, if it is started.

    Yields:
        Whether it was started now.

    Raises:
        NoDaemon: no daemon can be there.
        NotStarted: it has ended; the message says why.
    """
    folder = state_folder()
    name = f"run-{hashlib.sha256(os.fsencode(socket)).hexdigest()[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NoDaemon(
            f"cannot write into {folder}: {error.strerror}", "make it writable, or set XDG_STATE_HOME to another folder"
        ) from None
    try:
        _share(lock)
        starter = _Starter(socket, model, lock, folder / name, keep=keep, http=http)
        try:
            is_new = starter.ensure()
        except BaseException:
            starter.give_up()
            raise
        if keep:
            os.pwrite(lock, KEEP, 0)
        yield is_new
    finally:
        os.close(lock)


def _share(lock: int) -> None:
    """Lock the file together with others.  A daemon that is about to end has it for itself until it has ended."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if sys.stderr.isatty():
            note("waiting for the end of a daemon that is stopping; Ctrl-C gives up")
        fcntl.flock(lock, fcntl.LOCK_SH)


class _Starter:
    """Starts a daemon if there is none.  ``path`` with a suffix is where its lock and its log are."""

    def __init__(self, socket: Path, model: str, lock: int, path: Path, *, keep: bool, http: str | None) -> None:
        self._socket = socket
        self._lock = lock
        self._log = path.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        users = [] if keep else ["--stop-when-unlocked", str(path.with_suffix(".lock"))]
        self._flags = ["--socket", str(socket), "--model", model, "--load", "demand", *users]
        self._flags += [] if http is None else ["--http", http]

    def ensure(self) -> bool:
        """Wait until a daemon serves, and return whether this has started it."""
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    connect_blocking(self._socket).close()
                    return self._process is not None
                except Loading:
                    pass
                except NoDaemon as error:
                    self._start_or_fail(error, stack)
                time.sleep(POLL_S)

    def give_up(self) -> None:
        """End what was started."""
        if self._process is not None:
            self._process.terminate()

    def _start_or_fail(self, error: NoDaemon, stack: contextlib.ExitStack) -> None:
        if not error.may_appear:
            remedy = (
                "use a socket of your own: uma-trio run --socket PATH" if error.remedy == RUN_YOUR_OWN else error.remedy
            )
            raise NoDaemon(error.reason, remedy) from None
        if is_locked(self._socket):
            return  # it starts, or it ends
        if self._process is None:
            if sys.stderr.isatty():
                from rich.console import Console

                stack.enter_context(Console(stderr=True).status("starting a daemon"))
            self._start()
        elif self._process.poll() is not None:
            raise NotStarted(f"{self._reason()}; its log is {self._log}")

    def _start(self) -> None:
        os.ftruncate(self._lock, 0)
        with self._log_file() as log:
            self._process = subprocess.Popen(
                [*python_module("uma_trio"), "serve", *self._flags],
                env={**os.environ, **package_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C in this terminal is not for the daemon, nor is the end of the terminal
            )

    def _log_file(self) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.fdopen(os.open(self._log, flags, 0o600), "ab")

    def _reason(self) -> str:
        """Why the daemon has ended: its own last words."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = [line.partition(": ")[2] for line in lines if line.startswith("uma-trio serve: ")]
        return f"the daemon did not start: {(said or lines or ['it said nothing'])[-1]}"
