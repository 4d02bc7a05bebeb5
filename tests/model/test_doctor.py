"""``uma-trio doctor``: a verdict and a fix for every problem, and no hang or crash whatever is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import sys
import threading

import pytest
from click.testing import CliRunner

from tests.support.gpu import gpu
from uma_trio.cli.doctor import command, environment, probe
from uma_trio.cli.doctor import daemon as daemon_checks
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def examine(library, tmp_path, monkeypatch):
    """Run the doctor; return the checks by name."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("UMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UMA_THREADS", "1")  # several would wait for each other on a busy machine

    def run(*flags):
        result = CliRunner().invoke(command, ["--json", *map(str, flags)])
        assert isinstance(result.exception, SystemExit | None), result.exception
        report = json.loads(result.stdout)
        assert all(check["fix"] for check in report["checks"] if check["verdict"] == "problem"), (
            "a problem without a fix"
        )
        assert "Traceback" not in result.output
        found = {check["name"]: check for check in report["checks"]}
        assert (result.exit_code == 1) == (report["verdict"] == "problem")
        return found

    return run


@pytest.fixture
def no_c(monkeypatch):
    """Skip the slow part, which loads the library and the model."""
    monkeypatch.setattr(probe, "run", lambda flags: ({}, "was skipped"))


LIBRARY = {
    "max_sequences": 256,
    "devices": {"backend": "cpu", "found": []},
    "system_info": "",
    "plugins": [],
}
"""What ``probe`` says of a library."""


def problems(found):
    return {name for name, check in found.items() if check["verdict"] == "problem"}


def test_a_good_installation(examine):
    found = examine()
    assert problems(found) == set()
    names = ("python", "packages", "folders", "state", "cache", "stamp", "threads", "library", "devices", "backend")
    placement = ["placement"] if gpu() else []
    assert [*found] == [
        *names,
        "embedded",
        "model",
        "context",
        "fit",
        *placement,
        "memory",
        "layout",
        "answer",
        "socket",
    ]
    assert "Paris" in found["answer"]["message"]
    assert "no daemon at" in found["socket"]["message"]


@pytest.mark.thorough
def test_a_draft_model(examine, tmp_path):
    found = examine("--draft-model", "embedded-draft")
    assert problems(found) == set()
    assert found["draft model"]["message"].startswith("draft.gguf: ")
    missing = examine("--draft-model", tmp_path / "none.gguf")
    assert problems(missing) == {"model"}
    assert missing["model"]["message"] == f"there is no model at {tmp_path / 'none.gguf'}"


def test_each_line_of_text_has_a_verdict(examine):
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "fix:" not in line]
    assert all(line.split()[0] in ("ok", "warning") for line in lines)


def test_the_context_of_a_request(examine, monkeypatch, tmp_path):
    file = tmp_path / "uma.yaml"
    file.write_text("model: {ctx: 4096, kv_unified: 'off'}")
    found = examine("--config", file)["context"]
    assert found["verdict"] == "warning"
    assert found["message"].startswith("512 tokens for a request: a KV cache of 4096 tokens")
    assert (
        found["fix"]
        == "serve with --ctx 65536, --kv-unified on --ctx 8192 or --parallel 1 --ctx 4096, which gives a request more"
    )


@pytest.mark.thorough
def test_a_measurement_that_cannot_be_saved_is_not_promised(examine, monkeypatch, tmp_path):
    monkeypatch.setenv("UMA_LAYOUT_TRIAL_S", "60")  # so that it is measured on a busy machine too
    assert "measured now, for the next starts too" in examine()["layout"]["message"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = examine()
    assert found["cache"]["verdict"] == "warning"
    assert "measured now, but not saved" in found["layout"]["message"]


def test_a_state_folder_that_cannot_be_written(examine, no_c, monkeypatch, tmp_path):
    (tmp_path / "state").touch()
    found = examine()
    assert "state" in problems(found)
    assert "--state-dir" in found["state"]["fix"]


def test_a_gpu_that_stays_unused(examine, monkeypatch):
    cpu = {"name": "CPU", "description": "EPYC", "kind": "cpu"}
    gpu = {"name": "an NVIDIA GPU", "fix": "run ./build_llama.sh --backend cuda"}
    devices = {"backend": "cpu", "found": [cpu], "machine_gpu": gpu}
    library = {"max_sequences": 256, "devices": devices, "system_info": ""}
    monkeypatch.setattr(probe, "run", lambda flags: ({"library": library}, "was skipped"))
    found = examine()["devices"]
    assert found == {
        "name": "devices",
        "verdict": "warning",
        "message": "CPU only (EPYC): built without a GPU backend; this machine has an NVIDIA GPU",
        "fix": "run ./build_llama.sh --backend cuda",
    }


def test_a_running_daemon_answers(examine, no_c, daemon):
    found = examine("--socket", daemon.socket)
    assert "a daemon serves embedded on" in found["socket"]["message"]
    assert found["socket"]["verdict"] == "ok"
    assert "4096 tokens of context for a request of the running daemon, 64 at a time" in found["served"]["message"]


def test_no_library(examine, tmp_path):
    found = examine("--llama-dir", tmp_path / "none")
    assert problems(found) == {"stamp", "library"}
    for name in ("stamp", "library"):
        assert "there is no library" in found[name]["message"]
        assert "build_llama.sh" in found[name]["fix"]


def test_a_damaged_library(examine, tmp_path):
    from llama_abi.locations import library_directory

    folder = tmp_path / "lib"
    shutil.copytree(library_directory(), folder)
    (broken,) = (path for path in folder.iterdir() if path.stem == "libllama")
    broken.write_bytes(b"\0" * broken.stat().st_size)
    found = examine("--llama-dir", folder)
    assert problems(found) == {"library"}, "the stamp checks sizes only"
    assert "cannot be loaded" in found["library"]["message"]
    broken.write_bytes(b"short")
    assert problems(examine("--llama-dir", folder)) == {"stamp", "library"}


def test_unusable_models(examine, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(EMBEDDED.read_bytes()[:1_000_000])
    text = tmp_path / "text.gguf"
    text.write_text("# Notes")
    for path, words, fix in (
        (cut, "cut off", "download or copy it again"),
        (tmp_path / "none.gguf", "there is no model", "give the path"),
        (tmp_path, "is a folder", f"give a file in it, such as {cut}"),
        (text, "is not a GGUF file", "give the path of a .gguf file"),
    ):
        found = examine("--model", path)
        assert problems(found) == {"model"}
        assert str(path) in found["model"]["message"]
        assert words in found["model"]["message"]
        assert found["model"]["fix"].startswith(fix)


def test_settings_that_the_model_refuses(examine, tmp_path):
    file = tmp_path / "uma.yaml"
    file.write_text("model: {kv_mem_limit_mb: 1, parallel: 64, kv_unified: 'off'}")
    found = examine("--config", file)
    assert problems(found) == {"model"}
    assert found["model"]["message"].endswith("sequences need at least 16384")
    assert found["model"]["fix"].startswith("raise it to ")


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -SEGV $$", "crashed with SIGSEGV"),
        ("exec sleep 30", "did not finish within 0.5 s"),
        ("echo nonsense; echo '{\"stage\"'; exit 3", "ended with exit code 3"),
        ("echo 'ImportError: no numpy' >&2; exit 1", "no numpy"),
    ],
)
def test_a_library_that_crashes_or_hangs_is_a_finding(examine, tmp_path, monkeypatch, script, words):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(stat.S_IRWXU)
    monkeypatch.setattr("uma_trio.processes.interpreter.PYTHON", (str(python),))
    monkeypatch.setattr(probe, "LIMIT_S", 0.5)
    found = examine()
    assert problems(found) == {"library"}
    assert words in found["library"]["message"]


def test_a_crash_while_loading_the_model(examine, monkeypatch):
    monkeypatch.setattr(probe, "run", lambda flags: ({"library": LIBRARY}, "crashed with SIGABRT"))
    found = examine()
    assert problems(found) == {"devices", "model"}
    assert "crashed with SIGABRT" in found["model"]["message"]


def test_plug_ins_are_named(examine, monkeypatch):
    library = {**LIBRARY, "plugins": ["libggml-cpu-zen4.so", "libggml-rpc.so"]}
    monkeypatch.setattr(probe, "run", lambda flags: ({"library": library}, "was skipped"))
    assert examine()["plug-ins"]["message"] == "libggml-cpu-zen4.so, libggml-rpc.so: the best for this machine"


def test_a_plug_in_that_does_not_load_is_named(examine, monkeypatch):
    cpu = {"name": "CPU", "description": "a CPU", "kind": "cpu"}
    unused = ["libggml-cuda.so: libcuda.so.1: cannot open shared object file"]
    library = {**LIBRARY, "devices": {"backend": "cpu", "found": [cpu], "unused_plugins": unused}}
    monkeypatch.setattr(probe, "run", lambda flags: ({"library": library}, "was skipped"))
    found = examine()["devices"]
    assert found["verdict"] == "warning"
    assert "built without a GPU backend" in found["message"]
    assert found["message"].endswith("; not used: libggml-cuda.so: libcuda.so.1: cannot open shared object file")
    assert found["fix"].startswith("install what the plug-in lacks, such as a driver, or uninstall its package")


@pytest.mark.thorough
def test_a_wrong_answer(examine, monkeypatch):
    stages, ending = probe.run({})
    stages["answer"]["text"] = "Rome"
    monkeypatch.setattr(probe, "run", lambda flags: (stages, ending))
    assert problems(examine()) == {"answer"}
    stages["model"]["peak_bytes"] = 1 << 60
    found = examine()
    assert problems(found) == {"answer"}
    assert found["memory"]["verdict"] == "warning", "it loaded, so serve would load it too"


def test_an_embedded_model_that_differs_from_its_card(examine, no_c, tmp_path, monkeypatch):
    from uma_trio.models import packaged

    copy = tmp_path / "embedded.gguf"
    copy.write_bytes(b"replaced")
    (tmp_path / "card.json").write_text(json.dumps({"sha256": "0" * 64}))
    monkeypatch.setattr(packaged, "EMBEDDED", copy)
    monkeypatch.setattr(probe, "run", lambda flags: ({"library": LIBRARY}, "was skipped"))
    assert "differs from the one in its card" in examine()["embedded"]["message"]


def test_invalid_settings(examine, no_c, monkeypatch):
    monkeypatch.setenv("UMA_TREADS", "4")
    found = examine()
    assert problems(found) == {"config"}
    assert "UMA_THREADS" in found["config"]["message"]


def test_too_many_threads(examine, no_c, monkeypatch):
    monkeypatch.setenv("UMA_THREADS", "512")
    found = examine()
    assert found["threads"]["verdict"] in ("warning", "ok")  # ok on a single core, where none can be left free
    assert "512" in found["threads"]["message"]


@pytest.mark.parametrize("runtime", [None, "none", "open"])
def test_runtime_folders(examine, no_c, tmp_path, monkeypatch, runtime):
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime))
        if runtime == "open":
            (tmp_path / runtime).mkdir()
            (tmp_path / runtime).chmod(0o755)
    found = examine()
    assert found["folders"]["verdict"] == "warning"
    assert found["folders"]["fix"]


def test_unusable_socket_paths(examine, no_c, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    for path, words in (
        (file, "not a socket"),
        (tmp_path, "not a socket"),
        (file / "x", "cannot be created"),
        (tmp_path / ("x" * 200), "bytes"),
    ):
        found = examine("--socket", path)
        assert found["socket"]["verdict"] == "problem"
        assert words in found["socket"]["message"]
    assert file.read_text() == "kept"


def test_a_socket_that_a_daemon_left_behind_is_no_problem(examine, no_c, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    path.chmod(0o600)
    found = examine("--socket", path)
    assert found["socket"]["verdict"] == "ok"
    assert path.exists()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x02\0\0\0{}", b"\x02\0\0\0[]", "silence", "drip"]
)
def test_a_server_that_is_not_a_daemon(examine, no_c, tmp_path, monkeypatch, answer):
    """Including one that sends nothing, or one byte at a time: the client leaves, not the server."""
    monkeypatch.setattr(daemon_checks, "SOCKET_S", 0.5)
    path, left = tmp_path / "s", []

    def serve(listener):
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            if isinstance(answer, bytes):
                sock.sendall(answer)
                return
            sock.settimeout(0.05)
            for _ in range(1200):
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    left.append(sock.recv(1) == b"")
                if left:
                    return
                if answer == "drip":
                    with contextlib.suppress(BrokenPipeError):
                        sock.sendall(b"\x01")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        found = examine("--socket", path)
        server.join()
    assert found["socket"]["verdict"] == "problem"
    assert isinstance(answer, bytes) or left == [True]


def test_a_check_that_raises_is_a_finding(examine, no_c, monkeypatch):
    def broken():
        raise RuntimeError("a defect")
        yield

    monkeypatch.setattr(environment, "check_packages", broken)
    found = CliRunner().invoke(command, ["--json"])
    assert "the check failed: RuntimeError: a defect" in found.stdout
    assert found.exit_code == 1
