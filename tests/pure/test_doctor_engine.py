"""The lines of ``uma-trio doctor`` about a running daemon: its folder, its engine, its controllers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from uma_trio import config
from uma_trio.cli.doctor import daemon
from uma_trio.cli.doctor.findings import Finding
from uma_trio.protocol.answers import Metrics, ModelDescription, ModelList
from uma_trio.protocol.codec import server_codec


def findings(
    path: Path, engine: dict[str, Any], controllers: dict[str, Any] | None = None, **more: Any
) -> list[Finding]:
    """What the doctor finds at ``path``, where a server answers with snapshots of ``engine`` and ``controllers``."""
    model = ModelDescription(
        name="m",
        description="a model",
        architecture="llama",
        size_bytes=1,
        n_parameters=1,
        context=8192,
        context_per_request=2048,
        parallel=4,
        capabilities=["completion"],
        embedding_length=1,
    )
    snapshot = {"model": "m.gguf", "engine": engine, "controllers": controllers, **more}
    answers = (
        Metrics(snapshot=snapshot),
        ModelList(models=[model]),
    )

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            codec = server_codec("auto", max_frame_bytes=1 << 20)
            sock, _ = listener.accept()
            with sock:
                codec.receive_data(sock.recv(1000))
                assert codec.next_message() is not None
                sock.sendall(codec.encode(answer))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        found = list(daemon.check_socket(config.load(flags={"socket": str(path)})))
        server.join()
    return found


def test_an_engine_that_was_never_restarted(tmp_path: Path) -> None:
    engine = {"pid": 4711, "restarts_total": 0, "rss_bytes": 200 << 20, "cpu_s": 1.5}
    [at_socket, served, found] = findings(tmp_path / "s", engine)
    assert (at_socket.name, at_socket.verdict) == ("socket", "ok")
    message = "m with 2048 tokens of context for a request of the running daemon, 4 at a time"
    assert served == Finding("served", "ok", message)
    message = "it runs in process 4711 with 200 MiB of memory and was never restarted"
    assert found == Finding("engine", "ok", message)


def test_the_folder_of_the_running_daemon_is_checked_if_it_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    engine = {"pid": 4711, "restarts_total": 0}
    theirs, own = tmp_path / "theirs", tmp_path / "mine" / "uma-trio"
    [_, state, *_] = findings(tmp_path / "s", engine, state_dir=str(theirs))
    assert (state.name, state.verdict) == ("state", "ok")
    assert f"sessions and KV states of the running daemon in {theirs}, " in state.message
    theirs.touch()
    [_, state, *_] = findings(tmp_path / "t", engine, state_dir=str(theirs))
    assert (state.verdict, state.fix is None) == ("problem", False)
    assert [each.name for each in findings(tmp_path / "u", engine, state_dir=str(own))] == [
        "socket",
        "served",
        "engine",
    ]


@pytest.mark.parametrize(("restarts", "times"), [(1, "once"), (2, "2 times")])
def test_an_engine_that_was_restarted_is_a_warning(tmp_path: Path, restarts: int, times: str) -> None:
    [*_, found] = findings(tmp_path / "s", {"pid": 4711, "restarts_total": restarts})
    assert (found.name, found.verdict) == ("engine", "warning")
    assert f"restarted {times}" in found.message
    assert found.fix is not None
    assert "log" in found.fix


def test_an_engine_in_a_thread(tmp_path: Path) -> None:
    [*_, found] = findings(tmp_path / "s", {"restarts_total": 0})
    assert found == Finding("engine", "ok", "it runs in a thread of the daemon")


@pytest.mark.parametrize(
    ("pid", "restarts", "verdict", "message"),
    [
        (None, 0, "ok", "no request has needed them yet"),
        (4712, 0, "ok", "they run in process 4712"),
        (4712, 1, "warning", "they run in process 4712; their runtime has ended once"),
        (None, 3, "warning", "they do not run; their runtime has ended 3 times"),
    ],
)
def test_controllers(tmp_path: Path, pid: int | None, restarts: int, verdict: str, message: str) -> None:
    [*_, found, _] = findings(tmp_path / "s", {"restarts_total": 0}, {"pid": pid, "restarts_total": restarts})
    assert (found.name, found.verdict, found.message) == ("controllers", verdict, message)
