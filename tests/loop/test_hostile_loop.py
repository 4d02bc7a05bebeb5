"""Hostile clients of the real daemon over a fake engine: they get an error, and other clients are not affected."""

from __future__ import annotations

import contextlib

import anyio
import pytest
import trio

from tests.support import hostile
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import sampled
from tests.support.serving import serving
from uma_trio.client import BrokenProtocol, ServerError
from uma_trio.daemon.doors.outbox import Outbox
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.events import Eos, Failure, Token

PROMPT = [byte + 100 for byte in b"hello"]


def texts(events):
    return "".join(event.text for event in events if isinstance(event, Token))


async def until_closed(client):
    """All events.  If the server closes with unread input, the kernel resets the connection behind the last event."""
    events = []
    with contextlib.suppress(BrokenProtocol):
        while (event := await client.receive()) is not None:
            events.append(event)
    return events


def text_of(tokens):
    return "".join(f"{token} " for token in tokens)


async def test_a_request_right_after_the_last_event_is_not_busy(autojump_clock, monkeypatch):
    """Although the server's task of the first request has not ended yet."""
    frame = ClientCodec().encode({"id": "a", "prompt": "hello", "max_tokens": 2, "keep_alive": True})
    rounds = 0
    async with serving() as harness, harness.client() as client:
        raw = client._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        send = Outbox.send

        def send_and_request_again(outbox, event):
            nonlocal rounds
            send(outbox, event)
            if isinstance(event, Eos) and rounds < 40:
                rounds += 1
                raw.send(frame)

        monkeypatch.setattr(Outbox, "send", send_and_request_again)
        await client._stream.send(frame)
        text, answers = "", 0
        while answers < 41:
            event = await client.receive()
            assert isinstance(event, Token | Eos), event
            text += event.text or ""
            answers += isinstance(event, Eos)
        assert text == 41 * text_of(expected_continuation(PROMPT, 2))


@pytest.mark.parametrize("way", ["cancel event", "closed socket"])
async def test_the_step_after_a_cancel_frees_the_sequence(autojump_clock, way):
    """The step in flight is the last one that computes a cancelled answer, whatever else runs."""
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 100)
    async with serving(engine) as harness, harness.client() as other:
        await other.send({"id": "on", "prompt": "hello", "max_tokens": 200})
        n_computed = 0
        for after_s in (0.0, 0.01, 0.09, 0.11, 0.35):
            async with harness.client() as client:
                await client.send({"id": "a", "prompt": "x" * 900, "max_tokens": 1000})
                await trio.sleep(after_s + 0.0001)
                (answer,) = (answer for answer in harness.scheduler.answers() if answer.request.id == "a")
                seq_id, n_steps = answer.allocation.seq_id, len(engine.steps)
                was_computed = seq_id in engine.used_cells()
                if way == "cancel event":
                    await client.cancel("a")
            with trio.fail_after(0.25):
                while seq_id in engine.used_cells() or answer in harness.scheduler.answers():
                    await trio.sleep(0.001)
            if was_computed:
                n_computed += 1
                assert [Truncate(seq_id) in step.ops for step in engine.steps[n_steps:]] == [True]
        assert n_computed >= 3
        harness.scheduler.check_integrity()
        assert texts(await until_closed(other)) == text_of(expected_continuation(PROMPT, 200))


@pytest.mark.parametrize("bad", sampled(hostile.ALL, 3), ids=str)
async def test_a_hostile_client_gets_one_error_and_does_not_affect_others(autojump_clock, bad):
    async with serving(max_frame_bytes=hostile.CAP) as harness, harness.client() as other:
        await other.send({"id": "on", "prompt": "hello", "max_tokens": 20})
        async with harness.client() as client:
            await client._stream.send(bad.data)
            events = await until_closed(client)
        assert [(type(event), event.code, event.id) for event in events] == [(Failure, bad.code, bad.id)]
        assert 0 < len(events[0].message) < 500
        assert texts(await until_closed(other)) == text_of(expected_continuation(PROMPT, 20))
        await harness.settled()


@pytest.mark.parametrize(("name", "data"), hostile.HARMLESS, ids=[name for name, _ in hostile.HARMLESS])
async def test_unusual_input_that_is_allowed(autojump_clock, name, data):
    async with serving(max_frame_bytes=hostile.CAP) as harness:
        async with harness.client() as client:
            await client._stream.send(data)
            events = await until_closed(client)
        assert [type(event) for event in events] == [Token, Token, Eos]
        await harness.settled()


async def test_many_bad_frames_in_a_row_get_one_error(autojump_clock):
    async with serving(max_frame_bytes=hostile.CAP) as harness:
        async with harness.client() as client:
            for bad in hostile.ALL[:20]:
                with contextlib.suppress(anyio.BrokenResourceError):
                    await client._stream.send(bad.data)
            assert len(await until_closed(client)) == 1
        await harness.settled()


async def test_ten_thousand_cancels_are_ignored(autojump_clock):
    """Cancels of unknown ids, of other clients' requests and of finished requests get no answer."""
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
        assert texts(await until_closed(other)) == text_of(expected_continuation(PROMPT, 50))
        await harness.settled()


async def test_each_request_of_a_flood_is_refused(autojump_clock):
    async with serving() as harness, harness.client() as client:
        flood = [{"id": f"r{n}", "prompt": "hello", "max_tokens": 30} for n in range(500)]
        await client._stream.send(b"".join(map(ClientCodec().encode, flood)))
        events = await until_closed(client)
        assert sum(getattr(event, "code", None) == "E_PROTO_BUSY" for event in events) == 499
        assert texts(event for event in events if event.id == "r0") == text_of(expected_continuation(PROMPT, 30))
        await harness.settled()


async def test_a_client_that_never_reads_its_metrics_is_disconnected(autojump_clock):
    """A query is much smaller than its answer, so the server limits the answers that wait for a client."""
    query = ClientCodec().encode({"type": "metrics", "keep_alive": True})
    async with serving(max_tx_bytes=8192) as harness:
        async with harness.client() as client:
            most = 0
            with contextlib.suppress(anyio.BrokenResourceError), trio.move_on_after(300):
                while True:
                    await client._stream.send(100 * query)
                    most = max(most, harness.server.snapshot()["send_queue_bytes"])
            assert harness.server.snapshot()["connections"] == 0, "the client is still connected"
            assert most < 500_000
        await harness.settled()


async def test_a_client_learns_why_its_frame_was_refused_half_way(autojump_clock):
    async with serving() as harness:
        for room, n_bytes, code in (
            (64 << 20, 24 << 20, "E_PROTO_FRAME_TOO_LARGE"),
            (4 << 20, 8 << 20, "E_LIMIT_QUEUE"),
        ):
            harness.server.frame_room.max_bytes = room
            async with harness.client() as client:
                with pytest.raises(ServerError, match=code):
                    async for _ in client.generate(prompt="x" * n_bytes):
                        pass
        harness.server.frame_room.take("probe", 4 << 20)  # nobody else has any


async def test_more_clients_at_once_than_the_backlog_has_room_for(autojump_clock):
    async with serving(max_connections=500) as harness:  # with a backlog of 16
        async with trio.open_nursery() as nursery:

            async def ask():
                async with harness.client() as client:
                    assert (await client.complete(prompt="hello", max_tokens=2)).reason == "length"

            for _ in range(200):
                nursery.start_soon(ask)
        await harness.settled()
