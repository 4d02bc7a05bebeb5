"""``uma-trio controllers`` and ``ask --controller`` against a daemon in a thread, with controllers from a script."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click.testing
import pytest
import trio
from click.testing import CliRunner

import uma_trio
from tests.support.controller_library import MemoryLibrary
from tests.support.scripted_generation import eos, play
from tests.support.serving import Serving, serving
from uma_trio.cli import main
from uma_trio.client import ServerError
from uma_trio.errors import ControllerNotFound, UmaError
from uma_trio.protocol.controllers import Backtrack, ControllerOutput, Fork
from uma_trio.protocol.events import Failure, Token
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.requests import Generate

WASM = b"\0asm" + bytes(300_000)
PROGRAM = "async function main() {}\nstart(main)\n"


@attrs.frozen
class RunningDaemon:
    """A daemon in a thread of its own."""

    serving: Serving
    monkeypatch: pytest.MonkeyPatch

    def cli(self, *args: object, input: str | None = None) -> click.testing.Result:
        words = [*map(str, args), "--socket", str(self.serving.path)]
        return CliRunner().invoke(main, words, input=input, prog_name="uma-trio")

    def play(self, *script: Sequence[ServerEvent] | UmaError) -> list[Generate]:
        return play(self.monkeypatch, *script)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    started, ends, found = threading.Event(), trio.Event(), []

    async def serve() -> None:
        async with serving() as running:
            running.service.runtime = MemoryLibrary()
            found.append((running, trio.lowlevel.current_trio_token()))
            started.set()
            await ends.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert started.wait(60)
    running, token = found[0]
    try:
        yield RunningDaemon(running, monkeypatch)
    finally:
        token.run_sync_soon(ends.set)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.js"
    path.write_text(PROGRAM)
    return path


def token(index: int, text: str, *, inserted: bool = False) -> Token:
    return Token(id="", index=index, text=text, token_id=5, inserted=inserted)


FORKS: list[list[ServerEvent]] = [
    [token(0, "The answer is ", inserted=True), ControllerOutput(id="", index=0, logs="begins\nhere\n")],
    [Fork(id="", index=1, parent=0), Fork(id="", index=2, parent=0)],
    [token(0, "yes"), token(1, "no"), token(2, "may")],
    [Fork(id="", index=3, parent=2), token(3, "be"), token(2, "hem")],
    [eos(0), eos(1), eos(2), eos(3)],
]
TREE = ["The answer is ", "├─ [0] yes", "├─ [1] no", "└─ may", "   ├─ [2] hem", "   └─ [3] be"]


# -- run ----------------------------------------------------------------------------------------------


def test_the_text_of_a_single_answer_is_streamed(daemon: RunningDaemon, program: Path) -> None:
    requests = daemon.play(
        [token(0, "one ")],
        [token(0, "two"), Backtrack(id="", index=0, tokens=1, text="two"), token(0, "three")],
        [ControllerOutput(id="", index=0, logs="a log\n"), eos(0, sampled=3)],
    )
    result = daemon.cli("controllers", "run", "jsctrl", program, "--max-tokens", 9, "--seed", 7)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two ↩ three\n", "")
    [request] = requests
    assert (request.controller, request.controller_arg) == ("jsctrl", PROGRAM)
    assert (request.max_tokens, request.seed, request.temperature) == (9, 7, 0)


def test_forks_are_a_tree_and_logs_go_to_stderr(daemon: RunningDaemon) -> None:
    daemon.play(*FORKS)
    result = daemon.cli("controllers", "run", "jsctrl", "--arg", "x", "-v", "--stats")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == TREE, "the text up to the fork is there once"
    assert "[0] begins\n[0] here\n" in result.stderr
    assert result.stderr.count("1 prompt + 0 tokens") == 4


@pytest.mark.parametrize(
    ("args", "input", "expected"),
    [
        (["--arg", "text"], None, "text"),
        (["--arg-json", '{"a": [1]}'], None, {"a": [1]}),
        (["-"], PROGRAM, PROGRAM),
        ([], None, None),
    ],
)
def test_what_the_controller_gets(daemon: RunningDaemon, args: list[str], input: str | None, expected: object) -> None:
    requests = daemon.play([eos(0)])
    assert daemon.cli("controllers", "run", "jsctrl", *args, input=input).exit_code == 0
    assert requests[0].controller_arg == expected


def test_several_files_are_named_by_their_paths(daemon: RunningDaemon, tmp_path: Path) -> None:
    (tmp_path / "app" / "lib").mkdir(parents=True)
    files = {"app/main.js": "a", "app/lib/text.js": "é", "other.js": "c"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    requests = daemon.play([eos(0)])
    result = daemon.cli("controllers", "run", "jsctrl", *(tmp_path / name for name in files))
    assert result.exit_code == 0, result.stderr
    argument = requests[0].controller_arg
    assert argument == {"main.js": "a", "lib/text.js": "é", "../other.js": "c"}
    assert next(iter(argument)) == "main.js", "the first one runs"
    refused = daemon.cli("controllers", "run", "jsctrl", tmp_path / "app/main.js", "--arg", "x")
    assert "one of FILE, --arg and --arg-json" in refused.stderr


def test_a_file_that_was_meant_is_named(daemon: RunningDaemon, tmp_path: Path) -> None:
    (file := tmp_path / "program.js").write_text(PROGRAM)
    daemon.play([eos(0)])
    assert "leave --arg out" in daemon.cli("controllers", "run", "jsctrl", "--arg", str(file)).stderr
    daemon.play([eos(0)])
    assert daemon.cli("controllers", "run", "jsctrl", "--arg", PROGRAM).stderr == ""
    daemon.play([eos(0)])
    assert f"use < {file}" in daemon.cli("ask", "--controller", "jsctrl", file).stderr


@pytest.mark.parametrize(("pid", "starts"), [(None, True), (5, False)])
def test_the_start_of_the_runtime_is_said(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, pid: int | None, starts: bool
) -> None:
    async def metrics(_: object) -> dict[str, object]:
        return {"controllers": {"pid": pid}}

    monkeypatch.setattr("uma_trio.client.Client.metrics", metrics)
    daemon.play([eos(0)])
    said = daemon.cli("controllers", "run", "jsctrl", "-v").stderr
    assert ("the runtime of controllers starts now" in said) == starts


def test_json_has_the_events(daemon: RunningDaemon) -> None:
    daemon.play(*FORKS)
    result = daemon.cli("controllers", "run", "jsctrl", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == [
        *("token", "controller", "fork", "fork", "token", "token", "token", "fork", "token", "token"),
        *("eos", "eos", "eos", "eos"),
    ]


def test_an_answer_that_fails_or_waits_for_ever_is_named(daemon: RunningDaemon) -> None:
    failed = Failure(code="E_CONTROLLER_FAILED", message="trap\x1b[2J", index=1, id="")
    daemon.play([Fork(id="", index=1, parent=0)], [failed, eos(0, "deadlock")])
    result = daemon.cli("controllers", "run", "jsctrl")
    assert result.exit_code == 4
    assert "answer 1 failed: trap�[2J\n" in result.stderr
    assert "answer 0 waited for a variable, which" in result.stderr
    daemon.play([attrs.evolve(eos(0, "deadlock"), waits_for=["v1", "v2"])])
    assert "answer 0 waited for v1, v2, which nobody" in daemon.cli("controllers", "run", "jsctrl").stderr


def test_errors_name_a_remedy(daemon: RunningDaemon) -> None:
    daemon.play(ControllerNotFound("there is no controller nobody"))
    result = daemon.cli("controllers", "run", "nobody")
    assert result.exit_code == 2
    assert "uma-trio controllers list" in result.stderr
    daemon.play([Failure(code="E_CONTROLLER_FAILED", message="syntax error", index=0, id="")])
    result = daemon.cli("controllers", "run", "jsctrl", "--arg", "(")
    assert result.exit_code == 2
    assert result.stderr == "uma-trio controllers: syntax error\n", "what its author needs comes first"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--arg", "x", "-"], "give one of"),
        (["--arg-json", "{"], "--arg-json is not JSON"),
        (["nowhere.js"], "there is no file nowhere.js; give a text with --arg"),
    ],
)
def test_wrong_usage(daemon: RunningDaemon, args: list[str], message: str) -> None:
    result = daemon.cli("controllers", "run", "jsctrl", *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_program_that_is_too_large(daemon: RunningDaemon, tmp_path: Path) -> None:
    program = tmp_path / "program.js"
    program.write_text("é" * 131_073)
    result = daemon.cli("controllers", "run", "jsctrl", program)
    assert result.exit_code == 2
    assert "program.js: it is larger than 256 KiB" in " ".join(result.stderr.split())


# -- upload, tag, list --------------------------------------------------------------------------------


def test_a_program_is_not_uploaded(daemon: RunningDaemon, program: Path) -> None:
    result = daemon.cli("controllers", "upload", program)
    assert result.exit_code == 2
    assert "run with: uma-trio controllers run jsctrl" in " ".join(result.stderr.split())


def test_upload_tag_and_list(daemon: RunningDaemon, tmp_path: Path) -> None:
    file = tmp_path / "mine.wasm"
    file.write_bytes(WASM)
    module_id = hashlib.sha256(WASM).hexdigest()
    assert "no controllers yet" in daemon.cli("controllers", "list").stdout
    result = daemon.cli("controllers", "upload", file, "--tag", "mine")
    assert (result.exit_code, result.stdout) == (0, f"{module_id}\n")
    assert "mine.wasm: 293 KiB, 586 KiB of machine code" in result.stderr
    stored = json.loads(daemon.cli("controllers", "upload", file, "--json").stdout)
    assert (stored["module_id"], stored["wasm_size"]) == (module_id, len(WASM))
    assert daemon.cli("controllers", "tag", "mine", "other").exit_code == 0
    assert daemon.cli("controllers", "tag", module_id, "third").exit_code == 0
    listed = daemon.cli("controllers", "list").stdout.splitlines()
    assert listed[0].startswith("TAG")
    assert sorted(line.split()[0] for line in listed[1:]) == ["mine", "other", "third"], "the newest first"
    assert module_id[:12] in listed[1]
    as_json = [json.loads(line) for line in daemon.cli("controllers", "list", "--json").stdout.splitlines()]
    assert {(tag["tag"], tag["module_id"]) for tag in as_json} == {
        (name, module_id) for name in ("mine", "other", "third")
    }
    result = daemon.cli("controllers", "tag", "nobody", "x")
    assert result.exit_code == 2
    assert "no controller has the tag nobody; tags are: mine, other, third" in result.stderr


def test_delete_controllers(daemon: RunningDaemon, tmp_path: Path) -> None:
    module_ids = []
    for n in range(2):
        (file := tmp_path / "mine.wasm").write_bytes(WASM + bytes([n]))
        module_ids.append(daemon.cli("controllers", "upload", file, "--tag", f"t{n}", "--tag", f"u{n}").stdout.strip())
    listed = daemon.cli("controllers", "list", "--modules").stdout.splitlines()
    assert listed[0].split() == ["MODULE", "OWNER", "SIZE", "CODE", "USED", "TAGS"]
    assert {line.split()[0] for line in listed[1:]} == {*module_ids}
    result = daemon.cli("controllers", "rm", "t0", "nobody")
    assert result.exit_code == 2
    assert "tag nobody not found" in result.stderr
    result = daemon.cli("controllers", "rm", module_ids[1], "t0", module_ids[1])
    assert (result.exit_code, result.stdout) == (0, f"deleted t0\ndeleted {module_ids[1]}\ndeleted t1\ndeleted u1\n")
    [left] = [json.loads(line) for line in daemon.cli("controllers", "list", "--modules", "--json").stdout.splitlines()]
    assert left["module_id"] == module_ids[0]
    assert daemon.cli("controllers", "rm", module_ids[0], "--owner", "alice").exit_code == 2
    assert daemon.cli("controllers", "rm", module_ids[0], "--owner", left["owner"]).exit_code == 0
    assert "no modules are stored" in daemon.cli("controllers", "list", "--modules").stdout
    assert "no controllers yet" in daemon.cli("controllers", "list").stdout


def test_what_is_no_controller_is_refused(daemon: RunningDaemon, tmp_path: Path) -> None:
    (file := tmp_path / "mine.wasm").write_text("(module)")
    result = daemon.cli("controllers", "upload", file)
    assert result.exit_code == 2
    assert "this is no Wasm module" in result.stderr


# -- ask, and the functions for scripts ---------------------------------------------------------------


def test_ask_runs_a_controller(daemon: RunningDaemon) -> None:
    requests = daemon.play([token(0, "done")], [eos(0)])
    result = daemon.cli("ask", "--controller", "jsctrl", "--max-tokens", 5, input=PROGRAM)
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert (requests[0].controller, requests[0].controller_arg) == ("jsctrl", PROGRAM)
    assert "no place for --raw" in daemon.cli("ask", "--controller", "jsctrl", "--raw", "x").stderr
    refused = daemon.cli("ask", "--controller", "jsctrl", "--session", "s", "x")
    assert "session_id does not go with controller" in refused.stderr


def test_the_function_for_scripts(daemon: RunningDaemon) -> None:
    path = daemon.serving.path
    daemon.play(*FORKS)
    tree = uma_trio.run("jsctrl", PROGRAM, socket=path)
    assert [str(answer) for answer in tree] == ["The answer is " + end for end in ("yes", "no", "mayhem", "maybe")]
    assert [answer.parent for answer in tree] == [None, 0, 0, 2]
    assert tree[0].logs == "begins\nhere\n"
    failed = Failure(code="E_CONTROLLER_FAILED", message="trap", index=1, id="")
    daemon.play([Fork(id="", index=1, parent=0)], [failed], [token(0, "x")], [eos(0)])
    tree = uma_trio.run("jsctrl", socket=path)
    assert (tree[0].text, tree[1].failure.code) == ("x", "E_CONTROLLER_FAILED")
    daemon.play([token(0, "so far")], [attrs.evolve(failed, index=0)])
    with pytest.raises(ServerError, match="trap") as error:
        uma_trio.run("jsctrl", socket=path)
    assert error.value.answers is not None
    assert [(answer.text, answer.failure is not None) for answer in error.value.answers] == [("so far", True)]
