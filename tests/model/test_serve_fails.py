"""Every way in which ``uma-trio serve`` can fail at its start: one sentence with a remedy, an exit code, no traceback.

``tests/loop/test_serve_fails.py`` has the engine processes that die, and needs no library.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from llama_abi.locations import DIRECTORY_VARIABLE
from uma_trio.cli import main
from uma_trio.models.packaged import EMBEDDED

EMBEDDED_BYTES = EMBEDDED.read_bytes()

Case = Callable[[Path], list[str]]


def changed(before: bytes, after: bytes) -> Case:
    """The embedded model with other bytes of the same length."""

    def make(folder: Path) -> list[str]:
        assert EMBEDDED_BYTES.count(before) >= 1
        assert len(before) == len(after)
        return given(EMBEDDED_BYTES.replace(before, after, 1))(folder)

    return make


def given(data: bytes) -> Case:
    """A model file with this content."""

    def make(folder: Path) -> list[str]:
        (folder / "m.gguf").write_bytes(data)
        return ["--model", str(folder / "m.gguf")]

    return make


def pipe(folder: Path) -> list[str]:
    os.mkfifo(folder / "model.gguf")
    return ["--model", str(folder / "model.gguf")]


def folder_of_models(folder: Path) -> list[str]:
    (folder / "models").mkdir()
    (folder / "models" / "b.gguf").touch()
    (folder / "models" / "a.gguf").touch()
    return ["--model", str(folder / "models")]


def misspelt(folder: Path) -> list[str]:
    (folder / "mistral.gguf").touch()
    return ["--model", str(folder / "mistrla.gguf")]


def socket_that_is_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return ["--socket", str(folder / "file")]


def socket_in_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return ["--socket", str(folder / "file" / "s")]


def config_file(text: str) -> Case:
    def make(folder: Path) -> list[str]:
        (folder / "uma.yaml").write_text(text)
        return ["--config", str(folder / "uma.yaml")]

    return make


def template_file(text: str) -> Case:
    def make(folder: Path) -> list[str]:
        (folder / "t.jinja").write_text(text)
        return ["--chat-template", str(folder / "t.jinja")]

    return make


def constant(*args: str) -> Case:
    return lambda folder: [arg.replace("FOLDER", str(folder)) for arg in args]


ARCHITECTURE = b"general.architecture\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00"

MODELS: dict[str, tuple[Case, str]] = {
    "no such file": (constant("--model", "FOLDER/x.gguf"), "there is no model at .*; give the path"),
    "a misspelt file": (misspelt, r"did you mean .*/mistral\.gguf\?"),
    "a folder of models": (folder_of_models, r"is a folder; give a file in it, such as .*/models/a\.gguf$"),
    "an empty folder": (constant("--model", "FOLDER"), r"is a folder; give the path of a \.gguf file$"),
    "a file in a file": (constant("--model", f"{EMBEDDED}/m.gguf"), "Not a directory; give the path"),
    "a device": (constant("--model", "/dev/null"), r"not a regular file; give the path of a \.gguf file$"),
    "an empty file": (given(b""), r"it is empty; give the path of a \.gguf file$"),
    "a text": (given(b"# Notes\nno model"), "it is not a GGUF file: it begins with # No, not with GGUF; give the path"),
    "a Git LFS pointer": (given(b"version https://git-lfs.github.com/spec/v1\n"), "run git lfs pull$"),
    "half a model": (given(EMBEDDED_BYTES[: len(EMBEDDED_BYTES) // 2]), "cut off; download or copy it again$"),
    "noise": (given(os.urandom(50_000)), "it is not a GGUF file: .*; give the path"),
    "an older file": (given(b"GGML" + EMBEDDED_BYTES[4:200_000]), "it is not a GGUF file: .*; give the path"),
    "version 1": (
        given(EMBEDDED_BYTES[:4] + b"\x01" + EMBEDDED_BYTES[5:]),
        "GGUF version 1; only 2 and 3 are supported; convert",
    ),
    "version 4": (
        given(EMBEDDED_BYTES[:4] + b"\x04" + EMBEDDED_BYTES[5:]),
        "GGUF version 4; only 2 and 3 are supported; convert",
    ),
    "no tensors": (
        given(EMBEDDED_BYTES[:8] + bytes(8) + EMBEDDED_BYTES[16:]),
        "it has no tensors: .*; give a whole model$",
    ),
    "a pipe": (pipe, "not a regular file; give the path"),
    "half a header": (given(EMBEDDED_BYTES[:1000]), "the file is damaged; get the file"),
    "an unknown architecture": (
        changed(ARCHITECTURE + b"llama", ARCHITECTURE + b"lloma"),
        "does not know its architecture 'lloma'; take another model, or a newer uma-trio$",
    ),
    "a missing tensor": (
        changed(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"),
        r"llama\.cpp refuses the file \(tensor 'blk\.0\.attn_q\.weight' not found\); get the file from another source",
    ),
    "a duplicate tensor": (
        changed(b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"),
        "the file is damaged; get the file",
    ),
}

SETTINGS: dict[str, tuple[Case, str]] = {
    "a context that does not fit": (
        constant("--devices", "none", "--ctx", "64M"),
        r"a KV cache of 67108864 tokens takes 164\.3 GB in q8_0, and [\d.]+ GB of memory are free; lower --ctx to \d+ or less",
    ),
    "too little KV memory": (
        constant("--devices", "none", "--kv-mem-limit-mb", "1"),
        "raise it to 10, or lower parallel$",
    ),
    "no library": (constant("--llama-dir", "FOLDER"), "run ./build_llama.sh --prefix "),
    "no such chat template": (
        constant("--chat-template", "chatlm"),
        "there is no chat template chatlm; did you mean chatml",
    ),
    "a folder as chat template": (constant("--chat-template", "FOLDER"), "cannot read the chat template .*: Is a dir"),
    "a chat template that is not text": (constant("--chat-template", str(EMBEDDED)), "takes a Jinja file$"),
    "a chat template that does not compile": (
        template_file("{{ bos_token }}\n{% for message in messages %}\n{{ message.role }\n{% endfor %}"),
        r"t\.jinja does not compile: unexpected '}' \(line 3\); correct it, or give --chat-template another one$",
    ),
    "a chat template that fails": (
        template_file("{% for message in messages %}\n{{ message.role + 1 }}\n{% endfor %}"),
        r"t\.jinja failed: can only concatenate str .* \(line 2\); correct it, or give --chat-template another one$",
    ),
    "a socket with a long path": (constant("--socket", "FOLDER/" + "x" * 100), "choose a shorter one with --socket"),
    "a socket that is a file": (socket_that_is_a_file, "not a socket; remove it, or choose another --socket$"),
    "a socket in a file": (socket_in_a_file, "file is not a folder; choose another path with --socket$"),
    "a socket in no folder": (
        constant("--socket", "/proc/none/s"),
        "cannot use the folder /proc/none for the socket: ",
    ),
}

USAGE: dict[str, tuple[Case, str]] = {
    "a value out of bounds": (constant("--parallel", "0"), "parallel must be a whole number from 1 to 256, not '0'"),
    "a value of another kind": (constant("--ctx", "lots"), "ctx must be a whole number"),
    "a value that is not a choice": (
        constant("--type-k", "q5"),
        "type_k must be one of auto, f16, q8_0, q4_0, not 'q5'",
    ),
    "settings that contradict": (constant("--type-v", "q8_0", "--flash-attn", "off"), "make flash_attn auto"),
    "an unknown flag": (constant("--modle", "x"), "Did you mean one of: '--model',"),
    "an argument": (constant("x.gguf"), r"write: uma-trio serve --model x\.gguf"),
    "no config file": (constant("--config", "FOLDER/x.yaml"), "cannot read .*: No such file .*--print-config prints"),
    "no YAML": (config_file("model: ["), "is not YAML: .*look at line 1"),
    "an unknown section": (config_file("modle: {}"), "unknown section modle; did you mean model?"),
    "an unknown key": (config_file("model: {contxt: 1}"), r"unknown key contxt; did you mean ctx\?"),
    "a key in the wrong section": (config_file("limits: {ctx: 1}"), "put it under model:"),
    "a key twice": (config_file("limits:\n  max_queue: 1\n  max_queue: 2\n"), "in line 2 and again in line 3; remove"),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("UMA_") and name != DIRECTORY_VARIABLE]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UMA_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("UMA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("UMA_LAYOUT_TRIAL_S", "0")


def serve(args: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["serve", "--log-format", "json", *args], prog_name="uma-trio")
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def check_one_sentence(args: list[str], message: str) -> None:
    code, shown = serve(args)
    assert code == 1
    [line] = shown.splitlines()  # neither llama.cpp's lines nor a traceback
    assert line.startswith("uma-trio serve: ")
    assert re.search(message, line), line
    assert line.count("cannot load") <= 1
    assert not re.search(r"ggml_|llama_\w+:|_impl", line), line


@pytest.mark.parametrize(("case", "message"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_served(case: Case, message: str, tmp_path: Path) -> None:
    check_one_sentence(case(tmp_path), message)


@pytest.mark.parametrize(("case", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_work_here(case: Case, message: str, tmp_path: Path) -> None:
    check_one_sentence(case(tmp_path), message)


@pytest.mark.parametrize(("case", "message"), USAGE.values(), ids=USAGE)
def test_settings_that_are_wrong_everywhere(case: Case, message: str, tmp_path: Path) -> None:
    code, shown = serve(case(tmp_path))
    assert code == 2
    assert re.search(message, " ".join(shown.split())), shown
    assert "Traceback" not in shown


def test_a_model_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(
        "uma_trio.daemon.engines.loaded.check_gguf", refuse
    )  # the tests may run as root, who may read all
    check_one_sentence(["--model", "m.gguf"], "m.gguf may not be read; run chmod u.r on it, or start the daemon as its")


def test_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMA_PARALEL", "2")
    code, shown = serve([])
    assert code == 2
    assert "unknown variable UMA_PARALEL; did you mean UMA_PARALLEL?" in " ".join(shown.split())


def test_a_socket_on_which_another_program_serves(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        check_one_sentence([], "another program serves on .*/s; choose another --socket$")


def test_the_exit_code_of_the_program(tmp_path: Path) -> None:
    """As above, without anything of the test between the daemon and its terminal."""
    command = [sys.executable, "-m", "uma_trio", "serve", "--model", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == f"uma-trio serve: {tmp_path} is a folder; give the path of a .gguf file\n"


@pytest.mark.parametrize(
    "n_files", [10, pytest.param(20, marks=pytest.mark.cpu("drivers of GPUs abort the engine without descriptors"))]
)
def test_a_low_limit_on_open_files(n_files: int, tmp_path: Path) -> None:
    """A few suffice to begin, some more to load the model."""
    ended = subprocess.run(
        [sys.executable, "-m", "uma_trio", "serve"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    line = ended.stderr.splitlines()[-1]
    assert re.search("^uma-trio serve: (cannot load .*: )?Too many open files; raise the limit on open files", line), (
        line
    )
    assert "Traceback" not in ended.stderr
