"""The socket's path, which files are replaced and which are never removed; and accepting clients."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys

import pytest
import trio

from uma_trio.daemon.doors import claim, listener
from uma_trio.daemon.doors.claim import SocketPathError, claimed
from uma_trio.daemon.doors.listener import bind
from uma_trio.protocol.address import MAX_PATH_BYTES, lock_path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "uma.sock"


def dead_socket(path):
    """Make the socket file that a killed daemon leaves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_the_path_is_free_again_after_use(path):
    for _ in range(2):
        with claimed(path), bind(path, backlog=1) as sock:
            assert stat.S_ISSOCK(path.lstat().st_mode)
            assert sock.getblocking() is False
        assert not path.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_may_connect(path, umask):
    before = os.umask(umask)
    try:
        with claimed(path), bind(path, backlog=1):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            assert os.umask(umask) == umask, "the process's umask is put back"
    finally:
        os.umask(before)


def test_the_mode_is_right_from_the_start(path, monkeypatch):
    """The file is private when ``bind(2)`` returns, without a later ``chmod``."""
    seen = []

    class Watched(socket.socket):
        def bind(self, address):
            super().bind(address)
            seen.append(stat.S_IMODE(os.lstat(address).st_mode))

    monkeypatch.setattr(listener.socket, "socket", Watched)
    before = os.umask(0)
    try:
        bind(path, backlog=1).close()
    finally:
        os.umask(before)
    assert seen == [0o600]


def test_a_new_folder_is_private(tmp_path):
    before = os.umask(0)
    try:
        with claimed(tmp_path / "new" / "uma.sock"):
            assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_dead_daemons_socket_is_removed(path):
    dead_socket(path)
    with claimed(path):
        assert not path.exists()
        bind(path, backlog=1).close()


def test_the_target_of_a_stale_symlink_is_not_touched(path, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    path.symlink_to(precious)
    with pytest.raises(SocketPathError, match="not a socket"), claimed(path):
        pass
    assert path.is_symlink()
    assert precious.read_text() == "kept"


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "dangling symlink", "symlink to a socket", "pipe"])
def test_files_that_are_not_our_socket_stay(path, tmp_path, kind):
    match kind:
        case "file":
            path.write_text("kept")
        case "directory":
            path.mkdir()
        case "symlink":
            path.symlink_to(tmp_path)
        case "dangling symlink":
            path.symlink_to(tmp_path / "nothing")
        case "symlink to a socket":
            dead_socket(tmp_path / "other")
            path.symlink_to(tmp_path / "other")
        case "pipe":
            os.mkfifo(path)
    before = path.lstat()
    with pytest.raises(SocketPathError, match="--socket"), claimed(path):
        pass
    assert path.lstat().st_ino == before.st_ino


def test_another_users_socket_stays(path, monkeypatch):
    dead_socket(path)
    monkeypatch.setattr(listener.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SocketPathError, match="belongs to another user"), claimed(path):
        pass
    assert path.exists()


def test_a_second_daemon_is_refused_whatever_the_first_is_doing(path):
    with claimed(path):  # not yet bound: it still loads its model
        with pytest.raises(SocketPathError, match="another daemon"), claimed(path):
            pass
        with bind(path, backlog=1):
            with pytest.raises(SocketPathError, match="another daemon"), claimed(path):
                pass
            assert path.exists()
    with claimed(path):
        pass


def test_the_socket_of_another_program_that_listens_stays(path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        with pytest.raises(SocketPathError, match="another program"), claimed(path):
            pass
        assert path.exists()


def test_the_socket_of_another_program_with_a_full_backlog_stays(path):
    with (
        socket.socket(socket.AF_UNIX) as other,
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
    ):
        other.bind(str(path))
        other.listen(0)
        for sock in (first, second):
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except BlockingIOError:
                break
        with pytest.raises(SocketPathError, match="--socket"), claimed(path):
            pass
        assert path.exists()


def test_a_lock_file_that_is_a_symlink_is_not_followed(path, tmp_path):
    target = tmp_path / "target"
    os.symlink(target, f"{path}.lock")
    with pytest.raises(SocketPathError, match="cannot use"), claimed(path):
        pass
    assert not target.exists()


def test_a_lock_file_that_is_a_fifo_is_refused_although_somebody_holds_its_lock(path):
    """A daemon that waits for it, or looks into it for a process id, would have to know what it is first."""
    os.mkfifo(lock_path(path))
    holder = os.open(lock_path(path), os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(SocketPathError, match=r"uma\.sock\.lock is not a regular file: remove it"), claimed(path):
            pass
    finally:
        os.close(holder)


def test_the_lock_ends_with_its_process(path):
    """A killed daemon leaves no lock."""
    hold = f"from pathlib import Path\nfrom uma_trio.daemon.doors.claim import claimed\nwith claimed(Path({str(path)!r})):\n print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SocketPathError, match="another daemon"), claimed(path):
            pass
        holder.kill()
        holder.wait()
        with claimed(path):
            pass


@pytest.mark.parametrize("extra", [0, 1, 200])
def test_a_path_that_is_too_long_is_explained(tmp_path, extra):
    longest = tmp_path / ("x" * (MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1))
    if not extra:
        with claimed(longest), bind(longest, backlog=1):
            return
    with (
        pytest.raises(SocketPathError, match=f"has {MAX_PATH_BYTES + extra}"),
        claimed(longest.with_name(longest.name + "x" * extra)),
    ):
        pass


def test_the_length_of_a_path_is_counted_in_bytes(tmp_path):
    path = tmp_path / ("é" * 60)
    with pytest.raises(SocketPathError, match="bytes"), claimed(path):
        pass


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketPathError, match="file is not a folder"), claimed(tmp_path / "file" / "uma.sock"):
        pass


def passed_variables(n=1, pid=None):
    return {"LISTEN_PID": str(pid or os.getpid()), "LISTEN_FDS": str(n), "LISTEN_FDNAMES": "uma-trio.socket"}


def test_a_passed_socket_is_taken_and_stays_when_it_is_closed(path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen(1)
        monkeypatch.setattr(claim, "FIRST_PASSED_FD", os.dup(owner.fileno()))
        os.set_inheritable(claim.FIRST_PASSED_FD, True)
        environment = {"HOME": "/", **passed_variables()}
        with claim.take_passed(environment) as taken:
            assert environment == {"HOME": "/"}
            assert (taken.getsockname(), taken.getblocking(), taken.get_inheritable()) == (str(path), False, False)
        assert path.exists()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize(
    "environment", [{}, passed_variables(0), passed_variables(pid=1), passed_variables("x"), {"LISTEN_FDS": "1"}]
)
def test_without_a_passed_socket_there_is_none(environment):
    """Variables that were inherited from another process do not count."""
    assert claim.take_passed(environment) is None
    assert environment == {}


@pytest.mark.parametrize("kind", ["two", "closed", "file", "tcp", "not listening", "datagrams", "abstract"])
def test_a_passed_socket_that_cannot_be_served_is_explained(path, monkeypatch, kind):
    with socket.socket(
        socket.AF_INET if kind == "tcp" else socket.AF_UNIX,
        socket.SOCK_DGRAM if kind == "datagrams" else socket.SOCK_STREAM,
    ) as owner:
        if kind != "tcp":
            owner.bind(f"\0uma-trio-{os.getpid()}" if kind == "abstract" else str(path))
        if kind in ("tcp", "abstract"):
            owner.listen(1)
        fd = os.open(os.devnull, os.O_RDONLY) if kind == "file" else os.dup(owner.fileno())
        if kind == "closed":
            os.close(fd)
        monkeypatch.setattr(claim, "FIRST_PASSED_FD", fd)
        with pytest.raises(SocketPathError, match=r"systemd passed .* uma-trio service install"):
            claim.take_passed(passed_variables(2 if kind == "two" else 1))
        if kind in ("two", "file"):
            os.close(fd)


class Starved:
    """A listening socket whose first ``n`` calls to ``accept`` fail."""

    def __init__(self, sock, n, error):
        self._sock, self._left, self._error = sock, n, error
        self.called_at = []

    def fileno(self):
        return self._sock.fileno()

    def accept(self):
        self.called_at.append(trio.current_time())
        if self._left:
            self._left -= 1
            raise OSError(self._error, os.strerror(self._error))
        return self._sock.accept()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_accepting_backs_off_without_file_descriptors(autojump_clock, path, error):
    served = []

    async def handler(sock):
        served.append(trio.current_time())
        sock.close()

    with bind(path, backlog=4) as sock, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        starved = Starved(sock, 50, error)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.accept_forever, starved, handler, nursery)
            with trio.fail_after(60):
                while not served:
                    await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
    gaps = [later - sooner for sooner, later in zip(starved.called_at, starved.called_at[1:], strict=False)][:50]
    assert min(gaps) > 0.99 * listener.BACK_OFF_S


@pytest.mark.parametrize("error", [errno.ECONNABORTED, errno.EAGAIN])
async def test_a_client_that_left_before_it_was_accepted_is_ignored(autojump_clock, path, error):
    served = []

    async def handler(sock):
        served.append(sock)
        sock.close()

    with bind(path, backlog=4) as sock, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.accept_forever, Starved(sock, 3, error), handler, nursery)
            with trio.fail_after(60):
                while not served:
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()


async def test_accepted_sockets_do_not_block_and_are_not_inherited(path):
    found = []

    async def handler(sock):
        found.append((sock.getblocking(), os.get_inheritable(sock.fileno())))
        sock.close()

    with bind(path, backlog=4) as sock, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.accept_forever, sock, handler, nursery)
            with trio.fail_after(60):
                while not found:
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
    assert found == [(False, False)]
