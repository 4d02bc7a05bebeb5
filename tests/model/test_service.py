"""The daemon under a service manager: a socket that it is given, readiness, the watchdog."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_daemon import START_S, Daemon, Wire, started

VARIABLES = {"LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


class ServiceManager:
    """Listens for the daemon and starts it, as systemd does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "uma.sock"
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(self.path))
        self.listening.listen(16)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(folder / "notify"))
        self._notified.settimeout(START_S)

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()
        self._notified.close()

    @contextlib.contextmanager
    def start(self, *flags: str, **environment: str) -> Iterator[Daemon]:
        """Start the daemon with the socket as file descriptor 3."""
        fd = self.listening.fileno()
        command = (sys.executable, "-m", "uma_trio", "serve")
        with started(
            *flags,
            socket=self.path,
            log_file=self.folder / "log",
            environment={"LISTEN_FDS": "1", "NOTIFY_SOCKET": str(self.folder / "notify"), **environment},
            command=("bash", "-c", f'LISTEN_PID=$$ exec "$@" 3<&{fd} {fd}<&-', "bash", *command),
            pass_fds=(fd,),
        ) as daemon:
            yield daemon

    def wait_for(self, assignment: str) -> list[str]:
        """Wait for the notification with ``assignment``; returns all assignments up to its end."""
        found: list[str] = []
        while assignment not in found:
            found += self._notified.recv(4096).decode().split("\n")
        return found


@pytest.fixture
def manager(library: None, tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as found:
        yield found


def test_the_first_client_is_answered_and_the_socket_outlives_the_daemon(manager: ServiceManager) -> None:
    inode = manager.path.lstat().st_ino
    for _ in range(2):
        with Wire(manager.path, timeout_s=START_S) as early:
            early.send(id="early", prompt="Hello", max_tokens=2)  # before there is a daemon
            with manager.start() as daemon:
                assert manager.wait_for("READY=1") == [
                    "STATUS=loading the model",
                    "READY=1",
                    f"STATUS=serving embedded on {manager.path}",
                ]
                assert early.answer().reason == "length"
                assert daemon.ask(prompt="Hello", max_tokens=2).reason == "length"
                for process in daemon.processes[1:]:
                    assert not VARIABLES & set(process.environ()), process
                    assert not any(found.laddr == str(manager.path) for found in process.net_connections("unix"))
                daemon.signal(signal.SIGTERM)
                assert manager.wait_for("STOPPING=1") == ["STOPPING=1", "STATUS=draining"]
                assert daemon.wait() == 0
                assert "Traceback" not in daemon.logs()
        assert manager.path.lstat().st_ino == inode
        assert not Path(f"{manager.path}.lock").exists(), "there is nothing to lock"


def test_the_watchdog_is_pinged_by_a_daemon_that_serves(manager: ServiceManager) -> None:
    with manager.start(WATCHDOG_USEC="100000"):
        manager.wait_for("READY=1")
        for _ in range(5):
            manager.wait_for("WATCHDOG=1")


def test_a_socket_that_cannot_be_served_is_explained(manager: ServiceManager) -> None:
    manager.listening.close()
    manager.listening = socket.socket(socket.AF_INET)
    manager.listening.listen(1)
    with manager.start() as daemon:
        assert daemon.wait() == 1
        assert daemon.logs().startswith("uma-trio serve: systemd passed something else")
        assert daemon.logs().count("\n") == 1
