"""Connecting to the daemon's socket: the one rule for its path, and what to do when nobody answers."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import uma_trio
from tests.support.cases import all_cases
from uma_trio import config
from uma_trio.cli import COMMANDS, main
from uma_trio.client import Loading, NoDaemon
from uma_trio.connect import connector
from uma_trio.connect.connector import START_RETRY_S, Connector
from uma_trio.connect.reasons import explain
from uma_trio.protocol.address import MAX_PATH_BYTES, default_socket_path, lock_path, socket_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "uma.sock"


@pytest.fixture
def locked(path: Path) -> Iterator[int]:
    """The lock that a daemon holds from before it loads its model until it has ended."""
    with open(lock_path(path), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def refusing(path: Path) -> None:
    """Leave a socket behind on which nobody listens."""
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(os.fspath(path))


def attempt(path: Path, **options: float | None) -> socket.socket | float:
    return Connector(path, **{"wait_s": 0, **options}, now=0).attempt(0)  # type: ignore[arg-type]


# -- where ------------------------------------------------------------------------------------------------

CLIENT_COMMANDS = [name for name in COMMANDS if name not in ("run", "serve", "doctor", "demo", "tokenize", "replay")]
"""Commands that need a running daemon if they have ``--socket``.  Run starts one, the demo unless it gets a socket,
tokenize reads a file without one, and replay looks into its log first."""

ARGUMENTS = {"ask": ["hi"], "explain": ["r1"], "batch": [__file__], "rerank": ["query", "document"]}


@all_cases("name", CLIENT_COMMANDS)
def test_every_command_finds_the_socket_by_the_same_rule_and_names_it(name: str, path: Path) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    options = {flag for option in command.params for flag in option.opts}
    if "--socket" not in options:
        return
    assert {"-v", "--verbose"} <= options
    arguments = [name, *ARGUMENTS.get(name, [])]
    for given, environment in (([], {"UMA_SOCKET": str(path)}), (["--socket", str(path)], {"UMA_SOCKET": "/other"})):
        found = CliRunner().invoke(main, [*arguments, *given], env=environment)
        assert found.exit_code == 2
        assert f"no daemon at {path}" in found.output


def test_the_python_client_and_the_server_have_the_same_rule(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMA_SOCKET", str(path))
    with pytest.raises(NoDaemon, match=f"no daemon at {path}"):
        uma_trio.ask("x")
    assert config.load(None, {"UMA_SOCKET": str(path)}).listen.socket == default_socket_path()


def test_a_given_path_comes_first_and_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMA_SOCKET", "/other")
    assert socket_path("~/uma.sock") == Path.home() / "uma.sock"
    assert socket_path(None) == Path("/other")


# -- why not ------------------------------------------------------------------------------------------------


def test_nobody_is_there(path: Path) -> None:
    with pytest.raises(NoDaemon, match="uma-trio serve"):
        attempt(path)
    refusing(path)
    with pytest.raises(NoDaemon, match="only the socket of one that has ended"):
        attempt(path)


def test_the_remedy_names_the_socket_unless_it_is_the_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDaemon, match=rf"uma-trio serve --socket {path}$"):
        attempt(path)
    monkeypatch.setenv("UMA_SOCKET", str(path))
    with pytest.raises(NoDaemon, match=r"uma-trio serve$"):
        attempt(path)


def test_an_old_lock_file_is_no_daemon(path: Path) -> None:
    lock_path(path).touch()
    with pytest.raises(NoDaemon, match="no daemon at") as caught:
        attempt(path)
    assert not isinstance(caught.value, Loading)


def make_fifo(at: Path) -> None:
    os.mkfifo(at)


def make_link(at: Path) -> None:
    os.symlink("/dev/zero", at)


@pytest.mark.parametrize("make", [make_fifo, make_link, Path.mkdir])
def test_a_lock_file_that_no_daemon_makes_is_no_daemon(path: Path, make: Callable[[Path], None]) -> None:
    """Opening a FIFO for reading would wait for a writer."""
    make(lock_path(path))
    with pytest.raises(NoDaemon, match="no daemon at") as caught:
        attempt(path)
    assert not isinstance(caught.value, Loading)


def test_the_daemon_loads(path: Path, locked: int) -> None:
    with pytest.raises(Loading, match="still loads its model"):
        attempt(path)


def test_the_daemon_is_stopping(path: Path, locked: int) -> None:
    refusing(path)
    with pytest.raises(NoDaemon, match="is stopping and takes no new requests"):
        attempt(path, wait_s=None)


def test_a_file_that_is_no_socket(path: Path) -> None:
    path.touch()
    with pytest.raises(NoDaemon, match=r"is not a socket, so no daemon is there; give the path of a daemon's socket$"):
        attempt(path)


def test_another_users_socket_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(path)
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert "although it is yours" in str(explain(path, denied))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    assert "only the owner of a socket can use it" in str(explain(path, denied))
    assert "you may not open the folder" in str(explain(path / "deeper", denied))


@pytest.mark.parametrize(("is_default", "owner", "refused"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_nothing_is_sent_to_another_user_at_the_default_path(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_default: bool, owner: int, refused: bool
) -> None:
    if is_default:
        monkeypatch.setattr(connector, "FALLBACK_PATH", os.fspath(path))
    monkeypatch.setattr(connector, "user_id_of_peer", lambda _: os.geteuid() + 1 if owner else 0)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        if refused:
            with pytest.raises(NoDaemon, match="would read your request"):
                attempt(path)
        else:
            found = attempt(path)
            assert isinstance(found, socket.socket)
            found.close()


@all_cases("name", CLIENT_COMMANDS)
def test_the_command_line_leaves_the_socket_to_the_connection(name: str) -> None:
    """Click would refuse another user's socket as "not readable", without a remedy."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for option in command.params:
        if "--socket" in option.opts:
            assert isinstance(option.type, click.Path)
            assert not option.type.readable


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(NoDaemon, match=f"at most {MAX_PATH_BYTES} bytes"):
        attempt(Path("/" + "x" * MAX_PATH_BYTES))


# -- waiting ------------------------------------------------------------------------------------------------


def test_by_default_a_wait_lasts_as_long_as_the_daemon_loads(path: Path, locked: int) -> None:
    noticed: list[Path] = []
    connector = Connector(path, wait_s=None, now=0, on_loading=noticed.append)
    assert [connector.attempt(now) for now in (0, 1000, 2000)] == [START_RETRY_S] * 3
    assert noticed == [path]
    fcntl.flock(locked, fcntl.LOCK_UN)
    with pytest.raises(NoDaemon, match="no daemon at"):
        connector.attempt(3000)


def test_a_wait_for_a_daemon_that_loads_can_have_an_end(path: Path, locked: int) -> None:
    connector = Connector(path, wait_s=None, loading_timeout_s=600, now=0)
    assert connector.attempt(599) == START_RETRY_S
    with pytest.raises(Loading):
        connector.attempt(600)


def test_a_wait_ends_with_a_connection(path: Path, locked: int) -> None:
    connector = Connector(path, wait_s=None, now=0)
    assert connector.attempt(0) == START_RETRY_S
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        found = connector.attempt(1)
        assert isinstance(found, socket.socket)
        found.close()


def test_a_limited_wait_also_waits_for_a_daemon_to_start(path: Path) -> None:
    connector = Connector(path, wait_s=5, now=0)
    assert connector.attempt(4.9) == START_RETRY_S
    with pytest.raises(NoDaemon):
        connector.attempt(5)


def test_no_wait_for_what_a_daemon_would_not_change(path: Path) -> None:
    path.touch()
    with pytest.raises(NoDaemon, match="is not a socket"):
        attempt(path, wait_s=5)
