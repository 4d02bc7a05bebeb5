"""Detached answers of the real daemon, which is killed in the middle of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import invoke
from tests.support.real_daemon import LONG_CTX, Answer, Daemon, real_daemon

STORY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 120,
    "ignore_eos": True,
    "temperature": 0.8,
}
SEEDS = (1, 2, 3)


def detach(daemon: Daemon, name: str, **fields: Any) -> dict[str, Any]:
    return daemon.ask(id=name, detached=True, **{**STORY, **fields}).last


def attach(daemon: Daemon, name: str, **fields: Any) -> Answer:
    with daemon.wire() as wire:
        wire.send(type="attach", id=name, **fields)
        return Answer(wire.rest())


def killed(daemon: Daemon) -> None:
    daemon.process.kill()
    daemon.process.wait()


@pytest.mark.cpu("on a GPU the rest of a sampled text follows from logits that round otherwise after a restart")
def test_answers_survive_kill_9(library: None, tmp_path: Path) -> None:
    """Three at a time, one of them a turn of a session; the daemon is killed when a client has got some of each."""
    flags = (*LONG_CTX, "--state-dir", str(tmp_path / "state"), "--kv-unified", "off", "--flash-attn", "off")
    with real_daemon(*flags) as daemon:
        whole = {seed: daemon.ask(**STORY, seed=seed) for seed in SEEDS}
        for seed in SEEDS:
            session = {"session_id": "s"} if seed == 1 else {}
            assert detach(daemon, f"a{seed}", seed=seed, **session)["answers"][0]["durable"]
        seen: dict[int, list[dict[str, Any]]] = {}
        for seed in SEEDS:
            with daemon.wire() as wire:
                wire.send(type="attach", id=f"a{seed}")
                seen[seed] = [event for event in (wire.receive() for _ in range(10 * seed)) if event is not None]
        killed(daemon)
    with real_daemon(*flags) as daemon:
        for seed in SEEDS:
            found = attach(daemon, f"a{seed}")
            assert found.events[: len(seen[seed])] == seen[seed], "what a client has got stays as it was"
            assert [event["number"] for event in found.events] == [*range(1, len(found.events) + 1)]
            assert found.last["usage"]["completion_tokens"] == 120
            assert (found.reason, found.ids) == (whole[seed].reason, whole[seed].ids)
            assert attach(daemon, f"a{seed}", after=50).events == found.events[50:]
        [info] = daemon.ask(type="sessions", action="describe", session_id="s").last["sessions"]
        assert (info["turns"], info["durable"]) == (1, True)
        killed(daemon)
    with real_daemon(*flags) as daemon:
        assert attach(daemon, "a1").ids == whole[1].ids, "an answer that has ended is read from its file"


def test_tool_calls_and_a_reasoning_budget_survive_kill_9(library: None, tmp_path: Path) -> None:
    tools = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    ask = {
        "messages": [{"role": "user", "content": "How warm is it in Lima?"}],
        "tools": tools,
        "tool_choice": "required",
        "ignore_eos": False,
        "temperature": 0,
    }
    flags = (*LONG_CTX, "--state-dir", str(tmp_path / "state"))
    with real_daemon(*flags) as daemon:
        detach(daemon, "a", **ask)
        whole = attach(daemon, "a")
        detach(daemon, "b", **ask)
        with daemon.wire() as wire:
            wire.send(type="attach", id="b")
            first = wire.receive()
        killed(daemon)
    assert whole.reason == "tool_calls"
    assert first is not None
    with real_daemon(*flags) as daemon:
        found = attach(daemon, "b")
        assert found.events[0] == first
        assert found.reason == "tool_calls"
        [call] = found.last["tool_calls"]
        [expected] = whole.last["tool_calls"]
        assert (call["name"], call["arguments"]) == (expected["name"], expected["arguments"])
        ids = {event["call_id"] for event in found.events if "call_id" in event}
        assert ids == {call["id"]}, "the events from before and after the kill name the same call"


def test_the_commands_begin_follow_list_and_delete_answers(library: None, daemon: Daemon) -> None:
    begun = invoke("ask", "--detach", "What is the capital of France?", "--socket", daemon.socket)
    assert begun.returncode == 0
    name = begun.stdout.strip()
    followed = invoke("attach", name, "--socket", daemon.socket)
    assert (followed.returncode, followed.stdout) == (0, "The capital of France is Paris.\n")
    lines = invoke("attach", name, "--json", "--after", "2", "--socket", daemon.socket).stdout.splitlines()
    assert [json.loads(line)["number"] for line in lines] == [*range(3, 3 + len(lines))]
    assert f"{name}  completed" in invoke("attach", "--socket", daemon.socket).stdout
    assert invoke("attach", name, "--cancel", "--socket", daemon.socket).stderr == f"{name} is completed\n"
    assert invoke("attach", name, "--delete", "--socket", daemon.socket).stderr == f"{name} is deleted\n"
    missing = invoke("attach", name, "--socket", daemon.socket)
    assert (missing.returncode, "E_ANSWER_NOT_FOUND" in missing.stderr) == (2, True)
    assert invoke("attach", "--cancel", "--socket", daemon.socket).returncode == 2


@pytest.mark.parametrize("action", ["cancel", "delete"])
def test_a_running_answer_can_be_ended(library: None, daemon: Daemon, action: str) -> None:
    detach(daemon, "long", max_tokens=3000)
    with daemon.wire() as wire:
        wire.send(type="attach", id="long")
        wire.receive()
        assert daemon.ask(type="answers", action=action, answer_id="long").last["answers"][0]["state"] == "cancelled"
        assert Answer(wire.rest()).reason == "cancelled"
    if action == "cancel":
        daemon.ask(type="answers", action="delete", answer_id="long")
    daemon.settled()
