"""Controllers end to end: the daemon with its runtime, over the socket, over HTTP and at the command line."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import uma_trio
from tests.support.real_daemon import ROOT, Daemon, real_daemon
from uma_trio.cli import main
from uma_trio.client import AnswerTree, ServerError

TEXT = "Ultimate answer is to the life, universe and everything is "
PROGRAM = r"""async function main() {
    await $`Ultimate answer is to the life, universe and everything is `
    await gen({ regex: /\d\d/ })
}

start(main)
"""

FORKS = r"""
async function main() {
    await $`The number is `
    const n = await fork(3)
    await $`${n}`
    setVar('v' + n, 'x'.repeat(n + 1))
    if (n == 0) {
        await waitVars('v1', 'v2')
        print(getVar('v0').length + getVar('v1').length + getVar('v2').length)
    }
    const here = label()
    await $` and not this`
    await backtrack(here)
    await gen({ regex: /[a-z]{3}/ })
}
start(main)
"""


@pytest.fixture(scope="module")
def daemon(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with real_daemon("--http", "0", "--threads", "1", folder=tmp_path_factory.mktemp("daemon")) as found:
        yield found


def run(daemon: Daemon, controller: str, argument: Any = None, **fields: Any) -> AnswerTree:
    return uma_trio.run(controller, argument, socket=daemon.socket, **fields)


def cli(daemon: Daemon, *args: object) -> str:
    result = CliRunner().invoke(main, [*map(str, args), "--socket", str(daemon.socket)], prog_name="uma-trio")
    assert result.exit_code == 0, result.output
    return result.output


def frames(daemon: Daemon, **fields: Any) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{daemon.http_url()}/v1/run", json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line for line in answer.read().decode().split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_two_digits_over_the_socket(daemon: Daemon) -> None:
    tree = run(daemon, "jsctrl", PROGRAM)
    assert len(tree) == 1
    answer = tree[0]
    assert re.fullmatch(rf"{TEXT}\d\d", answer.text)
    assert answer.eos is not None
    assert answer.eos.reason == "stop"
    assert 1 <= answer.sampled_tokens <= 2
    assert answer.sampled_tokens + answer.inserted_tokens == answer.eos.usage.completion_tokens
    assert run(daemon, "jsctrl", PROGRAM)[0].text == answer.text


def test_two_digits_over_http(daemon: Daemon) -> None:
    first, *steps = frames(daemon, controller="jsctrl", controller_arg=PROGRAM)
    assert first["object"] == "initial-run"
    assert {fork["index"] for step in steps for fork in step["forks"]} == {0}
    text = "".join(fork["text"] for step in steps for fork in step["forks"])
    answer = run(daemon, "jsctrl", PROGRAM)[0]
    assert text == answer.text
    assert steps[-1]["forks"][0]["finish_reason"] == "aici-stop"
    usage = steps[-1]["usage"]
    assert (usage["sampled_tokens"], usage["ff_tokens"]) == (answer.sampled_tokens, answer.inserted_tokens)
    assert usage["cost"] == 2 * usage["sampled_tokens"] + usage["ff_tokens"]


def test_two_digits_at_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    program = tmp_path / "program.js"
    program.write_text(PROGRAM)
    assert re.search(rf"{TEXT}\d\d\n$", cli(daemon, "controllers", "run", "jsctrl", program))


def test_forks_with_variables_suspension_and_backtracking(daemon: Daemon) -> None:
    tree = run(daemon, "jsctrl", FORKS)
    assert [answer.index for answer in tree] == [0, 1, 2]
    assert [answer.parent for answer in tree] == [None, 0, 0]
    for n, answer in enumerate(tree):
        assert answer.eos is not None, answer.failure
        assert re.fullmatch(rf"The number is {n}[a-z]{{3}}", answer.text)
    assert tree[0].logs == "6\n"
    frame_texts: dict[int, str] = {}
    for frame in frames(daemon, controller="jsctrl", controller_arg=FORKS)[1:]:
        for fork in frame["forks"]:
            frame_texts[fork["index"]] = frame_texts.get(fork["index"], "") + fork["text"]
    assert {*frame_texts} == {0, 1, 2}
    for n, text in frame_texts.items():
        assert re.fullmatch(rf"(The number is .* ↩ )?.*{n}?[a-z]{{3}}", text)


def test_a_program_goes_back_to_the_very_start(daemon: Daemon) -> None:
    detour = "start(async () => { const first = label(); await $`Hello`; await gen({ maxTokens: 3 }); backtrack(first); %s })"
    direct = "start(async () => { %s })"
    for way in ("await $`Once`; await gen({ maxTokens: 4 })", "await gen({ maxTokens: 4 })"):
        [found], [expected] = run(daemon, "jsctrl", detour % way), run(daemon, "jsctrl", direct % way)
        assert (found.failure, found.text) == (None, expected.text)
        assert expected.text


def test_the_program_of_the_page_runs(daemon: Daemon) -> None:
    page = (ROOT / "docs" / "AICI-CONTROLLERS.md").read_text()
    program = page.partition("```js\n")[2].partition("```")[0]
    tree = run(daemon, "jsctrl", program)
    assert [answer.failure for answer in tree] == [None, None]
    assert re.match(r"Rate the film from 1 to 5: [1-5] stars\. The best part was", tree[0].text)
    assert re.match(r"Rate the film from 1 to 5: [1-5] stars\. The worst part was", tree[1].text)


def test_the_chat_of_the_page_is_a_chat(daemon: Daemon) -> None:
    page = (ROOT / "docs" / "AICI-CONTROLLERS.md").read_text()
    [program] = [code.partition("```")[0] for code in page.split("```js\n") if code.startswith("const BEGIN")]
    assert run(daemon, "jsctrl", program)[0].logs == "The capital of France is Paris.\n"


def test_the_program_of_the_page_that_imports_says_what_is_so(daemon: Daemon) -> None:
    page = (ROOT / "docs" / "AICI-CONTROLLERS.md").read_text()
    [program] = [code.partition("```")[0] for code in page.split("```js\n") if code.startswith("import { Label")]
    assert run(daemon, "jsctrl", program)[0].text == "The capital of France is probably Paris."


def test_controllers_in_c(daemon: Daemon) -> None:
    assert run(daemon, "yesno", "Is water wet?")[0].text in ("Is water wet?\nyes", "Is water wet?\nno")
    shouted = run(daemon, "uppercase", "", max_tokens=20)[0]
    assert shouted.text
    assert shouted.text == shouted.text.upper()


def test_controllers_that_come_with_uma_trio_are_listed(daemon: Daemon) -> None:
    run(daemon, "yesno")
    listed = cli(daemon, "controllers", "list")
    assert all(name in listed for name in ("jsctrl", "yesno", "uppercase"))


def test_an_upload_runs_under_its_tag(daemon: Daemon, tmp_path: Path) -> None:
    from uma_trio.aici.controllers import shipped

    wasm = tmp_path / "mine.wasm"
    wasm.write_bytes(shipped()["yesno"])
    cli(daemon, "controllers", "upload", wasm, "--tag", "mine")
    assert run(daemon, "mine")[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("controller", "argument", "code"),
    [("nothing", None, "E_CONTROLLER_NOT_FOUND"), ("jsctrl", "start(", "E_CONTROLLER_FAILED")],
)
def test_what_cannot_run(daemon: Daemon, controller: str, argument: Any, code: str) -> None:
    with pytest.raises(ServerError) as error:
        run(daemon, controller, argument)
    assert error.value.code == code


def test_a_deadlock_names_the_variables(daemon: Daemon) -> None:
    answer = run(
        daemon,
        "jsctrl",
        "start(async () => { setVar('there', 1); await waitVars('there', 'nowhere', 'x'.repeat(99)) })",
    )[0]
    assert answer.eos is not None
    assert (answer.eos.reason, answer.eos.waits_for) == ("deadlock", ["nowhere", "x" * 64])


def test_nothing_is_left(daemon: Daemon) -> None:
    run(daemon, "jsctrl", FORKS)
    daemon.settled()


def test_a_runtime_of_another_make(library: None, tmp_path: Path) -> None:
    program = tmp_path / "aicirt"
    script = ROOT / "tests" / "support" / "other_runtime.py"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    program.chmod(0o700)
    with real_daemon(
        "--aici-executable", program, "--aici-tokenizer", "other", "--threads", "1", folder=tmp_path
    ) as found:
        tokens = [300, 301, 302]
        answer = run(found, "digits", tokens)[0]
        assert answer.eos is not None
        assert answer.eos.reason == "stop"
        assert (answer.inserted_tokens, answer.sampled_tokens) == (3, 2)
        with pytest.raises(ServerError) as error:
            run(found, "jsctrl", PROGRAM)
        assert error.value.code == "E_CONTROLLER_NOT_FOUND"
        found.logged("the tokenizer is other")
