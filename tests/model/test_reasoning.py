"""Reasoning with the real engine: the embedded model, with two of its tokens renamed to markers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import run_process
from tests.support.profile import thorough
from tests.support.real_daemon import Daemon, real_daemon
from tests.support.terminal import terminal
from tests.support.thinking_model import QUESTION, write_thinking_model


@pytest.fixture(scope="module", params=["CONTROL", thorough("USER_DEFINED")])
def daemon(library: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    path = tmp_path_factory.mktemp("model") / "thinking.gguf"
    write_thinking_model(path, request.param)
    with real_daemon("--model", str(path), folder=tmp_path_factory.mktemp("daemon")) as found:
        yield found


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_and_answer(daemon: Daemon, stream: bool) -> None:
    answer = daemon.ask(messages=QUESTION, separate_reasoning=True, stream=stream, logprobs=0)
    reasoning = "".join(event["text"] for event in answer.events if event["event"] == "reasoning")
    assert reasoning + (answer.last.get("reasoning") or "") == "capital of France is"
    assert answer.text == "aris."
    assert answer.last["usage"]["reasoning_tokens"] == answer.last["usage"]["completion_tokens"] - 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("constraint", [{"choice": ["aris", "ome"]}, {"regex": "aris|ome"}, {"json_object": True}])
def test_a_constraint_is_for_the_answer_after_the_reasoning(
    daemon: Daemon, constraint: dict[str, object], stream: bool
) -> None:
    fields = {"messages": QUESTION, "constraint": constraint, "stream": stream, "max_tokens": 40}
    answer = daemon.ask(separate_reasoning=True, **fields)
    reasoning = "".join(event["text"] for event in answer.events if event["event"] == "reasoning")
    assert reasoning + (answer.last.get("reasoning") or "") == "capital of France is"
    assert answer.text.startswith("{") if "json_object" in constraint else answer.text == "aris"
    at_once = daemon.ask(**fields)
    assert at_once.text[0] in "{ao"
    at_once = daemon.ask(separate_reasoning=True, **{**fields, "constraint": {"gbnf": 'root ::= "aris"'}})
    assert at_once.text == "aris"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n_tokens", [0, 1, 3])
def test_a_budget_ends_the_reasoning(daemon: Daemon, n_tokens: int, stream: bool) -> None:
    fields = {"messages": QUESTION, "stream": stream, "reasoning_budget": n_tokens}
    answer = daemon.ask(separate_reasoning=True, **fields)
    reasoning = "".join(event["text"] for event in answer.events if event["event"] == "reasoning")
    reasoning += answer.last.get("reasoning") or ""
    assert reasoning == "".join(("capital", " of", " F")[:n_tokens])
    assert answer.last["usage"]["reasoning_tokens"] == 2 + n_tokens
    constrained = {**fields, "constraint": {"regex": "aris|ome"}, "max_tokens": 20}
    assert daemon.ask(separate_reasoning=True, **constrained).text in ("aris", "ome")


@pytest.mark.parametrize("n_tokens", [0, 1, 3])
def test_a_constraint_after_the_marker_applies_after_the_forced_one(daemon: Daemon, n_tokens: int) -> None:
    constraint = {"regex": "aris|ome", "after": "</think>"}
    answer = daemon.ask(prompt="Hello <think>", constraint=constraint, reasoning_budget=n_tokens, max_tokens=20)
    assert answer.text.endswith(("aris", "ome"))
    assert answer.last["constraint_complete"]
    assert answer.last["usage"]["completion_tokens"] < 10


def test_a_budget_that_is_large_enough_changes_nothing(daemon: Daemon) -> None:
    answer = daemon.ask(messages=QUESTION, separate_reasoning=True, reasoning_budget=10)
    assert answer.text == "aris."


def test_reasoning_that_never_ends_is_ended_by_its_client(daemon: Daemon) -> None:
    """The token that ends it is banned, so nothing else does."""
    with daemon.wire() as wire:
        wire.send(type="tokenize", text="</think>", add_special=False, keep_alive=True)
        found = wire.receive()
        assert found is not None
        [end] = found["tokens"]
        fields = {"messages": QUESTION, "separate_reasoning": True, "ignore_eos": True, "max_tokens": 200}
        wire.send(id="r", logit_bias={str(end): -100}, **fields)
        assert wire.receive()["event"] == "reasoning"  # type: ignore[index]
        wire.send(type="steer", request_id="r", end_reasoning=True)
        events = wire.rest()
    names = [event["event"] for event in events if event["event"] != "steered"]
    at = names.index("inserted")
    assert {*names[:at]} <= {"reasoning"}
    assert {*names[at + 1 :]} == {"token", "eos"}
    [insertion] = [event["insertion"] for event in events if event["event"] == "inserted"]
    assert (insertion["kind"], insertion["tokens"]) == ("end_of_reasoning", 1)
    assert events[-1]["usage"]["completion_tokens"] == 200
    assert events[-1]["usage"]["reasoning_tokens"] == insertion["after_tokens"] + 1


def test_a_session_goes_on_after_reasoning(daemon: Daemon) -> None:
    for text in ("What is the capital of France?", "And of Italy?"):
        answer = daemon.ask(
            messages=[{"role": "user", "content": text}], session_id="a", separate_reasoning=True, stop=["."]
        )
    assert answer.last["session"]["durable"]
    with daemon.wire() as wire:
        wire.send(type="sessions", action="read", session_id="a")
        event = wire.receive()
    assert event is not None
    assert event["messages"][1].pop("generation")["reason"] == "stop"
    assert event["messages"][1] == {"role": "assistant", "content": "aris", "reasoning": "capital of France is"}
    assert len(event["messages"]) == 4


# -- what the commands show --------------------------------------------------------------------------

ASK = [sys.executable, "-m", "uma_trio", "ask", "What is the capital of France?"]


def test_ask_prints_the_answer_on_stdout_and_reasoning_on_stderr_if_asked_to(daemon: Daemon) -> None:
    def ask(*arguments: str) -> tuple[str, str]:
        found = run_process("ask", "What is the capital of France?", "--socket", daemon.socket, *arguments)
        return found.stdout, found.stderr

    assert ask() == ("aris.\n", "")
    assert ask("--hide-reasoning") == ("aris.\n", "")
    assert ask("--show-reasoning") == ("aris.\n", "capital of France is\n\n")
    assert ask("--show-reasoning", "--no-stream") == ("aris.\n", "capital of France is\n\n")
    assert ask("--show-reasoning", "--reasoning-budget", "2")[1] == "capital of\n\n"
    events = [json.loads(line) for line in ask("--json")[0].splitlines()]
    assert "".join(event["text"] for event in events if event["event"] == "reasoning") == "capital of France is"


def test_ask_on_a_terminal_shows_reasoning_dim(daemon: Daemon) -> None:
    with terminal([*ASK, "--socket", str(daemon.socket)], columns=60, lines=10) as shown:
        assert shown.wait() == 0
        assert shown.text.split("\n")[:3] == ["capital of France is", "", "aris."]
        assert b"\x1b[2m" in shown.written
    with terminal([*ASK, "--socket", str(daemon.socket), "--hide-reasoning"], columns=60, lines=10) as shown:
        assert shown.wait() == 0
        assert shown.text.split("\n")[0] == "aris."


def test_chat_shows_reasoning_and_saves_it(daemon: Daemon, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uma_trio", "chat", "--socket", str(daemon.socket)]
    with terminal(command, columns=100, lines=24, environment={"PROMPT_TOOLKIT_NO_CPR": "1"}) as shown:
        shown.wait_for("/help")
        shown.type("What is the capital of France?\r")
        shown.wait_for("capital of France is\n\naris.\n\n>")
        for name in ("chat.json", "chat.md"):
            shown.type(f"/save {tmp_path / name}\r")
            shown.wait_for(name + "\n>")
        shown.type("\x04")
        assert shown.wait() == 0
    [_, answer] = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert answer == {"role": "assistant", "content": "aris.", "reasoning": "capital of France is"}
    assert "<summary>Reasoning</summary>\n\ncapital of France is" in (tmp_path / "chat.md").read_text()


def test_sessions_show_reasoning(daemon: Daemon) -> None:
    daemon.ask(messages=QUESTION, session_id="b", separate_reasoning=True)
    command = ("sessions", "show", "b", "--socket", daemon.socket)
    found = run_process(*command)
    assert found.stdout.endswith("\nassistant\ncapital of France is\n\naris.\n")
    found = run_process(*command, "--json")
    assert json.loads(found.stdout)["messages"][1]["reasoning"] == "capital of France is"
