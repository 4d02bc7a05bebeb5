"""Hostile clients of the real daemon over a fake engine: what they are told, and that nobody else notices."""

from __future__ import annotations

import socket

import pytest
import trio

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import serving
from uma_trio.daemon.outbox import Outbox
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.messages import Eos

PROMPT = [byte + 100 for byte in b"hello"]


def texts(events):
    return "".join(event["text"] for event in events if event["event"] == "token")


async def until_closed(client):
    events = []
    while (event := await client.receive()) is not None:
        events.append(event)
    return events


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


@pytest.mark.parametrize("way", ["cancel event", "closed socket"])
async def test_the_first_step_after_a_cancel_frees_it(autojump_clock, way):
    """Whatever else runs: the step under way is the only one that a cancelled request still takes part in."""
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 100)
    async with serving(engine) as house, house.client() as other:
        await other.send({"id": "on", "prompt": "hello", "max_tokens": 200})
        for after_s in (0.0, 0.01, 0.09, 0.11, 0.35):
            async with house.client() as client:
                await client.send({"id": "a", "prompt": "x" * 900, "max_tokens": 1000})
                await trio.sleep(after_s + 0.0001)
                (job,) = (job for job in house.server.runner.jobs() if job.request.id == "a")
                begun = len(engine.steps)
                if way == "cancel event":
                    await client.cancel("a")
            with trio.fail_after(0.25):
                while job.seq_id in engine.used_cells() or job in house.server.runner.jobs():
                    await trio.sleep(0.001)
            if job.n_fed:
                after = engine.steps[begun:]
                assert [job.seq_id in step.removals for step in after] == [True]
        house.server.runner.check_integrity()
        assert texts(await until_closed(other)) == said(expected_continuation(PROMPT, 200))
