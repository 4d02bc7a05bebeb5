"""Commands and children of ``uma-trio`` that start in a fork of a process that has imported them: the imports are most of a start.

    process = Forked([*UMA_TRIO, "ask", "hello"], stdout=subprocess.PIPE)

A server, which has no threads, forks for this process.  The process between the server and the command ends at once, and
this process adopts the command, so it is its parent as always.  A daemon has a server of its own, which forks before the
daemon has threads: for its engines, gateways, runtimes of controllers, and the processes for templates and grammars.  So
has a runtime of controllers, for its compilers.

A daemon learns what ticks cost from its ticks: it measures nothing before the first client comes, which takes longer than
most tests.  Its gateway has no standby without ``WITH_STANDBY`` in the environment.  The controllers that come with
uma-trio are compiled once in a run, by the first runtime that needs them, but for one with ``WITH_COMPILER``.  What reads the
environment while it is imported, as ``huggingface_hub`` does, is not among the imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import inspect
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import setproctitle

from tests.support.run import locked, run_folder
from uma_trio.daemon.prompts.chat import WORKER

ROOT: Final = Path(__file__).parents[2]
UMA_TRIO: Final = (sys.executable, "-m", "uma_trio")
TEMPLATE_WORKER: Final = "uma_trio.daemon.prompts.template_worker"
"""Starts by its path."""
FORKED: Final = {
    "uma_trio": ("uma_trio.__main__", "run"),
    **{
        f"uma_trio.{name}": (f"uma_trio.{name}.__main__", "main")
        for name in ("encoder", "engine", "gateway", "grammar")
    },
    **{name: (name, "main") for name in (TEMPLATE_WORKER, "uma_trio.aici.runtime.compiler")},
}
"""What may start in a fork: by the module of the command, the module and the function that run."""
PRELOADED: Final = (
    *(module for module, _ in FORKED.values()),
    *(f"uma_trio.aici.runtime.{name}" for name in ("command", "server")),
    *(f"uma_trio.cli.{name}" for name in ("aicirt", "ask", "chat", "chat_loop", "controllers", "keys", "metrics")),
    "uma_trio.cli.metrics_view",
    *(f"uma_trio.cli.{name}" for name in ("model_option", "models", "pull", "run", "run_trio", "serve", "sessions")),
    "uma_trio.cli.tokenize",
    *(f"uma_trio.daemon.{name}" for name in ("logs", "server")),
    *(f"uma_trio.engine.{name}" for name in ("open_fitted", "worker")),
    "uma_trio.gateway.process",
)
TITLE: Final = "tests: forks commands"
"""Title of a server."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
LIBC: Final = ctypes.CDLL(None)
MESSAGE_BYTES: Final = 1 << 20
MAX_FDS: Final = 16
WITH_STANDBY: Final = {"PYTEST_UMA_TRIO_STANDBY": "1"}
"""A standby is another process that imports all of the gateway, some seconds after each start."""
WITH_COMPILER: Final = {"PYTEST_UMA_TRIO_COMPILER": "1"}
"""To compile the largest controller of ours takes some seconds."""

Run = Callable[[], object]


def can_fork(environment: Mapping[str, str], options: Iterable[str] = ()) -> bool:
    """Whether a command may start in a fork, with these variables more and options of ``Popen``.

    Nothing about its Python may differ from this one.

    Programs that measure coverage begin with a process.
    """
    special = any(name.startswith("PYTHON") and os.environ.get(name) != value for name, value in environment.items())
    return (
        sys.platform == "linux"
        and not special
        and {*options} <= {"umask"}
        and "COVERAGE_PROCESS_START" not in os.environ
    )


class Forked(subprocess.Popen[Any]):
    """``subprocess.Popen``, which forks if the command runs one of ``FORKED``.

    With ``start_new_session`` a terminal that is its stdin becomes that of its session.
    """

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        command = [os.fsdecode(each) for each in given["args"]]
        if command[:1] != [sys.executable] or _module_of(command)[0] not in FORKED:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        standard = [own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        passed = sorted(given["pass_fds"])
        message = {
            "command": command,
            "numbers": [0, 1, 2, *passed],
            "environment": {**(os.environ if given["env"] is None else given["env"])},
            "folder": os.path.abspath(given["cwd"] or "."),
            "group": given["process_group"] == 0,
            "session": given["start_new_session"],
            "umask": given["umask"],
        }
        self.pid = _server.fork(message, [*standard, *passed])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_forked(
    arguments: Sequence[object], folder: Path, environment: Mapping[str, str], *, timeout_s: float = 60, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``uma-trio``, as ``subprocess.run`` does; it is killed after a time."""
    command = [*UMA_TRIO, *map(str, arguments)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Forked(command, cwd=folder, env=environment, text=True, **pipes) as process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def program(folder: Path) -> Iterator[Path]:
    """A program for shells, ``uma-trio`` in ``folder``, which starts in a fork if it can.  It passes SIGINT and SIGTERM on."""
    path, file = folder / "forks", folder / "uma-trio"
    with contextlib.ExitStack() as stack:
        if can_fork({}):
            file.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
            server = stack.enter_context(Forked([*UMA_TRIO, SERVE_PROGRAMS, str(path)]))
            stack.callback(server.kill)
            while not path.exists():
                assert server.poll() is None
                time.sleep(0.01)
        else:
            file.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m uma_trio "$@"\n')
        file.chmod(0o755)
        yield file


# -- the server -------------------------------------------------------------------------------------


class _Server:
    """The server of this process, which starts at the first command."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, message: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Start a command; returns its number as soon as this process is its parent."""
        with self._lock:
            sock = self._sock = self._sock or _start_server()
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(sock, [json.dumps(message).encode()], fds)
                pid = sock.recv(MESSAGE_BYTES)
            finally:
                LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0)
            if not pid:
                raise OSError("the server that forks has ended")
            return int(pid)

    def fork_server(self) -> Run | None:
        """Make a fork of this process its server.  Returns what each child of that is to run; here ``None``."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            return None
        self._sock.close()
        self._sock = None
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return serve(theirs)


_server = _Server()


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"from tests.support.forked import main; main({theirs.fileno()})"
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


def main(fd: int) -> NoReturn:
    """Be a server for the process at the other end of the socket, until it ends."""
    sys.path[0] = str(ROOT)  # was the current folder
    gc.disable()  # and frozen below, so that no child looks at, and copies, what all of them have
    for name in PRELOADED:
        importlib.import_module(name)
    _compute_what_is_kept()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end(serve(socket.socket(fileno=fd), daemons=True))


def _compute_what_is_kept() -> None:
    """What each daemon computes once, at its first metrics and its first request."""
    import numpy as np

    from uma_trio import config
    from uma_trio.protocol.field_errors import unknown_fields
    from uma_trio.protocol.requests import Generate

    np.percentile([1.0], 50)  # imports numpy.ma
    config.settings()
    unknown_fields({"type": "generate"}, Generate)


def serve(sock: socket.socket, *, daemons: bool = False) -> Run:
    """Fork what the other end asks for, and end with it.  Returns only in children: what they are to run."""
    setproctitle.setproctitle(TITLE)
    _close_all_but(0, 1, 2, sock.fileno())
    while True:
        message, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, MAX_FDS)
        if not message:
            os._exit(0)
        gate, is_adopted = os.pipe()
        if not (between := os.fork()):
            if os.fork():
                os._exit(0)
            os.close(is_adopted)
            os.read(gate, 1)  # returns when the server has seen the end of the process between
            if daemons:
                LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            return _become(fds, sock, **json.loads(message))
        os.waitpid(between, 0)
        for each in (gate, is_adopted, *fds):
            os.close(each)


# -- what is forked ---------------------------------------------------------------------------------


def _become(
    fds: Sequence[int],
    report: socket.socket | None,
    command: Sequence[str],
    numbers: Sequence[int],
    environment: Mapping[str, str],
    folder: str,
    group: bool = False,
    session: bool = False,
    umask: int = -1,
) -> Run:
    """Become the command: its group, descriptors, environment, folder and arguments.  Its number goes to ``report``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    if session:
        os.setsid()
    elif group:
        os.setpgid(0, 0)
    setproctitle.setproctitle(" ".join(command).encode("utf-8", "replace").decode())
    if report is not None:
        report.send(str(os.getpid()).encode())
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    if report is not None:
        report.detach()
    _close_all_but(*numbers)
    if session and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if umask >= 0:
        os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    name, arguments = _module_of(command)
    found, function = FORKED[name]
    module = importlib.import_module(found)
    sys.argv = [str(module.__file__), *arguments]
    if arguments[:1] == ["serve"]:
        return _server.fork_server() or _daemon
    if arguments[:1] == [SERVE_PROGRAMS]:
        return serve_programs
    if arguments[:1] == ["aicirt"]:
        if not WITH_COMPILER.items() <= environment.items():
            _compile_once()
        return _server.fork_server() or _runtime
    run: Run = getattr(module, function)
    return run


def _module_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The module that Python runs, and its arguments; an empty name if it runs something else."""
    rest = [*command[1:]]
    if rest[:1] == ["-P"]:
        del rest[0]
    if rest == [str(WORKER)]:
        return TEMPLATE_WORKER, []
    return (rest[1], rest[2:]) if rest[:1] == ["-m"] else ("", [])


def _daemon() -> None:
    from uma_trio.__main__ import run
    from uma_trio.daemon import gateway_process
    from uma_trio.daemon.engines.calibrate import calibrate

    defaults: Any = calibrate.__kwdefaults__
    defaults["budget_s"] = 0.0
    if not WITH_STANDBY.items() <= os.environ.items():
        gateway_process.FIRST_STANDBY_S = math.inf  # type: ignore[misc]
    subprocess.Popen = Forked  # type: ignore[misc]
    run()


def _runtime() -> None:
    from uma_trio.__main__ import run

    subprocess.Popen = Forked  # type: ignore[misc]
    run()


def _compile_once() -> None:
    """Keep the machine code of our controllers in the folder of the run."""
    from uma_trio.aici.runtime.host import WasmHost

    compile_anew = WasmHost.compile

    def compile(self: WasmHost, wasm: bytes, *, is_ours: bool = False) -> bytes:
        if not is_ours:
            return compile_anew(self, wasm)
        path = run_folder() / f"{hashlib.sha256(wasm).hexdigest()}.elf"
        with locked("compiler"):
            if not path.exists():
                begun = path.with_suffix(".begun")
                begun.write_bytes(compile_anew(self, wasm, is_ours=True))
                begun.rename(path)
        return path.read_bytes()

    WasmHost.compile = compile  # type: ignore[method-assign]


def _end(run: Run) -> NoReturn:
    """Run it and end, without the work that Python does at its end."""
    code: object = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001  (it is printed)
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code if isinstance(code, int) else 0)


def _close_all_but(*kept: int) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # that of the list
                os.close(fd)


# -- programs for shells ----------------------------------------------------------------------------

SERVE_PROGRAMS: Final = "serve-programs"
PROGRAM: Final = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect({path!r})
    command = [sys.executable, "-m", "uma_trio", *sys.argv[1:]]
    message = dict(command=command, numbers=[0, 1, 2], environment=dict(os.environ), folder=os.getcwd())
    data = json.dumps(message).encode()
    socket.send_fds(sock, [b"%08d" % len(data)], [0, 1, 2])
    sock.sendall(data)
    os.closerange(0, 3)
    pid = int(sock.recv(8, socket.MSG_WAITALL))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = sock.recv(1)
os._exit(code[0])
"""


def serve_programs() -> None:
    """Listen for programs, and run a command for each."""
    path = sys.argv[2]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{path}.new")
        listening.listen(16)
        os.rename(f"{path}.new", path)
        while True:
            client, _ = listening.accept()
            if not os.fork():
                _run_for(client)
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    """One less."""


def _run_for(client: socket.socket) -> NoReturn:
    """Run the command of one program; it ends with the program."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    size, fds, _, _ = socket.recv_fds(client, 8, 3)
    message = json.loads(client.recv(int(size), socket.MSG_WAITALL))
    if not (pid := os.fork()):
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _end(_become(fds, None, **message))
    client.send(b"%08d" % pid)
    for fd in fds:
        os.close(fd)
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    ended.register(client, select.POLLHUP)
    ended.poll()
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)
