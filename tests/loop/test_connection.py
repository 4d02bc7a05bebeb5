"""Clients of the real daemon over Unix sockets, with a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import socket
import struct
from types import SimpleNamespace

import anyio
import pytest
import trio

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import serving
from uma_trio.client import BrokenProtocol, Eos, Failure, Metrics, ServerError, Token, open_client
from uma_trio.daemon import server
from uma_trio.daemon.doors import connection, listener
from uma_trio.engine_link.messages import EngineDied
from uma_trio.principal import Principal
from uma_trio.processes.large_work import LargeWork
from uma_trio.protocol import framing
from uma_trio.protocol.codec import ClientCodec
from uma_trio.protocol.peer import OWN_PRINCIPAL

PROMPT = [byte + 100 for byte in b"hello"]


def texts(events):
    return "".join(event.text for event in events if isinstance(event, Token))


def text_of(tokens):
    return "".join(f"{token} " for token in tokens)


async def all_of(events):
    return [event async for event in events]


async def until_closed(client):
    events = []
    while (event := await client.receive()) is not None:
        events.append(event)
    return events


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_an_answer_streams_in_either_encoding(autojump_clock, encoding):
    async with serving() as harness:
        async with harness.client(encoding=encoding) as client:
            events = await all_of(client.generate(prompt="hello", max_tokens=5, metadata={"k": [1, "ü"]}))
            assert texts(events) == text_of(expected_continuation(PROMPT, 5))
            assert events[-1].reason == "length"
            assert events[-1].metadata == {"k": [1, "ü"]}
            assert await client.receive() is None, "without keep_alive the server closes"
        await harness.settled()


async def test_a_connection_with_keep_alive_serves_many_requests(autojump_clock):
    async with serving() as harness, harness.client() as client:
        for _ in range(3):
            events = await all_of(client.generate(prompt="hello", max_tokens=3, keep_alive=True))
            assert texts(events) == text_of(expected_continuation(PROMPT, 3))
        await all_of(client.generate(prompt="hello", max_tokens=3))
        assert await client.receive() is None


async def test_without_streaming_there_is_one_event(autojump_clock):
    async with serving() as harness, harness.client() as client:
        eos = await client.complete(prompt="hello", max_tokens=4, echo=True)
        assert eos.text == "hello" + text_of(expected_continuation(PROMPT, 4))


async def test_a_second_request_is_refused_and_the_first_goes_on(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "first", "prompt": "hello", "max_tokens": 20})
        await client.send({"id": "second", "prompt": "hello", "max_tokens": 20})
        events = await until_closed(client)
        refused = [event for event in events if event.id == "second"]
        assert [event.code for event in refused] == ["E_PROTO_BUSY"]
        rest = [event for event in events if event.id == "first"]
        assert texts(rest) == text_of(expected_continuation(PROMPT, 20))


async def test_a_cancel_event_ends_the_answer_with_an_eos(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": "hello", "max_tokens": 1000, "keep_alive": True})
            assert isinstance(await client.receive(), Token)
            await client.cancel("someone else's")
            await client.cancel("a")
            events = []
            while not events or not isinstance(events[-1], Eos):
                events.append(await client.receive())
            assert events[-1].reason == "cancelled"
            assert events[-1].usage.completion_tokens < 1000
            again = await all_of(client.generate(prompt="hello", max_tokens=3))
            assert texts(again) == text_of(expected_continuation(PROMPT, 3))
        await harness.settled()


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.1, 1.0])
async def test_a_closed_socket_cancels(autojump_clock, after_s):
    async with serving() as harness:
        async with harness.client() as client:
            await client.send({"id": "a", "prompt": "x" * 2000, "max_tokens": 1000})
            await trio.sleep(after_s)
        began = trio.current_time()
        await harness.settled()
        assert trio.current_time() - began < 0.2
        assert harness.scheduler.telemetry.requests["cancelled"] <= 1


async def test_a_client_that_sends_no_more_may_still_read(autojump_clock):
    async with serving() as harness:
        async with await trio.open_unix_socket(harness.path) as stream:
            await stream.send_all(ClientCodec().encode({"id": "a", "prompt": "hello", "max_tokens": 50}))
            await stream.send_eof()
            data = b""
            while chunk := await stream.receive_some():
                data += chunk
            assert data.count(b'"token_id"') == 50
            assert b'"length"' in data
        await harness.settled()


async def test_a_half_closed_connection_is_cancelled_when_it_closes(autojump_clock):
    async with serving() as harness:
        async with await trio.open_unix_socket(harness.path) as stream:
            await stream.send_all(ClientCodec().encode({"id": "a", "prompt": "hello", "max_tokens": 3000}))
            await stream.send_eof()
            await trio.sleep(0.1)
        await harness.settled()
        assert harness.scheduler.telemetry.requests["cancelled"] == 1


async def lines_answered(harness, sent, *, eof=False):
    """Send ``sent``, and return what comes until the server closes."""
    async with await trio.open_unix_socket(harness.path) as stream:
        await stream.send_all(sent)
        if eof:
            await stream.send_eof()
        data = b""
        while chunk := await stream.receive_some():
            data += chunk
    return data.decode()


async def test_the_newline_protocol_takes_a_question_and_sends_text(autojump_clock):
    async with serving(protocol="newline", default_max_tokens=4) as harness:
        assert await lines_answered(harness, b"hello\r\n") == text_of(expected_continuation(PROMPT, 4)) + "\n"
        assert (await lines_answered(harness, b"hel\0lo\n")).startswith("error: E_PROTO_BAD_REQUEST")
        await harness.settled()


async def test_without_a_chat_template_lines_are_continued_and_messages_refused(autojump_clock):
    async with serving(protocol="newline", default_max_tokens=4, has_template=False) as harness:
        assert await lines_answered(harness, b"hello\n") == text_of(expected_continuation(PROMPT, 4)) + "\n"
    async with serving(has_template=False) as harness, harness.client() as client:
        with pytest.raises(ServerError, match="E_MODEL_NO_CHAT_TEMPLATE"):
            await client.complete(messages=[{"role": "user", "content": "hello"}], keep_alive=True)
        assert await client.complete(prompt="hello", max_tokens=1), "the connection stays open"


@pytest.mark.parametrize("eof", [False, True])
async def test_lines_that_come_during_an_answer_wait_for_its_end(autojump_clock, eof):
    async with serving(protocol="newline", default_max_tokens=4) as harness:
        answers = "".join(
            text_of(expected_continuation([byte + 100 for byte in word], 4)) + "\n" for word in (b"a", b"b")
        )
        assert await lines_answered(harness, b"a\nb\n", eof=eof) == answers
        async with await trio.open_unix_socket(harness.path) as stream:
            await stream.send_all(b"a\n")
            data = (await stream.receive_some()).decode()
            await stream.send_all(b"b\n")
            while chunk := await stream.receive_some():
                data += chunk.decode()
        assert data == answers
        await harness.settled()


async def test_a_client_that_leaves_while_lines_wait_cancels_all_of_them(autojump_clock):
    async with serving(protocol="newline", default_max_tokens=3000) as harness:
        async with await trio.open_unix_socket(harness.path) as stream:
            await stream.send_all(b"a\nb\nc\n")
            await stream.receive_some()
        await harness.settled()
        assert harness.scheduler.telemetry.requests["cancelled"] == 1
        assert harness.scheduler.telemetry.requests.get("length", 0) == 0


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_a_client_with_frames_learns_at_once_that_the_server_wants_lines(autojump_clock, encoding):
    async with serving(protocol="newline") as harness, harness.client(encoding=encoding) as client:
        began = trio.current_time()
        with pytest.raises(BrokenProtocol, match="--protocol newline"):
            await client.metrics()
        assert trio.current_time() == began


async def test_metrics_are_answered_while_a_request_runs(autojump_clock):
    async with serving() as harness, harness.client() as busy, harness.client() as asking:
        await busy.send({"id": "a", "prompt": "x" * 3000, "max_tokens": 10})
        await trio.sleep(0.001)
        began = trio.current_time()
        snapshot = await asking.metrics()
        assert trio.current_time() == began, "metrics waited for a tick"
        assert snapshot["connections"] == 2
        assert snapshot["running"] == 1


async def test_a_metrics_query_does_not_affect_the_connections_request(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "a", "prompt": "hello", "max_tokens": 5})
        await client.send({"type": "metrics", "id": "m"})
        events = await until_closed(client)
        assert [type(event) for event in events].count(Metrics) == 1
        assert isinstance(events[-1], Eos)


async def test_an_idle_connection_gets_an_error_and_is_closed(autojump_clock):
    async with serving() as harness, harness.client() as client:
        began = trio.current_time()
        events = await until_closed(client)
        assert [event.code for event in events] == ["E_LIMIT_IDLE_TIMEOUT"]
        assert trio.current_time() - began == pytest.approx(300)


async def test_idle_time_counts_from_the_last_answer(autojump_clock):
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 100_000)
    async with serving(slow, engine_hang_timeout_s=1000) as harness, harness.client() as client:
        await all_of(client.generate(prompt="hello", max_tokens=5, keep_alive=True))  # 500 s
        began = trio.current_time()
        assert [event.code for event in await until_closed(client)] == ["E_LIMIT_IDLE_TIMEOUT"]
        assert trio.current_time() - began == pytest.approx(300)


@pytest.mark.parametrize("sent", [b"\x05", b"\x05\0\0", b"\x05\0\0\0{"])
async def test_a_frame_that_stops_arriving_ends_the_connection(autojump_clock, sent):
    async with serving() as harness, harness.client() as client:
        await client._stream.send(sent)
        began = trio.current_time()
        assert [event.code for event in await until_closed(client)] == ["E_PROTO_TRUNCATED"]
        assert trio.current_time() - began == pytest.approx(30)


async def test_a_frame_that_arrives_too_slowly_ends_the_connection(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client:
            with pytest.raises(anyio.BrokenResourceError):
                for byte in ClientCodec().encode({"id": "a", "prompt": "x" * 1000}):
                    await client._stream.send(bytes([byte]))
                    await trio.sleep(1)
            assert trio.current_time() < 60
        await harness.settled()


async def test_each_frame_has_its_own_time_to_arrive(autojump_clock):
    async with serving() as harness, harness.client() as client:
        frame = ClientCodec().encode({"event": "cancel", "id": "nobody"})
        await client._stream.send(frame[:5])
        for _ in range(10):  # every read ends inside a frame, and every frame is whole within 20 s
            await trio.sleep(20)
            await client._stream.send(frame[5:] + frame[:5])
        await client._stream.send(frame[5:])
        assert texts(await all_of(client.generate(prompt="hello", max_tokens=5))) == text_of(
            expected_continuation(PROMPT, 5)
        )


async def test_a_request_that_takes_too_long_ends_with_a_timeout(autojump_clock):
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 1000)
    async with serving(slow, request_timeout_s=10) as harness:
        async with harness.client() as client:
            with pytest.raises(ServerError) as refused:
                await all_of(client.generate(prompt="hello", max_tokens=100))
            assert refused.value.code == "E_LIMIT_REQUEST_TIMEOUT"
            assert trio.current_time() < 13
        await harness.settled()


async def test_a_request_that_waits_until_its_deadline_ends_with_it(autojump_clock):
    """Nobody knows yet how slow this engine is.  What has begun goes on."""
    slow = FakeEngine(n_seq_max=1, cost_ms=lambda prompt, decodes: 1000)
    async with serving(slow) as harness:
        async with harness.client() as client, harness.client() as other, trio.open_nursery() as nursery:

            async def begin() -> None:
                events = await all_of(other.generate(prompt="hello", max_tokens=8, deadline_ms=5000))
                assert events[-1].reason == "length"
                assert trio.current_time() > 5

            nursery.start_soon(begin)
            await trio.sleep(0.5)
            with pytest.raises(ServerError) as refused:
                await all_of(client.generate(prompt="hello", max_tokens=8, deadline_ms=4000))
            assert (refused.value.code, refused.value.event.field) == ("E_LIMIT_DEADLINE", "deadline_ms")
            assert trio.current_time() == pytest.approx(4.5, abs=0.1)
        await harness.settled()


async def test_a_client_that_never_reads_is_disconnected_and_slows_no_other(autojump_clock):
    async with serving(FakeEngine(n_ctx=1 << 22), max_tx_bytes=4096, max_tokens=1_000_000) as harness:
        async with harness.client() as stalled, harness.client() as other:
            await stalled.send({"id": "stalled", "prompt": "hello", "max_tokens": 900_000})
            events = await all_of(other.generate(prompt="hello", max_tokens=300))
            assert texts(events) == text_of(expected_continuation(PROMPT, 300))
            with trio.fail_after(10_000):
                while harness.server.snapshot()["send_queue_bytes"] < 4096:
                    await trio.sleep(1)
            [answer] = harness.scheduler.answers()
            had = len(answer.tokens)
            await trio.sleep(30)
            assert len(answer.tokens) <= had + 1, "it generates although the client does not read"
            assert harness.server.snapshot()["send_queue_bytes"] < 5000
            await trio.sleep(60)
            assert harness.server.snapshot()["connections"] == 0
        await harness.settled()
        assert harness.server.snapshot()["rejected_total"] == {"E_IO_WRITE": 1}


async def test_a_client_that_reads_slowly_gets_everything(autojump_clock):
    async with serving(max_tx_bytes=4096) as harness, harness.client() as slow:
        await slow.send({"id": "slow", "prompt": "hello", "max_tokens": 3000})
        await trio.sleep(50)
        events = await until_closed(slow)
        assert texts(events) == text_of(expected_continuation(PROMPT, 3000))
        assert events[-1].reason == "length"


async def test_too_many_connections_are_refused(autojump_clock):
    async with serving(max_connections=2) as harness:
        async with harness.client(), harness.client() as second:
            await all_of(second.generate(prompt="hello", max_tokens=1, keep_alive=True))
            async with harness.client() as third:
                assert [event.code for event in await until_closed(third)] == ["E_LIMIT_CONNECTIONS"]
        await harness.settled()


async def test_a_user_who_opens_many_connections_leaves_some_to_others(autojump_clock, monkeypatch):
    user = "uid:60001"
    monkeypatch.setattr(connection, "principal_of", lambda sock: Principal(user))
    monkeypatch.setattr(server, "principal_of", lambda sock: Principal(user))
    async with serving(max_connections=4) as harness, contextlib.AsyncExitStack() as stack:

        async def connects() -> bool:
            client = await stack.enter_async_context(harness.client())
            try:
                await all_of(client.generate(prompt="hello", max_tokens=1, keep_alive=True))
            except ServerError as error:
                return error.code != "E_LIMIT_CONNECTIONS"
            return True

        assert [await connects() for _ in range(3)] == [True, True, False]
        user = "uid:60002"
        assert [await connects() for _ in range(2)] == [True, False]
        user = OWN_PRINCIPAL
        assert [await connects() for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "hello"}, "E_PROTO_BAD_REQUEST"),
        ({"id": "a"}, "E_PROTO_BAD_REQUEST"),
        ({"id": "a", "prompt": ""}, "E_PROTO_BAD_REQUEST"),
        ({"id": "a", "prompt": "x" * 5000}, "E_LIMIT_CONTEXT"),
        ({"id": "a", "prompt": "x" * 300_000}, "E_LIMIT_PROMPT_TOO_LARGE"),
        ({"id": "a", "prompt": "x", "max_tokens": 10**8}, "E_LIMIT_MAX_TOKENS"),
        ({"id": "a", "prompt": "x" * 10, "max_tokens": 4090}, "E_LIMIT_CONTEXT"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_an_error_code(autojump_clock, fields, code):
    async with serving() as harness:
        async with harness.client() as client:
            await client.send(fields)
            events = await until_closed(client)
            assert [event.code for event in events] == [code]
            assert events[0].id == fields.get("id")
        await harness.settled()
        assert harness.server.snapshot()["rejected_total"] == {code: 1}


async def test_garbage_ends_the_connection_and_its_request(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client, harness.client() as other:
            await client.send({"id": "a", "prompt": "hello", "max_tokens": 1000})
            await other.send({"id": "b", "prompt": "hello", "max_tokens": 30})
            await trio.sleep(0.05)
            await client._stream.send(struct.pack("<I", 3) + b"{]}")
            events = await until_closed(client)
            assert events[-1].code == "E_PROTO_INVALID_JSON"
            assert texts(await until_closed(other)) == text_of(expected_continuation(PROMPT, 30))
        await harness.settled()


async def test_a_connection_reset_by_the_client_leaves_nothing(autojump_clock):
    async with serving() as harness:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(harness.path))
            raw.sendall(ClientCodec().encode({"id": "a", "prompt": "hello", "max_tokens": 2000}))
            await trio.sleep(1)  # unread answers make the kernel reset instead of close
        await harness.settled()


@pytest.mark.parametrize("query", [{"type": "metrics"}, {"type": "sessions"}], ids=["metrics", "sessions"])
async def test_queries_of_a_client_that_has_gone_are_not_answered(autojump_clock, monkeypatch, query):
    """Otherwise the daemon would work for nobody, and nothing would slow that down: gone clients exert no back-pressure."""
    sent = []
    monkeypatch.setattr(connection.Outbox, "send", lambda outbox, event: sent.append(event))
    async with serving() as harness:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(harness.path))
            raw.sendall(ClientCodec().encode({**query, "keep_alive": True}) * 500)
        await trio.sleep(1)
        await harness.settled()
    assert not sent


@pytest.mark.parametrize("session", [{}, {"session_id": "s"}], ids=["plain", "session"])
async def test_clients_get_an_error_while_the_engine_cannot_be_started(autojump_clock, session):
    """One request runs, the other one waits.  When the engine runs again, requests are served."""
    engine = FakeEngine(n_seq_max=1)
    async with serving(engine, engine_restart_attempts=3) as harness:
        async with harness.client() as first, harness.client() as second:
            for client, name in ((first, "r0"), (second, "r1")):
                await client.send({"id": name, "prompt": "hello", "max_tokens": 50, **session})
                session = {key: value + "2" for key, value in session.items()}
                await trio.sleep(0.05)
            engine.fail_next, engine.fail_restarts = EngineDied("killed"), 4
            ends = [(await until_closed(client))[-1] for client in (first, second)]
        assert [(end.id, getattr(end, "code", None)) for end in ends] == [
            ("r0", "E_MODEL_UNAVAILABLE"),
            ("r1", "E_MODEL_UNAVAILABLE"),
        ]
        await trio.sleep(60)
        async with harness.client() as client:
            events = await all_of(client.generate(prompt="hello", max_tokens=5))
        assert texts(events) == text_of(expected_continuation(PROMPT, 5))
        await harness.settled()


async def test_a_draining_server_completes_requests_and_accepts_no_more(autojump_clock):
    async with serving() as harness:
        async with harness.client() as running, harness.client() as idle, harness.client() as kept:
            await running.send({"id": "a", "prompt": "hello", "max_tokens": 100, "keep_alive": True})
            await kept.send({"id": "k", "prompt": "hello", "max_tokens": 10, "keep_alive": True})
            await trio.sleep(0.01)
            harness.server.drain()
            reason = await idle.receive()
            assert isinstance(reason, Failure)
            assert reason.code == "E_RUNTIME_SHUTDOWN"
            assert await idle.receive() is None, "idle connections are closed"
            await kept.send({"id": "late", "prompt": "hello"})
            late = await until_closed(kept)
            assert {getattr(event, "code", None) for event in late} == {None, "E_PROTO_BUSY"}
            assert texts(await until_closed(running)) == text_of(expected_continuation(PROMPT, 100))
        await harness.settled()


async def test_requests_that_outlast_the_drain_timeout_are_cancelled(autojump_clock):
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 1000)
    async with serving(slow, drain_timeout_s=5) as harness, harness.client() as client:
        await client.send({"id": "a", "prompt": "hello", "max_tokens": 1000})
        await trio.sleep(1.5)
        harness.server.drain()
        events = await until_closed(client)
        assert events[-1].code == "E_RUNTIME_SHUTDOWN"
        assert trio.current_time() < 8


async def test_a_defect_while_preparing_ends_one_request(autojump_clock):
    async with serving() as harness:

        async def broken(request):
            raise RuntimeError("a defect")

        right, harness.service.prompts = harness.service.prompts, SimpleNamespace(make=broken)
        async with harness.client() as client:
            with pytest.raises(ServerError) as refused:
                await all_of(client.generate(prompt="hello"))
            assert refused.value.code == "E_RUNTIME_INTERNAL"
        harness.service.prompts = right
        async with harness.client() as client:
            await all_of(client.generate(prompt="hello", max_tokens=2))
        await harness.settled()


async def test_the_client_reports_an_answer_that_was_cut_off(tmp_path):
    sock = listener.bind(tmp_path / "s", backlog=1)
    with sock:
        async with open_client(tmp_path / "s") as client:
            peer, _ = sock.accept()
            with peer:
                peer.sendall(framing.frame(b'{"id":"a","event":"token","text":"x","token_id":1}'))
                with pytest.raises(BrokenProtocol, match="middle of an answer"):
                    async for event in client.generate(id="a", prompt="hello"):
                        assert event.text == "x"
                        peer.shutdown(socket.SHUT_RDWR)


async def test_a_session_query_names_its_model(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await all_of(client.generate(prompt="hello", max_tokens=3, session_id="s", keep_alive=True))
        own = harness.service
        found = await client.sessions(model=own.name, keep_alive=True)
        assert [session.session_id for session in found] == ["s"]
        with pytest.raises(ServerError, match="E_MODEL_NOT_FOUND: no model 'other'; this daemon serves "):
            await client.sessions(model="other")


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_a_large_frame_is_decoded_in_pieces(autojump_clock, encoding):
    async with serving() as harness, harness.client(encoding=encoding) as client:
        pauses = []

        async def sleep(seconds):
            pauses.append(seconds)
            await trio.lowlevel.checkpoint()

        harness.server.large_work = LargeWork(trio.Lock(), sleep)
        await all_of(client.generate(prompt="hello", max_tokens=1, keep_alive=True))
        assert pauses == [], "a small one is not"
        for fields, n_slices in (({"prompt": [300] * 50_000}, 2), ({"prompt": "x" * 5000}, 1)):
            pauses.clear()
            with pytest.raises(ServerError):  # it does not fit, and that is known when it is decoded
                await all_of(client.generate(**fields, max_tokens=1, keep_alive=True))
            assert len(pauses) >= n_slices + 2, "count, decode, check"


@pytest.mark.parametrize("value", [b"\x80", b"\x81" * 40 + b"\x01", b"\x01"])
async def test_a_cbor_frame_with_too_many_values_ends_its_connection_only(autojump_clock, value):
    items = value * (1 << 20)
    frame = framing.frame(b"\xa1\x61x\x9b" + (1 << 20).to_bytes(8, "big") + items[: 1 << 20])
    async with serving() as harness:
        async with harness.client(encoding="cbor") as client, harness.client() as other:
            await other.send({"id": "b", "prompt": "hello", "max_tokens": 30})
            await client._stream.send(frame)
            events = await until_closed(client)
            assert [event.code for event in events] == ["E_PROTO_TOO_MANY_VALUES"]
            assert texts(await until_closed(other)) == text_of(expected_continuation(PROMPT, 30))
        await harness.settled()
