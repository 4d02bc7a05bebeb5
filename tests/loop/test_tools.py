"""Calls of tools over the real daemon with a fake engine in virtual time.

The fake engine's tokens are numbers; here those of the answer to ``TEXT`` stand for the pieces of an output.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest

from tests.support.fake_engine import EOG, FakeEngine, expected_continuation
from tests.support.serving import FakeChat, remembering, serving
from uma_trio.client import Eos, ServerError, Token, ToolCall, ToolCallDelta
from uma_trio.daemon.prompts.tool_prompts import PLAIN_TOOLS, template_chat
from uma_trio.engine_link.messages import EngineDied
from uma_trio.protocol.chat import ChatMessage, Tool

WEATHER = {"name": "weather", "description": "The weather.", "parameters": {"properties": {"city": {"type": "string"}}}}
NOTHING = {"name": "nothing"}
TOOLS = [WEATHER, NOTHING]
CALL = ['<tool_call>{"name": "weather", ', '"arguments": {"ci', 'ty": "Lima"', "}}", "</tool_call>"]
PIECES = ["Let ", "me see.\n", *CALL, '\n<tool_call>{"name": "nothing"}', "</tool_call>"]


def scripted(pieces: list[str] = PIECES, **fields: Any) -> tuple[FakeEngine, dict[str, Any]]:
    """An engine that answers a request with ``pieces``, one a token, and ends; the request; what its tokens stand for."""
    tools = msgspec.convert(TOOLS, list[Tool]) if fields == {} else []
    for n in itertools.count():
        chat = [ChatMessage(role="user", content=f"question {n}")]
        [part] = FakeChat().parts(*template_chat(chat, tools, PLAIN_TOOLS))
        prompt = [byte + 100 for byte in part.text.encode()]
        ids = expected_continuation(prompt, len(pieces))
        if len({*ids}) == len(ids) and EOG not in ids:
            break
    spelled = {token: piece.encode() for token, piece in zip(ids, pieces, strict=True)}
    request = {"messages": [{"role": "user", "content": f"question {n}"}], "tools": TOOLS, "max_tokens": 40, **fields}
    return FakeEngine(eog_after=len(prompt) + len(ids)), {"request": request, "spelled": spelled}


async def events_of(harness, request, encoding="json", **fields):
    async with harness.client(encoding=encoding) as client:
        return [event async for event in client.generate(**{**request, **fields})]


def text_of(events) -> str:
    return "".join(event.text for event in events if isinstance(event, Token)) + (events[-1].text or "")


def streamed(events) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call, put together from its parts."""
    found = []
    for number, parts in itertools.groupby(
        (event for event in events if isinstance(event, ToolCallDelta)), lambda event: event.call
    ):
        first, *rest = parts
        assert number == len(found)
        found.append((first.call_id, first.name, "".join(part.arguments for part in rest)))
    return found


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_calls_come_in_events_of_their_own(autojump_clock, encoding):
    engine, script = scripted()
    async with serving(engine, spelled=script["spelled"]) as harness:
        events = await events_of(harness, script["request"], encoding)
        end = events[-1]
        assert text_of(events) == "Let me see."
        assert [(name, json.loads(arguments)) for _, name, arguments in streamed(events)] == [
            ("weather", {"city": "Lima"}),
            ("nothing", {}),
        ]
        assert end.reason == "tool_calls"
        assert end.tool_calls == [
            ToolCall(id=call_id, name=name, arguments=json.loads(arguments))
            for call_id, name, arguments in streamed(events)
        ]
        pieces = [event.arguments for event in events if isinstance(event, ToolCallDelta) and event.call == 0]
        assert pieces == [None, '{"ci', 'ty": "Lima"', "}"]
        assert [event.text for event in events if isinstance(event, Token)] == ["Let", " me see."]
        await harness.settled()


async def test_without_streaming_the_eos_has_them(autojump_clock):
    engine, script = scripted()
    async with serving(engine, spelled=script["spelled"]) as harness:
        [end] = await events_of(harness, script["request"], stream=False)
        assert (end.text, end.reason, len(end.tool_calls)) == ("Let me see.", "tool_calls", 2)
        await harness.settled()


async def test_an_answer_may_end_after_its_first_call(autojump_clock):
    engine, script = scripted()
    async with serving(engine, spelled=script["spelled"]) as harness:
        end = (await events_of(harness, script["request"], parallel_tool_calls=False))[-1]
        assert (end.reason, [call.name for call in end.tool_calls]) == ("tool_calls", ["weather"])
        assert end.usage.completion_tokens == 6
        await harness.settled()


async def test_a_call_that_is_cut_comes_as_text(autojump_clock):
    engine, script = scripted()
    async with serving(engine, spelled=script["spelled"]) as harness:
        events = await events_of(harness, script["request"], max_tokens=4)
        assert (events[-1].reason, events[-1].tool_calls) == ("length", None)
        assert text_of(events) == "".join(PIECES[:4])
        assert [(name, arguments) for _, name, arguments in streamed(events)] == [("weather", '{"ci')]
        await harness.settled()


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
async def test_without_tools_calls_are_text(autojump_clock, fields):
    engine, script = scripted(PIECES, **fields)
    async with serving(engine, spelled=script["spelled"]) as harness:
        events = await events_of(harness, script["request"])
        assert (text_of(events), events[-1].tool_calls, events[-1].reason) == ("".join(PIECES), None, "stop")
        await harness.settled()


async def test_a_crash_of_the_engine_in_a_call_changes_nothing(autojump_clock):
    engine, script = scripted()
    async with serving(engine, spelled=script["spelled"]) as harness:
        async with harness.client() as client:
            await client.send({"id": "a", **script["request"]})
            events = [await client.receive()]
            while not isinstance(events[-1], ToolCallDelta):
                events.append(await client.receive())
            harness.engine.fail_next = EngineDied("killed")
            while not isinstance(events[-1], Eos):
                events.append(await client.receive())
        assert [call.name for call in events[-1].tool_calls] == ["weather", "nothing"]
        assert [name for _, name, _ in streamed(events)] == ["weather", "nothing"]
        await harness.settled()


async def test_a_session_keeps_calls_and_results(autojump_clock, tmp_path):
    engine, script = scripted()
    with remembering(tmp_path) as storage:
        async with serving(engine, storage, spelled=script["spelled"]) as harness:
            end = (await events_of(harness, script["request"], session_id="s"))[-1]
            assert end.session.durable
            engine.eog_after = None
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.name}"}
                for call in end.tool_calls
            ]
            await events_of(harness, script["request"], session_id="s", messages=results, max_tokens=3)
            async with harness.client() as client:
                kept = (await client.transcript("s")).messages
        assert kept[1] == ChatMessage(role="assistant", content="Let me see.", tool_calls=end.tool_calls)
        assert [message.role for message in kept] == ["user", "assistant", "tool", "tool", "assistant"]
        assert [message.text for message in kept[2:4]] == ["result of weather", "result of nothing"]
        async with serving(storage=storage) as harness, harness.client() as client:
            assert (await client.transcript("s")).messages == kept


async def test_tools_count_as_part_of_the_prompt(autojump_clock):
    async with serving() as harness:
        request = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "a", "description": "x" * 300_000}],
        }
        with pytest.raises(ServerError, match="E_LIMIT_PROMPT_TOO_LARGE"):
            await events_of(harness, request)
        await harness.settled()
