"""The socket of the real daemon: its mode, its owner, and obstacles at its path."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time

import pytest

from tests.support.commands import invoke
from tests.support.real_daemon import real_daemon, started, wait_ready


def refused(path, *words):
    found = invoke("serve", "--socket", path)
    assert found.returncode == 1
    assert found.stderr.startswith("uma-trio serve: ")
    assert found.stderr.count("\n") == 1
    for word in (*words, "--socket"):
        assert word in found.stderr


def test_the_socket_is_private_from_the_start_under_any_umask(library, tmp_path):
    """A thread that polls the mode never sees another one."""
    path, modes, stop = tmp_path / "uma.sock", set(), threading.Event()

    def watch():
        last = False
        while not last:
            last = stop.is_set()  # look once more, in case the thread did not run before
            try:
                modes.add(stat.S_IMODE(os.lstat(path).st_mode))
            except FileNotFoundError:
                time.sleep(0)

    watcher = threading.Thread(target=watch)
    with started(socket=path, log_file=tmp_path / "log", umask=0) as daemon:
        watcher.start()
        try:
            wait_ready(daemon)
        finally:
            stop.set()
            watcher.join()
        assert modes == {0o600}
        assert stat.S_IMODE(os.stat(f"{path}.lock").st_mode) == 0o600
        assert stat.S_ISSOCK(path.lstat().st_mode)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert not path.exists()


def test_a_second_daemon_on_the_same_path_is_refused(library, daemon):
    refused(daemon.socket, f"another daemon (process {daemon.pid}) serves")
    assert daemon.ask(prompt="Hello", max_tokens=2).reason in ("stop", "length")


def test_the_next_daemon_replaces_the_socket_of_a_killed_one(library, tmp_path):
    with real_daemon(folder=tmp_path) as first:
        first.signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / "uma.sock").exists(), "SIGKILL leaves no time to remove it"
        with real_daemon(folder=tmp_path) as second:
            assert second.ask(prompt="Hello", max_tokens=2).reason in ("stop", "length")
            second.logged("removed the socket of a dead daemon")


def test_an_obstacle_at_the_path_is_named_and_kept(library, tmp_path):
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("kept")
    folder.mkdir()
    link.symlink_to(file)
    for path in (file, folder, link):
        refused(path, "not a socket", str(path))
    assert file.read_text() == "kept"
    assert link.is_symlink()
    refused(tmp_path / ("x" * 120), "bytes")
    refused(file / "uma.sock", "is not a folder")
    taken = tmp_path / "taken"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(taken))
        other.listen(1)
        refused(taken, "another program")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's socket")
def test_a_foreign_socket_is_kept(library, tmp_path):
    path = tmp_path / "foreign"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    os.chown(path, 12345, 12345)
    refused(path, "belongs to another user")
    assert path.exists()
