"""Hostile clients of the real daemon over a fake engine: what they are told, and that nobody else notices."""

from __future__ import annotations

import contextlib

import anyio
import pytest
import trio

from tests.support import hostile
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import serving
from uma_trio.client import BrokenProtocol, ServerError
from uma_trio.daemon.outbox import Outbox
from uma_trio.engine.messages import Remove
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.messages import Eos, Failure, Token

PROMPT = [byte + 100 for byte in b"hello"]


def texts(events):
    return "".join(event.text for event in events if isinstance(event, Token))


async def until_closed(client):
    """All events; a server that closes with something unread resets the connection, after its last event."""
    events = []
    with contextlib.suppress(BrokenProtocol):
        while (event := await client.receive()) is not None:
            events.append(event)
    return events


def said(tokens):
    return "".join(f"{token} " for token in tokens)


async def test_the_next_request_may_come_with_the_last_event(autojump_clock, monkeypatch):
    """A client that asks again before the server's task of its first request has woken up is not busy."""
    frame = ClientCodec().encode({"id": "a", "prompt": "hello", "max_tokens": 2, "keep_alive": True})
    rounds = 0
    async with serving() as harness, harness.client() as client:
        raw = client._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        send = Outbox.send

        def send_and_ask_again(outbox, event):
            nonlocal rounds
            send(outbox, event)
            if isinstance(event, Eos) and rounds < 40:
                rounds += 1
                raw.send(frame)

        monkeypatch.setattr(Outbox, "send", send_and_ask_again)
        await client._stream.send(frame)
        text, answers = "", 0
        while answers < 41:
            event = await client.receive()
            assert isinstance(event, Token | Eos), event
            text += event.text or ""
            answers += isinstance(event, Eos)
        assert text == 41 * said(expected_continuation(PROMPT, 2))


@pytest.mark.parametrize("way", ["cancel event", "closed socket"])
async def test_the_first_step_after_a_cancel_frees_it(autojump_clock, way):
    """Whatever else runs: the step under way is the only one that a cancelled request still takes part in."""
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 100)
    async with serving(engine) as harness, harness.client() as other:
        await other.send({"id": "on", "prompt": "hello", "max_tokens": 200})
        for after_s in (0.0, 0.01, 0.09, 0.11, 0.35):
            async with harness.client() as client:
                await client.send({"id": "a", "prompt": "x" * 900, "max_tokens": 1000})
                await trio.sleep(after_s + 0.0001)
                (sequence,) = (sequence for sequence in harness.scheduler.sequences() if sequence.request.id == "a")
                begun = len(engine.steps)
                if way == "cancel event":
                    await client.cancel("a")
            with trio.fail_after(0.25):
                while sequence.seq_id in engine.used_cells() or sequence in harness.scheduler.sequences():
                    await trio.sleep(0.001)
            if sequence.n_computed:
                after = engine.steps[begun:]
                assert [Remove(sequence.seq_id) in step.ops for step in after] == [True]
        harness.scheduler.check_integrity()
        assert texts(await until_closed(other)) == said(expected_continuation(PROMPT, 200))


@pytest.mark.parametrize("bad", hostile.ALL, ids=str)
async def test_it_is_told_what_is_wrong_and_a_neighbour_does_not_notice(autojump_clock, bad):
    async with serving(max_frame_bytes=hostile.CAP) as harness, harness.client() as other:
        await other.send({"id": "on", "prompt": "hello", "max_tokens": 20})
        async with harness.client() as client:
            await client._stream.send(bad.data)
            events = await until_closed(client)
        assert [(type(event), event.code, event.id) for event in events] == [(Failure, bad.code, bad.id)]
        assert 0 < len(events[0].message) < 500
        assert texts(await until_closed(other)) == said(expected_continuation(PROMPT, 20))
        await harness.settled()


@pytest.mark.parametrize(("name", "data"), hostile.HARMLESS, ids=[name for name, _ in hostile.HARMLESS])
async def test_strange_but_allowed(autojump_clock, name, data):
    async with serving(max_frame_bytes=hostile.CAP) as harness:
        async with harness.client() as client:
            await client._stream.send(data)
            events = await until_closed(client)
        assert [type(event) for event in events] == [Token, Token, Eos]
        await harness.settled()


async def test_a_frame_of_all_bad_things_one_after_another_gets_one_answer(autojump_clock):
    async with serving(max_frame_bytes=hostile.CAP) as harness:
        async with harness.client() as client:
            for bad in hostile.ALL[:20]:
                with contextlib.suppress(anyio.BrokenResourceError):
                    await client._stream.send(bad.data)
            assert len(await until_closed(client)) == 1
        await harness.settled()


async def test_ten_thousand_cancels_cost_nothing(autojump_clock):
    """Unknown ids, ids of others, ids of the past: nothing happens and nothing is answered."""
    cancel = ClientCodec().encode({"event": "cancel", "id": "on"})
    async with serving() as harness, harness.client() as other, harness.client() as client:
        await other.send({"id": "on", "prompt": "hello", "max_tokens": 50})
        await client._stream.send(10_000 * cancel)
        await client.send({"id": "mine", "prompt": "hello", "max_tokens": 3, "keep_alive": True})
        events = [await client.receive() for _ in range(4)]
        assert events[-1].reason == "length"
        await client.cancel("mine")
        await client.send({"id": "mine", "prompt": "hello", "max_tokens": 3})
        assert [type(event) for event in await until_closed(client)] == [Token] * 3 + [Eos]
        assert texts(await until_closed(other)) == said(expected_continuation(PROMPT, 50))
        await harness.settled()


async def test_a_flood_of_second_requests_is_refused_one_by_one(autojump_clock):
    async with serving() as harness, harness.client() as client:
        flood = [{"id": f"r{n}", "prompt": "hello", "max_tokens": 30} for n in range(500)]
        await client._stream.send(b"".join(map(ClientCodec().encode, flood)))
        events = await until_closed(client)
        assert sum(getattr(event, "code", None) == "E_PROTO_BUSY" for event in events) == 499
        assert texts(event for event in events if event.id == "r0") == said(expected_continuation(PROMPT, 30))
        await harness.settled()


async def test_metrics_asked_for_and_not_read_do_not_pile_up_for_ever(autojump_clock):
    """Each question is small and each answer is not: who asks and never reads is given up."""
    ask = ClientCodec().encode({"type": "metrics", "keep_alive": True})
    async with serving(max_tx_bytes=8192) as harness:
        async with harness.client() as deaf:
            most = 0
            with contextlib.suppress(anyio.BrokenResourceError), trio.move_on_after(300):
                while True:
                    await deaf._stream.send(100 * ask)
                    most = max(most, harness.server.snapshot()["outbox_bytes"])
            assert harness.server.snapshot()["sessions"] == 0, "it is still served"
            assert most < 500_000
        await harness.settled()


async def test_a_client_whose_frame_was_refused_half_way_reads_why(autojump_clock):
    async with serving() as harness, harness.client() as client:
        with pytest.raises(ServerError, match="E_PROTO_FRAME_TOO_LARGE"):
            async for _ in client.generate(prompt="x" * (8 << 20)):
                pass


async def test_more_clients_at_once_than_the_backlog_holds(autojump_clock):
    async with serving(max_connections=500) as harness:  # with a backlog of 16
        async with trio.open_nursery() as nursery:

            async def ask():
                async with harness.client() as client:
                    assert (await client.complete(prompt="hello", max_tokens=2)).reason == "length"

            for _ in range(200):
                nursery.start_soon(ask)
        await harness.settled()
