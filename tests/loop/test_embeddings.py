"""Requests for embeddings next to streams, over the socket, with a fake engine in virtual time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import trio

from tests.support.fake_engine import EMBEDDING_WIDTH, N_VOCAB, FakeEngine, expected_continuation, expected_embedding
from tests.support.serving import serving
from uma_trio.client import Embeddings, Eos, ServerError, Token
from uma_trio.daemon.serving import embedding
from uma_trio.engine_link.messages import MAX_EMBEDDING_SEQUENCES, EngineDied, EngineError
from uma_trio.protocol.events import Failure

PROMPT = [byte + 100 for byte in b"hello"]


def tokens_of(text):
    return [byte + 100 for byte in text.encode()] if isinstance(text, str) else text


def same(found, texts):
    """Whether these are the embeddings of ``texts``."""
    expected = [expected_embedding(tokens_of(text)) for text in texts]
    return len(found) == len(texts) and np.allclose(found, expected, atol=1e-6)


async def rest(client):
    events = []
    while (event := await client.receive()) is not None:
        events.append(event)
    return events


def chunks(harness):
    """Texts to embed of each step that had some."""
    return [step.embeddings for step in harness.engine.steps if step.embeddings]


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_embeddings_of_texts_and_tokens(autojump_clock, encoding):
    texts = ["hello", [5, 6, 7], "x" * 300, "é"]
    async with serving() as harness:
        async with harness.client(encoding=encoding) as client:
            answer = await client.embed(texts)
            assert same(answer.embeddings, texts)
            assert answer.usage.prompt_tokens == 5 + 3 + 300 + 2
            assert answer.usage.completion_tokens == 0
            assert not answer.more
            assert await client.receive() is None, "without keep_alive the server closes"
        await harness.settled()
        assert harness.service.snapshot()["embeddings"]["texts_total"] == 4
        assert harness.service.snapshot()["embeddings"]["tokens_total"] == 310


async def test_texts_are_computed_together_and_long_ones_in_chunks(autojump_clock):
    async with serving() as harness, harness.client() as client:
        texts = [*["short"] * 40, "x" * 500]
        assert same((await client.embed(texts)).embeddings, texts)
        sizes = [sum(len(each.tokens) for each in chunk) for chunk in chunks(harness)]
        assert max(sizes) == harness.engine.info.embedding_batch
        assert max(map(len, chunks(harness))) <= MAX_EMBEDDING_SEQUENCES
        assert len(sizes) < 40


async def test_fewer_dimensions_have_length_one_again(autojump_clock):
    async with serving() as harness, harness.client() as client:
        [vector] = (await client.embed(["hello"], dimensions=3, keep_alive=True)).embeddings
        whole = expected_embedding(PROMPT)[:3]
        assert np.allclose(vector, whole / np.linalg.norm(whole), atol=1e-6)
        [vector] = (await client.embed(["hello"], dimensions=EMBEDDING_WIDTH, keep_alive=True)).embeddings
        assert len(vector) == EMBEDDING_WIDTH
        with pytest.raises(ServerError, match=r"E_PROTO_BAD_REQUEST.*embeddings of this model have 8"):
            await client.embed(["hello"], dimensions=EMBEDDING_WIDTH + 1)


async def test_a_long_answer_takes_several_events(autojump_clock, monkeypatch):
    monkeypatch.setattr(embedding, "MAX_FLOATS_PER_EVENT", 5 * EMBEDDING_WIDTH)
    texts = [f"text {n}" for n in range(23)]
    async with serving() as harness, harness.client() as client:
        await client.send({"type": "embed", "input": texts, "id": "e"})
        events = await rest(client)
        assert all(isinstance(event, Embeddings) and event.id == "e" for event in events)
        assert len(events) > 3
        assert [event.more for event in events] == [True] * (len(events) - 1) + [False]
        assert same([vector for event in events for vector in event.embeddings], texts)
        totals = [event.usage.prompt_tokens for event in events]
        assert totals == sorted(totals)
        assert totals[-1] == sum(map(len, texts))


async def test_a_client_that_does_not_read_holds_up_nobody(autojump_clock, monkeypatch):
    monkeypatch.setattr(embedding, "MAX_FLOATS_PER_EVENT", EMBEDDING_WIDTH)
    async with serving(max_tx_bytes=4096) as harness:
        async with harness.client() as stalled, harness.client() as other:
            texts = ["x"] * 2048
            await stalled.send({"type": "embed", "input": texts, "id": "e"})
            await trio.sleep(20)
            before = harness.service.snapshot()["embeddings"]["texts_total"]
            assert before < 2048
            assert same((await other.embed(["hello"])).embeddings, ["hello"])
            await trio.sleep(20)
            assert harness.service.snapshot()["embeddings"]["texts_total"] == before + 1
            events = await rest(stalled)
            assert same([vector for event in events for vector in event.embeddings], texts)
        await harness.settled()


@pytest.mark.parametrize(
    ("fields", "code", "name"),
    [
        ({"input": []}, "E_PROTO_BAD_REQUEST", "input"),
        ({"input": ["x"] * 2049}, "E_PROTO_BAD_REQUEST", "input"),
        ({"input": [[]]}, "E_PROTO_BAD_REQUEST", "input"),
        ({"input": ["x"], "dimensions": 0}, "E_PROTO_BAD_REQUEST", "dimensions"),
        ({"input": ["x", ""]}, "E_PROTO_BAD_REQUEST", r"input\[1\]"),
        ({"input": ["x", [N_VOCAB]]}, "E_PROTO_BAD_REQUEST", r"input\[1\]"),
        ({"input": ["x", "y" * 513]}, "E_LIMIT_CONTEXT", r"input\[1\] has 513 tokens.*at most 512"),
        ({"input": ["y" * 300_000]}, "E_LIMIT_PROMPT_TOO_LARGE", r"input\[0\]"),
        ({"input": ["x"], "model": "none"}, "E_MODEL_NOT_FOUND", "none"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(autojump_clock, fields, code, name):
    async with serving() as harness:
        async with harness.client() as client:
            with pytest.raises(ServerError, match=f"{code}.*{name}"):
                await client.embed(**fields)
        await harness.settled()
        assert not chunks(harness)


async def test_a_model_without_embeddings(autojump_clock):
    async with serving(FakeEngine(can_embed=False)) as harness, harness.client() as client:
        assert "embedding" not in (await client.models(keep_alive=True))[0].capabilities
        with pytest.raises(ServerError, match="E_PROTO_BAD_REQUEST"):
            await client.embed(["hello"])


async def test_a_connection_runs_one_request_at_a_time(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "a", "type": "embed", "input": ["x" * 500]})
        await client.send({"id": "b", "type": "embed", "input": ["x"]})
        await client.send({"id": "c", "prompt": "hello", "max_tokens": 2})
        events = await rest(client)
        assert {event.id: event.code for event in events if isinstance(event, Failure)} == {
            "b": "E_PROTO_BUSY",
            "c": "E_PROTO_BUSY",
        }
        [answer] = [event for event in events if isinstance(event, Embeddings)]
        assert same(answer.embeddings, ["x" * 500])


# -- streams ------------------------------------------------------------------------------------------


async def test_streams_have_the_same_text_and_meet_their_target(autojump_clock):
    """Chunks take the time that is left before the next token is due, and there is one a step."""
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 1 + 0.5 * prompt + decodes)
    async with serving(engine, target_itl_ms=50) as harness, harness.client() as client, harness.client() as embeds:
        times = []
        async with trio.open_nursery() as nursery:
            texts = ["x" * 400] * 10
            answers = []

            async def embed():
                await trio.sleep(0.2)
                answers.append(await embeds.embed(texts))

            nursery.start_soon(embed)
            tokens = []
            async for event in client.generate(prompt="hello", max_tokens=200, slo={"target_itl_ms": 50}):
                if isinstance(event, Token):
                    tokens.append(event.token_id)
                    times.append(trio.current_time())
        assert tokens == expected_continuation(PROMPT, 200)
        assert same(answers[0].embeddings, texts)
        with_chunk = [step for step in engine.steps if step.embeddings]
        assert sum(bool(step.calls) for step in with_chunk) > 10, "next to the stream"
        gaps = np.diff(times)
        assert max(gaps) <= 0.0501
        assert max(gaps) > 0.03, "the time that is left is used"


async def test_streams_whose_target_leaves_no_time_get_every_other_step_for_themselves(autojump_clock):
    engine = FakeEngine(cost_ms=lambda prompt, decodes: 5 * bool(decodes) + prompt)
    async with serving(engine) as harness, harness.client() as client, harness.client() as embeds:
        await client.send({"id": "s", "prompt": "hello", "max_tokens": 4000, "slo": {"target_itl_ms": 1}})
        await client.receive()
        n_before = len(engine.steps)
        await embeds.embed(["x" * 400])
        steps = engine.steps[n_before:]
        sizes = [sum(len(each.tokens) for each in step.embeddings) for step in steps]
        assert max(sizes) == embedding.MIN_TOKENS
        assert all(not (one and other) for one, other in itertools.pairwise(sizes))
        assert all(step.calls for step in steps[:-1])


async def test_texts_advance_however_slow_the_engine_is(autojump_clock):
    """Without streams there is no step that a chunk could wait for."""
    async with serving(FakeEngine(cost_ms=lambda prompt, decodes: 100 * prompt)) as harness, harness.client() as client:
        with trio.fail_after(100):
            assert same((await client.embed(["x" * 500])).embeddings, ["x" * 500])


async def test_prompts_and_texts_both_advance(autojump_clock):
    engine = FakeEngine(n_ctx=1 << 16, cost_ms=lambda prompt, decodes: 1 + prompt)
    async with serving(engine) as harness, harness.client() as client, harness.client() as embeds:
        await client.send({"id": "p", "prompt": "y" * 20_000, "max_tokens": 1})
        await trio.sleep(1)
        with trio.fail_after(15):
            assert same((await embeds.embed(["x" * 500])).embeddings, ["x" * 500])
        assert [answer.state.name for answer in harness.scheduler.answers()] == ["PREFILL"]


# -- principals ---------------------------------------------------------------------------------------


async def test_principals_share_the_time_by_weight(autojump_clock):
    async with serving() as harness, harness.client() as heavy, harness.client() as light:
        fields = {"type": "embed", "input": ["x" * 500] * 60}
        await heavy.send({**fields, "id": "h", "principal": "h", "principal_weight": 3})
        await light.send({**fields, "id": "l", "principal": "l"})
        done = {}
        with trio.fail_after(1000):
            while True:
                found = {pending.principal.name: pending.n_done for pending in harness.scheduler._embeddings}
                if len(found) == 2 and found["h"] >= 40:
                    done = found
                    break
                await trio.sleep(0.01)
        assert done["h"] / done["l"] == pytest.approx(3, rel=0.15)


async def test_requests_of_one_principal_are_answered_in_the_order_of_their_arrival(autojump_clock):
    async with serving() as harness, harness.client() as first, harness.client() as second, harness.client() as third:
        ended = []

        async def ask(client, name, texts):
            await client.embed(texts)
            ended.append(name)

        async with trio.open_nursery() as nursery:
            for client, name, texts in (
                (first, "long", ["x" * 500] * 40),
                (second, "short", ["x" * 500] * 20),
                (third, "shortest", ["x" * 500] * 20),
            ):
                nursery.start_soon(ask, client, name, texts)
                await trio.sleep(0.01)
        assert ended == ["long", "short", "shortest"]


async def test_a_principal_that_asked_for_little_has_no_claim_to_all_of_the_time(autojump_clock):
    """Its slow stream was no reason to save up service; so it shares the time from the arrival of its texts on."""
    async with (
        serving(FakeEngine(n_ctx=1 << 16, cost_ms=lambda prompt, decodes: 20)) as harness,
        harness.client() as stream,
        harness.client() as busy,
        harness.client() as late,
    ):
        fields = {"type": "embed", "input": ["x" * 500] * 400}
        await stream.send({"id": "s", "prompt": "hello", "max_tokens": 5000, "principal": "late"})
        assert isinstance(await stream.receive(), Token)
        await busy.send({**fields, "principal": "busy"})
        pending = harness.scheduler._embeddings
        with trio.fail_after(1000):
            while [each.n_done >= 100 for each in pending] != [True]:
                await trio.sleep(0.01)
            [first] = pending
            before = first.n_done
            await late.send({**fields, "principal": "late"})
            while (second := next((each for each in pending if each is not first), None)) is None or second.n_done < 40:
                await trio.sleep(0.01)
        assert first.n_done - before == pytest.approx(40, rel=0.25)
        assert harness.scheduler._running, "the stream has not ended"


async def test_limits_of_a_principal_count_embeddings_too(autojump_clock):
    async with serving() as harness, harness.client() as first, harness.client() as second:
        limit = {"principal": "web", "principal_max_requests": 1}
        await first.send({"type": "embed", "input": ["x" * 500] * 100, **limit})
        await trio.sleep(0.1)
        with pytest.raises(ServerError, match="E_LIMIT_REQUESTS"):
            await second.embed(["x"], keep_alive=True, **limit)
        with pytest.raises(ServerError, match="E_LIMIT_REQUESTS"):
            await second.complete(prompt="x", max_tokens=1, **limit)


async def test_a_full_queue(autojump_clock):
    async with serving(max_queue=1) as harness, harness.client() as first, harness.client() as second:
        await first.send({"type": "embed", "input": ["x" * 500] * 100})
        await trio.sleep(0.1)
        with pytest.raises(ServerError, match="E_LIMIT_QUEUE"):
            await second.embed(["x"])


# -- cancel -------------------------------------------------------------------------------------------


async def test_a_cancel_ends_with_an_eos_and_frees_the_connection(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "e", "type": "embed", "input": ["x" * 500] * 100, "keep_alive": True})
        await trio.sleep(0.5)
        await client.cancel("e")
        event = await client.receive()
        assert isinstance(event, Eos)
        assert (event.id, event.reason) == ("e", "cancelled")
        n_before = len(chunks(harness))
        assert same((await client.embed(["hello"])).embeddings, ["hello"]), "with an old text open in the engine"
        assert len(chunks(harness)) == n_before + 1


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.1, 1.0])
async def test_a_closed_socket_cancels(autojump_clock, after_s):
    async with serving() as harness:
        async with harness.client() as client:
            await client.send({"type": "embed", "input": ["x" * 500] * 100})
            await trio.sleep(after_s)
        began = trio.current_time()
        await harness.settled()
        assert trio.current_time() - began < 0.5
        assert harness.service.snapshot()["embeddings"]["texts_total"] < 100


async def test_a_request_that_takes_too_long(autojump_clock):
    async with serving(request_timeout_s=2) as harness, harness.client() as client:
        with pytest.raises(ServerError, match="E_LIMIT_REQUEST_TIMEOUT"):
            await client.embed(["x" * 500] * 1000)


async def test_draining_lets_a_request_end_and_refuses_new_ones(autojump_clock):
    async with serving() as harness, harness.client() as client, harness.client() as late:
        await client.send({"type": "embed", "input": ["x" * 500] * 20})
        await late.send({"type": "metrics", "keep_alive": True})
        await late.receive()
        await trio.sleep(0.01)  # the request is decoded in parts
        harness.server.drain()
        [answer] = await rest(client)
        assert same(answer.embeddings, ["x" * 500] * 20)


# -- crashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("SIGKILL")], ids=str)
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.5])
async def test_a_crash_changes_nothing(autojump_clock, failure, after_s):
    async with serving() as harness:
        async with harness.client() as client, harness.client() as stream:
            await stream.send({"id": "s", "prompt": "hello", "max_tokens": 100})
            texts = ["x" * 400, "short", "y" * 300] * 5
            await client.send({"type": "embed", "input": texts})
            await trio.sleep(after_s)
            harness.engine.fail_next = failure
            [answer] = await rest(client)
            assert same(answer.embeddings, texts)
            assert answer.usage.prompt_tokens == sum(map(len, texts))
            ids = [event.token_id for event in await rest(stream) if isinstance(event, Token)]
            assert ids == expected_continuation(PROMPT, 100)
        await harness.settled()


async def test_a_text_that_kills_the_engine_twice_fails_and_nothing_else_does(autojump_clock):
    async with serving() as harness:
        harness.engine.poison = 7
        async with harness.client() as poisoned, harness.client() as client, harness.client() as stream:
            await stream.send({"id": "s", "prompt": "hello", "max_tokens": 300})
            await stream.receive()
            await client.send({"type": "embed", "input": ["x" * 500] * 10, "id": "c"})
            await trio.sleep(0.1)
            with pytest.raises(ServerError, match="E_RUNTIME_DECODE"):
                await poisoned.embed(["hello", [5, 6, 7]])
            events = await rest(client)
            assert [type(event) for event in events] == [Embeddings]
            events = await rest(stream)
            assert isinstance(events[-1], Eos)
            assert events[-1].reason == "length"
        await harness.settled()


async def test_a_context_that_cannot_be_made_fails_the_request_and_not_the_streams(autojump_clock):
    async with serving() as harness:
        harness.engine.embedding_failure = "no memory for it"
        async with harness.client() as client, harness.client() as stream:
            await stream.send({"id": "s", "prompt": "hello", "max_tokens": 30})
            with pytest.raises(ServerError, match=r"E_RUNTIME_DECODE.*no memory for it"):
                await client.embed(["hello"], keep_alive=True)
            assert same((await client.embed(["hello"])).embeddings, ["hello"])
            ids = [event.token_id for event in await rest(stream) if isinstance(event, Token)]
            assert ids == expected_continuation(PROMPT, 30)
        await harness.settled()


async def test_an_engine_that_cannot_be_started_fails_all_requests(autojump_clock):
    async with serving(engine_restart_attempts=2) as harness:
        async with harness.client() as client:
            await client.send({"type": "embed", "input": ["x" * 500] * 100})
            await trio.sleep(0.2)
            harness.engine.fail_restarts = 4
            harness.scheduler._engine.link.kill()
            [event] = await rest(client)
            assert event.code == "E_MODEL_UNAVAILABLE"
        await trio.sleep(60)
        await harness.settled()
