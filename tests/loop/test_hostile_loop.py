"""Hostile clients of the real daemon over a fake engine: what they are told, and that nobody else notices."""

from __future__ import annotations

import socket

from tests.support.fake_engine import expected_continuation
from tests.support.serving import serving
from uma_trio.daemon.outbox import Outbox
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.messages import Eos

PROMPT = [byte + 100 for byte in b"hello"]


def said(tokens):
    return "".join(f"{token} " for token in tokens)


async def test_the_next_request_may_come_with_the_last_event(autojump_clock, monkeypatch):
    """A client that asks again before the server's task of its first request has woken up is not busy."""
    frame = ClientCodec().encode({"id": "a", "prompt": "hello", "max_tokens": 2, "keep_alive": True})
    rounds = 0
    async with serving() as house, house.client() as client:
        raw = client._stream.socket
        send = Outbox.send

        def send_and_ask_again(outbox, event):
            nonlocal rounds
            send(outbox, event)
            if isinstance(event, Eos) and rounds < 40:
                rounds += 1
                socket.socket.send(raw._sock, frame)

        monkeypatch.setattr(Outbox, "send", send_and_ask_again)
        await client._stream.send_all(frame)
        text, answers = "", 0
        while answers < 41:
            event = await client.receive()
            assert event["event"] in ("token", "eos"), event
            text += event.get("text", "")
            answers += event["event"] == "eos"
        assert text == 41 * said(expected_continuation(PROMPT, 2))
