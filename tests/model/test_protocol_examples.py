"""The examples of the socket protocol against the real daemon: requests are served, events have the fields of real ones."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import pytest

from tests.support.random_models import random_model
from tests.support.real_daemon import ROOT, real_daemon

PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("PROTOCOL.md", "PROTOCOL-REFERENCE.md"))
EXAMPLES = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
CONTROLLER_EVENTS = {"fork", "controller", "backtrack", "controllers"}
ALL_EVENTS = [example for example in EXAMPLES if "event" in example and example["event"] != "cancel"]
EVENTS = [example for example in ALL_EVENTS if example["event"] not in CONTROLLER_EVENTS]
MESSAGES = [example for example in EXAMPLES if example not in ALL_EVENTS]

OPEN = {"metadata", "arguments", "metrics", "records"}
"""Fields whose content is the client's, or has a page of its own."""
OF_SOME_MACHINES = {"energy_j"}
"""Fields that a machine without counters of energy does not send; an example may leave them out."""


def check_fields(example, real, where):
    """``example`` has all fields that each of ``real`` has, and none that no real one has; objects inside as well."""
    every, some = set.intersection(*map(set, real)) - OF_SOME_MACHINES, set.union(*map(set, real))
    if not where.endswith(".sampling"):  # the parameters have a table of their own
        assert every <= set(example), f"{where} lacks {every - set(example)}"
    assert set(example) <= some, f"{where} has {set(example) - some}, which no real one has"
    for name, value in example.items():
        values = [one[name] for one in real if name in one]
        assert {type(value)} <= {type(one) for one in values} | {int, float}, f"{where}.{name}"
        if isinstance(value, dict) and name not in OPEN:
            check_fields(value, values, f"{where}.{name}")
        elif isinstance(value, list) and value and isinstance(value[0], dict) and name not in OPEN:
            inners = [inner for found in values for inner in found]
            for one in value if inners else ():  # this daemon may have none, such as adapters
                check_fields(one, inners, f"{where}.{name}")


MORE = [
    {"id": "a", "prompt": "Once", "max_tokens": 3, "n": 2, "temperature": 1.0, "stream": False},
    {"id": "b", "prompt": "Once", "max_tokens": 3, "n": 2, "temperature": 1.0, "progress": True},
    {"id": "c", "prompt": "Once upon a time", "max_tokens": 30, "stop": " ", "metadata": {"x": 1}},
    {"id": "d", "prompt": "Once", "max_tokens": 10**6},
    {"id": "e", "prompt": "Once", "max_tokens": 3, "metadata": {"x": 1}, "model": "none"},
    {"id": "f", "prompt": "Once", "max_tokens": 3, "logprobs": 2, "stream": False, "echo": True},
    {"id": "g", "prompt": "Once upon a time " * 100, "max_tokens": 3, "progress": True, "echo": True},
    {"type": "sessions", "id": "h"},
    {"type": "sessions", "action": "read", "session_id": "cooking", "id": "i"},
    {"type": "models", "action": "unload", "model": "embedded", "id": "j"},
    {"id": "k", "prompt": "Once", "max_tokens": 3, "progress": True},
    {"id": "l", "prompt": "Once", "max_tokens": 3, "forecast": True},
]
CALLS = [
    {
        **message,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 1,
    }
    for message in MESSAGES
    if message.get("tools")
]
REASONING = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "separate_reasoning": True},
]
THINKS = "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
"""A template behind which everything is reasoning, until the model writes ``</think>``."""


@pytest.fixture(scope="module")
def real(library, tmp_path_factory):
    """All events that the examples cause, by kind, and those of more requests."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "thinks.jinja").write_text(THINKS)
    found = {}
    # a daemon of their own: the sessions of the examples stay in it
    for name, flags, sent in (
        ("plain", (), [message for message in (*MESSAGES, *MORE, *CALLS) if message.get("type") != "rerank"]),
        (
            "rerank",
            ("--model", str(random_model("tiny-bert-rank", "f32", ctx=512))),
            [message for message in MESSAGES if message.get("type") == "rerank"],
        ),
        ("reasoning", ("--chat-template", str(folder / "thinks.jinja")), REASONING),
    ):
        (folder / name).mkdir()
        with real_daemon("--parallel", "4", *flags, folder=folder / name) as daemon:
            for message in sent:
                for event in events_of(daemon, message):
                    found.setdefault(event["event"], []).append(event)
    return found


def events_of(daemon, message):
    """What the daemon sends for a message on a connection of its own."""
    if message.get("type") == "watch":
        return watched(daemon, message)
    if message.get("type") == "steer":
        return steered(daemon, message)
    if message.get("type") == "explain":
        return explained(daemon, message)
    with daemon.wire() as wire:
        wire.send(**message)
        with contextlib.suppress(OSError):  # it may have answered and closed already
            wire.sock.shutdown(socket.SHUT_WR)
        events = wire.rest()
    assert not [event for event in events if event.get("code", "").startswith("E_PROTO_")], (message, events)
    return events


def watched(daemon, query):
    """Events of a watch, which would go on for ever, until one of them shows a request."""
    events = []
    with daemon.wire() as busy, daemon.wire() as wire:
        busy.send(id="busy", prompt="Once", max_tokens=2000, ignore_eos=True)
        wire.send(**query)
        while not any(each["state"] == "decode" for event in events for each in event["sequences"]):
            events.append(wire.receive())
    return events


def steered(daemon, query):
    """The answer to a change of a request that runs, and what its own client gets about the text."""
    with daemon.wire() as busy, daemon.wire() as wire:
        busy.send(id=query["request_id"], prompt="Once", max_tokens=2000, ignore_eos=True)
        while busy.receive()["event"] != "token":
            pass
        wire.send(**query)
        answer = wire.receive()
        while (event := busy.receive())["event"] != "inserted":
            assert event["event"] == "token"
        return [answer, event]


def explained(daemon, query):
    """Why a prompt was computed again: its first message has changed."""
    for day in ("first", "second"):
        system = {"role": "system", "content": f"You are a helpful assistant of many words. Today is the {day}."}
        message = {"messages": [system, {"role": "user", "content": "Hi"}], "max_tokens": 1}
        daemon.ask(id=query["request_id"], **message)
    with daemon.wire() as wire:
        wire.send(**query)
        return [wire.receive()]


def test_there_are_examples_of_both_kinds():
    assert len(EVENTS) > 6
    assert len(MESSAGES) > 6


@pytest.mark.parametrize("example", EVENTS, ids=lambda example: f"{example['event']}-{example.get('id')}")
def test_an_event_has_the_fields_of_a_real_one(real, example):
    check_fields(example, real[example["event"]], example["event"])


def test_a_missing_field_is_found(real):
    [*_, example] = [example for example in EVENTS if example["event"] == "eos"]
    usage = {name: value for name, value in example["usage"].items() if name != "dropped_tokens"}
    with pytest.raises(AssertionError, match=r"lacks .*dropped_tokens"):
        check_fields(example | {"usage": usage}, real["eos"], "eos")
