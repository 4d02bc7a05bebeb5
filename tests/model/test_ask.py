"""``uma-trio ask`` as people use it: words, pipes, full disks, limits, a daemon that loads or stops."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.commands import environment, invoke
from tests.support.profile import sampled
from tests.support.real_daemon import LONG_CTX, ROOT, real_daemon, started
from tests.support.terminal import terminal
from uma_trio.cli.answer import TextPrinter
from uma_trio.client import Token

QUESTION = "What is the capital of France?"
COMMAND = [sys.executable, "-m", "uma_trio"]


@pytest.fixture
def run(daemon):
    """Run a command with the daemon's socket in the environment: in this process if it needs no pipes of its own."""

    def run(*arguments, input="", **options):
        if not options:
            return invoke(*arguments, stdin=input, UMA_SOCKET=str(daemon.socket))
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        return subprocess.run(
            [*COMMAND, *map(os.fsencode, map(str, arguments))],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=environment(UMA_SOCKET=str(daemon.socket)),
            **options,
        )

    return run


def chat(daemon, text, **fields):
    return daemon.ask(messages=[{"role": "user", "content": text}], **fields).text.rstrip("\n") + "\n"


# -- the question -------------------------------------------------------------------------------------------


def test_words_need_no_quotes(run, daemon):
    found = run("ask", *QUESTION.split())
    assert (found.returncode, found.stdout) == (0, chat(daemon, QUESTION))


@pytest.mark.parametrize(
    ("arguments", "piped", "sent"),
    [
        (["Repeat:"], "hello", "Repeat:\n\nhello"),
        (["--prompt", "Repeat:"], "hello", "Repeat:\n\nhello"),
        ([], "hello", "hello"),
        (["-"], "hello", "hello"),
        (["hello"], "", "hello"),
        (["hello"], "\n", "hello"),
    ],
)
def test_a_question_and_what_is_piped_in_go_together(run, daemon, arguments, piped, sent):
    found = run("ask", *arguments, "--max-tokens", 30, input=piped)
    assert found.stdout == chat(daemon, sent, max_tokens=30)


@pytest.mark.parametrize("stdin", ["empty", "blank", "null", "closed", "terminal"])
def test_no_question_is_an_error_that_says_what_to_do(run, stdin):
    with ExitStack() as stack:
        options = {"empty": {"input": ""}, "blank": {"input": " \n"}, "null": {"stdin": subprocess.DEVNULL}}.get(
            stdin, {}
        )
        if stdin == "closed":
            options = {"stdin": None, "preexec_fn": lambda: os.close(0)}
        if stdin == "terminal":
            master, slave = pty.openpty()
            stack.callback(os.close, master)
            stack.callback(os.close, slave)
            options = {"stdin": slave}
        found = run("ask", **options)
    assert (found.returncode, found.stdout) == (2, "")
    assert "nothing to ask" in found.stderr
    assert "uma-trio ask" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_question_needs_no_stdin(run, daemon):
    found = run("ask", QUESTION, stdin=None, preexec_fn=lambda: os.close(0))
    assert (found.returncode, found.stdout, found.stderr) == (0, chat(daemon, QUESTION), "")


def test_a_pipe_that_stays_open_is_said(daemon):
    """As when another program starts the command and keeps its own end of stdin open."""
    with subprocess.Popen(
        [*COMMAND, "ask", "--socket", daemon.socket, QUESTION],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as asking:
        assert "waiting for the end of stdin" in asking.stderr.readline()
        answer, _ = asking.communicate("", timeout=60)
    assert answer == chat(daemon, QUESTION)


def test_control_characters_do_not_reach_a_terminal(monkeypatch, capsys):
    printer, token = TextPrinter(), Token(id="r", text="a\x1b[2Jb\tc", token_id=1)
    printer.print(token)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printer.print(token)
    assert capsys.readouterr().out == "a\x1b[2Jb\tc" + "a\ufffd[2Jb\tc"


# -- the output ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here; Linux has it")
@pytest.mark.parametrize(
    "arguments",
    sampled([["ask", QUESTION], ["ask", "--json", QUESTION], ["metrics"], ["sessions"], ["--help"], ["ask", "-h"]], 3),
)
def test_a_full_disk_is_one_line_for_every_command(run, daemon, arguments):
    with open("/dev/full", "w") as full:
        found = run(*arguments, stdout=full)
    assert (found.returncode, found.stderr) == (1, "uma-trio: cannot write the output: No space left on device\n")
    daemon.settled()


@pytest.mark.parametrize("arguments", [["ask", QUESTION], ["metrics"], ["--help"]])
def test_a_closed_pipe_ends_every_command_quietly(run, daemon, arguments):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        found = run(*arguments, stdout=closed)
    assert (found.returncode, found.stderr) == (141, "")
    daemon.settled()


def test_logprobs_are_a_table_behind_the_answer(run):
    answer = run("ask", QUESTION).stdout
    found = run("ask", "--logprobs", 2, QUESTION).stdout
    assert found.startswith(answer + "\n")
    rows = found.removeprefix(answer + "\n").splitlines()
    assert len(rows) > 3
    for row in rows:
        assert row.count("%") == 3
    several = run("ask", "--n", 2, "--logprobs", 0, "--max-tokens", 3, QUESTION).stdout
    assert several.count("%") == 6


# -- what the daemon says -----------------------------------------------------------------------------------


def test_an_answer_that_is_cut_says_so(run):
    found = run("ask", "--max-tokens", 3, QUESTION)
    assert found.returncode == 0
    assert found.stderr == "the answer is not complete: it was cut at --max-tokens 3; a larger number gives more\n"
    found = run("ask", "--n", 2, "--max-tokens", 3, QUESTION)
    assert sorted(line[:9] for line in found.stderr.splitlines()) == ["answer 0 ", "answer 1 "]


def test_verbose_names_the_daemon(run, daemon):
    for arguments in (
        ["ask", "-v", QUESTION],
        ["metrics", "--verbose"],
        ["sessions", "-v"],
        ["sessions", "list", "-v"],
        ["attach", "-v", "--json"],
        ["ps", "-v"],
    ):
        found = run(*arguments)
        assert found.returncode == 0
        [line] = found.stderr.splitlines()
        for part in (str(daemon.socket), "model embedded,", f"pid {daemon.pid}", "version"):
            assert part in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nope"], ["'nope'", "serves embedded", "choose one of these"]),
        (["--max-tokens", "100000000"], ["100000000", "--max-tokens"]),
    ],
)
def test_a_refusal_names_the_fix_and_the_socket(run, daemon, arguments, words):
    found = run("ask", *arguments, QUESTION)
    assert (found.returncode, found.stdout) == (2, "")
    for word in (*words, str(daemon.socket)):
        assert word in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.cpu("a GPU ends such a prefill before its progress is shown")
def test_a_long_prefill_shows_its_progress_on_a_terminal_and_leaves_no_trace(daemon):
    long = "What is the capital of France? " * 180
    command = [*COMMAND, "ask", "--max-tokens", "5", "--socket", str(daemon.socket), long]
    with terminal(command, columns=100, lines=50, environment=environment()) as shown:
        shown.wait_for(lambda _: b"prefill" in shown.written)  # it is perhaps on the screen for a moment only
        assert shown.wait() == 0
        assert "not complete" in shown.text
        assert "prefill" not in shown.text
    assert re.search(rb"\d+/\d{4}", shown.written)


def test_without_a_terminal_nothing_but_the_answer_is_written(run):
    found = run("ask", "--no-stream", "What is the capital of France? " * 200, "--max-tokens", 5)
    assert found.stderr.count("\n") == 1
    assert "prefill" not in found.stdout + found.stderr


# -- a daemon that loads ------------------------------------------------------------------------------------


@pytest.fixture
def loading(library, tmp_path):
    """A daemon that begins to load its model while the test runs."""
    with started(socket=tmp_path / "uma.sock", log_file=tmp_path / "log") as daemon:
        yield daemon
        daemon.signal(signal.SIGTERM)
        daemon.wait()


def test_ask_waits_for_a_daemon_that_starts(loading):
    found = subprocess.run(
        [*COMMAND, "ask", "--socket", loading.socket, "--wait", "60", QUESTION],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(),
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "Paris" in found.stdout


def test_a_daemon_that_is_stopping_is_named(library, tmp_path):
    with real_daemon(*LONG_CTX, folder=tmp_path) as daemon:
        with daemon.wire() as busy:
            busy.send(id="a", prompt="Once", max_tokens=3000, ignore_eos=True)
            busy.receive()
            daemon.signal(signal.SIGTERM)
            with contextlib.suppress(ConnectionRefusedError):
                while True:
                    daemon.wire().sock.close()
            found = invoke("ask", "--socket", daemon.socket, "--wait", "0", QUESTION)
        assert daemon.wait() == 0
    assert found.returncode == 2
    assert f"the daemon at {daemon.socket} is stopping" in found.stderr


def test_an_answer_without_max_tokens_may_fill_its_sequence(run):
    """One that ends by itself is complete, however long it is."""
    found = run("ask", "--stats", "Count from 1 to 60.")
    assert found.stdout.split()[-1].rstrip(".") == "60"
    assert "not complete" not in found.stderr


@pytest.mark.parametrize("options", [(), ("--no-stream",), ("--full-text",)])
def test_an_answer_goes_on_from_its_beginning(run, options):
    found = run("ask", "--assistant", "The capital of", *options, QUESTION)
    assert found.stdout.splitlines()[-1].endswith("The capital of France is Paris.")
    assert found.stdout.count("The capital of France is") == 1
    several = run("ask", "--assistant", "The capital of", "--n", "2", QUESTION)
    assert several.stdout == "--- 0\nThe capital of France is Paris.\n--- 1\nThe capital of France is Paris.\n"
    assert "no place for --assistant" in run("ask", "--raw", "--assistant", "a", *options, "b").stderr


@pytest.mark.parametrize("arguments", [("ask",), ("rerank", "q", "-f", "-")])
def test_what_is_too_large_for_the_daemon_is_said(run, arguments):
    found = run(*arguments, input=("x" * 999 + "\n") * 18_000)
    assert found.returncode == 2
    assert "--max-frame-bytes" in found.stderr


# -- constraints ----------------------------------------------------------------------------------


def test_an_answer_is_what_the_options_allow(run, tmp_path):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    (tmp_path / "city.json").write_text(json.dumps(schema))
    (tmp_path / "city.gbnf").write_text('root ::= "Paris" | "Rome"')
    (tmp_path / "city.lark").write_text('start: "Paris" | "Rome"')
    for options in (["--json-schema", tmp_path / "city.json"], ["--json-schema", json.dumps(schema)]):
        found = run("ask", *options, "What is the capital of France?")
        assert json.loads(found.stdout)["city"] in ("Paris", "Rome"), found.stderr
    for options in (
        ["--choice", "Paris", "--choice", "Rome"],
        ["--regex", "Paris|Rome"],
        ["--grammar", tmp_path / "city.gbnf"],
        ["--grammar", tmp_path / "city.lark"],
    ):
        found = run("ask", *options, "What is the capital of France?")
        assert found.stdout.strip() == "Paris", found.stderr


def test_a_constraint_begins_behind_a_text(run):
    found = run("ask", "--after", "France is", "--choice", " Rome", "What is the capital of France?")
    assert found.stdout.strip() == "The capital of France is Rome"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--choice", "a", "--regex", "b"], "do not go together"),
        (["--after", "a"], "--json-schema"),
        (["--json-schema", "missing.json"], "missing.json"),
        (["--json-schema", "{"], "is not valid JSON"),
        (["--grammar", "missing.gbnf"], "missing.gbnf"),
        (["--json-schema", '{"not": {}}'], "not"),
        (["--regex", "(a"], "unclosed group"),
        (["--grammar", "/dev/null"], "/dev/null"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_one_clear_error(run, options, error):
    found = run("ask", *options, "Hello")
    assert found.returncode == 2
    assert error in found.stderr
    assert "Traceback" not in found.stderr


def test_an_answer_that_is_cut_short_of_its_constraint_has_an_exit_code_of_its_own(run):
    found = run("ask", "--json-object", "--max-tokens", 3, "Write a record")
    assert found.returncode == 4
    assert run("ask", "--max-tokens", 3, "Count from 1 to 20").returncode == 0


# -- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
def test_calls_are_printed_as_lines_of_json(run, tmp_path, wrapped):
    tool = {
        "name": "look_up",
        "parameters": {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    }
    tools = {"tools": [{"type": "function", "function": tool}]} if wrapped else [tool]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    found = run("ask", "--tools", tmp_path / "tools.json", "--tool-choice", "look_up", "--max-tokens", 100, QUESTION)
    call = json.loads(found.stdout)
    assert call["name"] == "look_up"
    assert call["arguments"]["city"] in ("Paris", "Rome")
    found = run("ask", "--tools", tmp_path / "tools.json", "--tool-choice", "look-up", QUESTION)
    assert (found.returncode, "look-up" in found.stderr) == (2, True)


def test_a_session_shows_its_calls(run, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "now", "parameters": {"properties": {}}}]))
    options = ["--tools", tmp_path / "tools.json", "--tool-choice", "now", "--session", "calls", "--max-tokens", 100]
    call = json.loads(run("ask", *options, "What time is it?").stdout)
    assert (call["name"], call["arguments"]) == ("now", {})
    assert json.loads(run("sessions", "show", "calls").stdout.splitlines()[-1]) == call
    run("sessions", "export", "calls", tmp_path / "calls.json")
    assert json.loads((tmp_path / "calls.json").read_text())["messages"][-1]["tool_calls"] == [call]
    run("sessions", "export", "calls", tmp_path / "calls.md")
    assert json.dumps(call) in (tmp_path / "calls.md").read_text()
