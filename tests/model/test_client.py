"""The client with the real daemon: under asyncio, under trio, and without an event loop."""

import anyio
import pytest

import uma_trio
from uma_trio.client import Eos, Token, open_client

QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize("encoding", ["json", "cbor"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_same_answer_under_either_event_loop(daemon, backend, encoding):
    expected = daemon.ask(messages=CHAT)

    async def ask():
        async with open_client(daemon.socket, encoding=encoding) as client:
            return [event async for event in client.generate(messages=CHAT)]

    *tokens, eos = anyio.run(ask, backend=backend)
    assert [token.token_id for token in tokens] == expected.ids
    assert isinstance(eos, Eos)
    assert eos.usage.completion_tokens == expected.last["usage"]["completion_tokens"]
    daemon.settled()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancellation_ends_the_request(daemon, backend):
    async def begin_and_leave():
        with anyio.CancelScope() as scope:
            async with open_client(daemon.socket) as client:
                async for event in client.generate(prompt="Once", max_tokens=3000, ignore_eos=True):
                    assert isinstance(event, Token)
                    scope.cancel()
        assert scope.cancelled_caught

    anyio.run(begin_and_leave, backend=backend)
    assert daemon.settled()["running"] == 0


def test_ask_and_stream_without_an_event_loop(daemon):
    expected = daemon.ask(messages=CHAT)
    answer = uma_trio.ask(QUESTION, socket=daemon.socket)
    assert str(answer) == expected.text
    assert answer.usage.completion_tokens == expected.last["usage"]["completion_tokens"]
    streamed = [event for event in uma_trio.stream(QUESTION, socket=daemon.socket) if isinstance(event, Token)]
    assert "".join(event.text for event in streamed) == expected.text
    for _ in uma_trio.stream("Once", raw=True, socket=daemon.socket, max_tokens=3000, ignore_eos=True):
        break
    daemon.settled()
