"""The default path of the socket."""

from pathlib import Path

import pytest

from uma_trio.protocol.address import default_socket_path


def test_the_runtime_folder_is_the_default(tmp_path: Path) -> None:
    assert default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "uma-trio" / "uma.sock"


@pytest.mark.parametrize("runtime", [None, "", "none"])
def test_without_a_runtime_folder_it_is_in_tmp(tmp_path: Path, runtime: str | None) -> None:
    environment = {} if runtime is None else {"XDG_RUNTIME_DIR": runtime and str(tmp_path / runtime)}
    assert str(default_socket_path(environment)) == "/tmp/uma.sock"


def test_a_relative_runtime_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert str(default_socket_path({"XDG_RUNTIME_DIR": "run"})) == "/tmp/uma.sock"


def test_the_variable_comes_first(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "UMA_SOCKET": "/somewhere/else"}
    assert default_socket_path(environment) == Path("/somewhere/else")
    assert default_socket_path({"UMA_SOCKET": "~/uma.sock"}) == Path.home() / "uma.sock"
    assert default_socket_path(environment | {"UMA_SOCKET": ""}) == tmp_path / "uma-trio" / "uma.sock"
