"""The socket of the real daemon: its mode, its owner, and obstacles at its path."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.real_daemon import ROOT, real_daemon, started, wait_ready


def serve(*flags, **options):
    """Run a daemon that is expected to fail; returns its exit code and stderr."""
    found = subprocess.run(
        [sys.executable, "-m", "uma_trio", "serve", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )
    return found.returncode, found.stderr


def refused(path, *words):
    code, stderr = serve("--socket", os.fspath(path))
    assert code == 1
    assert stderr.startswith("uma-trio serve: ")
    assert stderr.count("\n") == 1
    for word in (*words, "--socket"):
        assert word in stderr


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


def test_unusable_model_files(library, tmp_path):
    """One line of stderr each, and exit code 1."""
    from uma_trio.models.loaded import EMBEDDED

    whole = EMBEDDED.read_bytes()
    files = {
        "missing": None,
        "empty": b"",
        "wrong magic": b"GGML" + whole[4:200_000],
        "noise": os.urandom(50_000),
        "cut off in its header": whole[:5000],
        "cut off in its tensors": whole[: len(whole) // 2],
        "of version 1": whole[:4] + b"\x01" + whole[5:],
        "of version 4": whole[:4] + b"\x04" + whole[5:],
        "without tensors": whole[:8] + bytes(8) + whole[16:],
    }
    running = {}
    for name, data in files.items():
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        running[path] = _start(path, tmp_path)
        if len(running) % 3 == 0:  # three at a time
            _check(running)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a pipe").mkdir()
    os.mkfifo(tmp_path / "a pipe" / "model.gguf")
    for path in (tmp_path / "a folder", tmp_path / "a pipe" / "model.gguf"):
        running[path] = _start(path, tmp_path)
    _check(running)


def _start(path: Path, folder: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "uma_trio",
        "serve",
        "--model",
        str(path),
        "--socket",
        str(folder / f"{path.name}.s"),
    ]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def _check(running: dict[Path, subprocess.Popen[str]]) -> None:
    for path, process in running.items():
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1, (path, stderr)
        *before, last = stderr.splitlines()
        assert last.startswith("uma-trio serve: "), stderr
        assert str(path) in last
        assert not before, stderr
        assert not (path.parent / f"{path.name}.s").exists()
    running.clear()
