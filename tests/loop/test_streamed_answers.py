"""Streamed answers of the gateway in virtual time: comments while there is nothing else to send."""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio
from starlette.responses import Response

from uma_trio.client import Eos, Event, Timings, ToolCall, ToolCallDelta, Usage
from uma_trio.gateway.answer import COMMENT, StreamedAnswer
from uma_trio.gateway.dialects.llama.extras import Extras
from uma_trio.gateway.dialects.openai.chat import ChatChunks
from uma_trio.gateway.errors import HttpError

KEEP_ALIVE_S = 15.0
HEAD = {"id": "c", "created": 1, "model": "m", "system_fingerprint": "b1"}


async def sent(events: AsyncIterator[list[Event]]) -> list[tuple[float, bytes]]:
    """What a client gets, each write with its time."""
    began, found = trio.current_time(), []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            found.append((trio.current_time() - began, message["body"]))

    async def receive() -> dict[str, object]:
        await trio.sleep_forever()
        raise AssertionError

    def refuse(error: HttpError) -> Response:
        raise error

    renderer = ChatChunks(HEAD, "r", Extras(), n=1, has_usage=False, warnings=[])
    answer = StreamedAnswer(events, renderer, refuse=refuse, keep_alive_s=KEEP_ALIVE_S)
    await answer({"type": "http", "state": {"send": send}}, receive, send)
    return found


async def test_13_comments_come_from_admission_on_and_while_a_call_is_written(autojump_clock: object) -> None:
    async def events() -> AsyncIterator[list[Event]]:
        await trio.sleep(40)  # in the queue, and during prefill
        yield [ToolCallDelta(id="r", call=0, call_id="c1", name="weather")]
        await trio.sleep(40)  # arguments come when they are complete
        yield [ToolCallDelta(id="r", call=0, arguments="{}")]
        calls = [ToolCall(id="c1", name="weather", arguments={})]
        usage, timings = Usage(prompt_tokens=1, completion_tokens=1), Timings(queue_ms=0, total_ms=1)
        yield [Eos(id="r", reason="tool_calls", usage=usage, timings=timings, tool_calls=calls)]

    found = await sent(events())
    assert [at for at, data in found if data.endswith(COMMENT)] == [15, 30, 55, 70]
    assert found[0][1].startswith(b"data: ")  # the status, and who speaks
    assert found[-1][1].endswith(b"data: [DONE]\n\n")


async def test_a_stream_with_something_to_send_has_no_comments(autojump_clock: object) -> None:
    async def events() -> AsyncIterator[list[Event]]:
        for _ in range(10):
            await trio.sleep(10)
            yield [ToolCallDelta(id="r", call=0, arguments="1")]

    assert not any(COMMENT in data for _, data in await sent(events()))
