"""Streamed answers of the gateway in virtual time: comments while there is nothing else to send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio
from starlette.responses import Response

from tests.support.request_states import begin_request
from tests.support.serving import serving, settings
from uma_trio.client import AnswerInfo, Client, Eos, Event, Forecast, Timings, Token, ToolCall, ToolCallDelta, Usage
from uma_trio.gateway.answer import COMMENT, POSITION, ForecastHeaders, StreamedAnswer
from uma_trio.gateway.application import make_app
from uma_trio.gateway.dialects.openai.chat import ChatChunks
from uma_trio.gateway.dialects.openai.extras import Extras
from uma_trio.gateway.errors import HttpError

KEEP_ALIVE_S = 15.0
HEAD = {"id": "c", "created": 1, "model": "m", "system_fingerprint": "b1"}


async def sent(events: AsyncIterator[list[Event]], frame: bytes = COMMENT) -> list[tuple[float, bytes]]:
    """What a client gets, each write with its time.  The status has no bytes.

    Args:
        frame: what the dialect has for clients to ignore.
    """
    began, found = trio.current_time(), []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            found.append((trio.current_time() - began, b""))
        elif message["body"]:
            found.append((trio.current_time() - began, message["body"]))

    async def receive() -> dict[str, object]:
        await trio.sleep_forever()
        raise AssertionError

    def refuse(error: HttpError) -> Response:
        raise error

    renderer = ChatChunks(HEAD, "r", Extras(), n=1, has_usage=False, warnings=[])
    renderer.keep_alive_frame = frame
    answer = StreamedAnswer(events, renderer, refuse=refuse, keep_alive_s=KEEP_ALIVE_S)
    scope: dict[str, object] = {"type": "http"}
    begin_request(scope, send)
    await answer(scope, receive, send)
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
    assert found[0] == (15, b"")
    assert found[1][1].startswith(b"data: ")  # who speaks
    assert found[-1][1].endswith(b"data: [DONE]\n\n")


async def test_the_status_does_not_wait_for_a_text_where_there_are_no_comments(autojump_clock: object) -> None:
    async def events() -> AsyncIterator[list[Event]]:
        await trio.sleep(40)
        yield [ToolCallDelta(id="r", call=0, arguments="1")]
        await trio.sleep(40)
        yield [ToolCallDelta(id="r", call=0, arguments="2")]

    found = await sent(events(), frame=b"")
    assert [at for at, _ in found][:4] == [15, 15, 40, 80]
    assert found[0][1] == b""


async def test_a_stream_with_something_to_send_has_no_comments(autojump_clock: object) -> None:
    async def events() -> AsyncIterator[list[Event]]:
        for _ in range(10):
            await trio.sleep(10)
            yield [ToolCallDelta(id="r", call=0, arguments="1")]

    assert not any(COMMENT in data for _, data in await sent(events()))


def test_headers_that_come_with_a_text_say_that_it_runs() -> None:
    headers = ForecastHeaders(passes=False)
    assert headers.keep([Forecast(id="r", queue_position=1, start_ms=900.0, end_ms=2000.0)]) == []
    assert headers.headers()[POSITION] == "1"
    assert headers.keep([text := Token(id="r", text="Hi")]) == [text]
    assert headers.headers()[POSITION] == "0", "no forecast has said so"


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_response_whose_client_leaves_while_the_daemon_accepts_it_is_cancelled(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    is_sent, has_left, detach = trio.Event(), trio.Event(), Client.detach
    body = [msgspec.json.encode({"input": "hello", "stream": is_streamed, "max_output_tokens": 4000})]

    async def slow_detach(self: Client, **fields: Any) -> AnswerInfo:
        is_sent.set()
        await has_left.wait()
        await trio.sleep(1)  # the gateway knows of it
        return await detach(self, **fields)

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop()}
        await is_sent.wait()
        has_left.set()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        """Nobody is there."""

    monkeypatch.setattr(Client, "detach", slow_detach)
    async with serving() as running:
        app = make_app(settings(socket=running.path))
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"", "headers": headers}
        await app({**scope, "client": ("127.0.0.1", 5000), "scheme": "http", "http_version": "1.1"}, receive, send)
        async with running.client() as client:
            [answer] = await client.answers()
        assert (answer.state, answer.answer_id[:5]) == ("cancelled", "resp_")
        await running.settled()
