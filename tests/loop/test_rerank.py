"""Requests to rank documents, over the socket, with a fake engine in virtual time."""

from __future__ import annotations

import pytest
import trio

from tests.support.fake_engine import FakeEngine, expected_score_of
from tests.support.serving import AFTER, BEFORE, BETWEEN, serving
from uma_trio.client import Eos, ServerError
from uma_trio.engine_link.messages import EngineDied

QUERY = "what is a panda"
DOCUMENTS = ["a bear", "a city", "", "a bear", "bamboo " * 20]


def ranking_engine(**options):
    return FakeEngine(purpose="rank", **options)


def tokens_of(text):
    return [byte + 100 for byte in text.encode()]


def expected(query, documents):
    """Index and score of each document, the best one first."""
    found = []
    for index, document in enumerate(documents):
        tokens = [*BEFORE, *tokens_of(query), *BETWEEN, *tokens_of(document), *AFTER]
        found.append((index, float(expected_score_of(tokens)[0])))
    return sorted(found, key=lambda each: (-each[1], each[0]))


def pairs(ranking):
    return [(each.index, each.score) for each in ranking.results]


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_documents_are_ranked_by_their_scores(autojump_clock, encoding):
    async with serving(ranking_engine()) as harness:
        async with harness.client(encoding=encoding) as client:
            found = await client.rerank(QUERY, DOCUMENTS, id="r")
            assert pairs(found) == expected(QUERY, DOCUMENTS)
            assert found.id == "r"
            n_around = len(BEFORE) + len(BETWEEN) + len(AFTER) + len(QUERY)
            assert found.usage.prompt_tokens == sum(n_around + len(each) for each in DOCUMENTS)
            assert await client.receive() is None, "without keep_alive the server closes"
        await harness.settled()
        assert harness.service.snapshot()["embeddings"]["texts_total"] == len(DOCUMENTS)


@pytest.mark.parametrize("top_n", [1, 3, len(DOCUMENTS), 1000])
async def test_only_the_best(autojump_clock, top_n):
    async with serving(ranking_engine()) as harness, harness.client() as client:
        found = await client.rerank(QUERY, DOCUMENTS, top_n=top_n)
        assert pairs(found) == expected(QUERY, DOCUMENTS)[:top_n]
        assert found.usage.prompt_tokens > 0


async def test_documents_with_the_same_score_keep_their_order(autojump_clock):
    async with serving(ranking_engine()) as harness, harness.client() as client:
        found = await client.rerank(QUERY, ["same"] * 20)
        assert [each.index for each in found.results] == list(range(20))


async def test_each_document_is_in_one_chunk_and_short_ones_share_chunks(autojump_clock):
    engine = ranking_engine()
    documents = ["short"] * 40 + ["x" * 400] * 3 + ["short"] * 5
    async with serving(engine) as harness, harness.client() as client:
        assert pairs(await client.rerank(QUERY, documents)) == expected(QUERY, documents)
        chunks = [step.embeddings for step in engine.steps if step.embeddings]
        assert all(each.is_last and not each.position for chunk in chunks for each in chunk)
        assert sum(map(len, chunks)) == len(documents)
        assert max(map(len, chunks)) > 1
        assert all(len(chunk) == 1 for chunk in chunks if any(each.length > 400 for each in chunk))


async def test_requests_of_several_clients_share_chunks(autojump_clock):
    engine = ranking_engine()
    async with serving(engine) as harness, harness.client() as busy:
        await busy.send({"type": "rerank", "query": QUERY, "documents": ["x" * 450] * 50})
        while not len(harness.scheduler._embeddings):
            await trio.sleep(0.001)
        answers = {}

        async def ask(name):
            async with harness.client() as client:
                answers[name] = await client.rerank(f"query {name}", ["one", "two"])

        async with trio.open_nursery() as nursery:
            for name in range(8):
                nursery.start_soon(ask, name)
        for name, answer in answers.items():
            assert pairs(answer) == expected(f"query {name}", ["one", "two"])
        widest = max(len(step.embeddings) for step in engine.steps)
        assert widest > 2, "documents of more than one request"


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"documents": []}, "E_PROTO_BAD_REQUEST", "documents"),
        ({"documents": ["x"] * 2049}, "E_PROTO_BAD_REQUEST", "documents"),
        ({"documents": [1]}, "E_PROTO_BAD_REQUEST", r"documents\[0\]"),
        ({"query": ""}, "E_PROTO_BAD_REQUEST", "query"),
        ({"top_n": 0}, "E_PROTO_BAD_REQUEST", "top_n"),
        ({"top_n": 1.5}, "E_PROTO_BAD_REQUEST", "top_n"),
        ({"documents": ["x", "y" * 510]}, "E_LIMIT_CONTEXT", r"documents\[1\] with the query has 529 tokens"),
        ({"query": "y" * 510}, "E_LIMIT_CONTEXT", r"documents\[0\] with the query has \d+ tokens.*at most 512"),
        ({"documents": ["y" * 300_000]}, "E_LIMIT_PROMPT_TOO_LARGE", r"documents\[0\]"),
        ({"query": "y" * 300_000}, "E_LIMIT_PROMPT_TOO_LARGE", "query"),
        ({"model": "none"}, "E_MODEL_NOT_FOUND", "none"),
        ({"adapters": [{"name": "none"}]}, "E_MODEL_NO_ADAPTER", "none"),
    ],
)
async def test_what_cannot_be_ranked_is_refused(autojump_clock, fields, code, said):
    engine = ranking_engine()
    async with serving(engine) as harness:
        async with harness.client() as client:
            with pytest.raises(ServerError, match=f"{code}.*{said}"):
                await client.rerank(**{"query": QUERY, "documents": DOCUMENTS, **fields})
        await harness.settled()
        assert not any(step.embeddings for step in engine.steps)


@pytest.mark.parametrize("purpose", ["generate", "embed"])
async def test_a_model_that_does_not_rank_says_what_is_needed(autojump_clock, purpose):
    does = {"generate": "generates text", "embed": "embeds texts"}[purpose]
    async with serving(FakeEngine(purpose=purpose)) as harness, harness.client() as client:
        assert "rerank" not in (await client.models(keep_alive=True))[0].capabilities
        with pytest.raises(ServerError, match=f"E_PROTO_BAD_REQUEST.*It {does}.*serve a reranker") as refused:
            await client.rerank(QUERY, DOCUMENTS)
        assert refused.value.event.field == "model"


async def test_a_model_that_ranks_neither_embeds_nor_generates(autojump_clock):
    async with serving(ranking_engine(), has_template=False) as harness, harness.client() as client:
        assert (await client.models(keep_alive=True))[0].capabilities == ["rerank"]
        with pytest.raises(ServerError, match=r"gives no embeddings. It ranks documents"):
            await client.embed(["x"], keep_alive=True)
        with pytest.raises(ServerError, match=r"generates no text. It ranks documents"):
            await client.complete(prompt="x", max_tokens=1)


async def test_a_connection_runs_one_request_at_a_time(autojump_clock):
    async with serving(ranking_engine()) as harness, harness.client() as client:
        await client.send({"type": "rerank", "id": "a", "query": QUERY, "documents": ["x" * 400] * 50})
        with pytest.raises(ServerError, match="E_PROTO_BUSY"):
            await client.rerank(QUERY, DOCUMENTS, id="b")


async def test_cancel(autojump_clock):
    engine = ranking_engine()
    async with serving(engine) as harness:
        async with harness.client() as client:
            documents = ["x" * 400] * 200
            await client.send({"type": "rerank", "id": "r", "query": QUERY, "documents": documents, "keep_alive": True})
            with trio.fail_after(1000):
                while harness.service.snapshot()["embeddings"]["texts_total"] < 5:
                    await trio.sleep(0.01)
            await client.send({"event": "cancel", "id": "r"})
            event = await client.receive()
            assert isinstance(event, Eos)
            assert (event.id, event.reason) == ("r", "cancelled")
            assert 0 < event.usage.prompt_tokens < 400 * 200
            assert pairs(await client.rerank(QUERY, DOCUMENTS)) == expected(QUERY, DOCUMENTS)
        await harness.settled()
        assert harness.service.snapshot()["embeddings"]["texts_total"] < 200


async def test_principals_share_the_time_by_weight(autojump_clock):
    async with serving(ranking_engine()) as harness, harness.client() as heavy, harness.client() as light:
        fields = {"type": "rerank", "query": QUERY, "documents": ["x" * 450] * 80}
        await heavy.send({**fields, "id": "h", "principal": "h", "principal_weight": 3})
        await light.send({**fields, "id": "l", "principal": "l"})
        with trio.fail_after(1000):
            while True:
                found = {pending.principal.name: pending.n_done for pending in harness.scheduler._embeddings}
                if len(found) == 2 and found["h"] >= 60:
                    break
                await trio.sleep(0.01)
        assert found["h"] / found["l"] == pytest.approx(3, rel=0.15)


async def test_limits_of_a_principal_count_rankings_too(autojump_clock):
    async with serving(ranking_engine()) as harness, harness.client() as first, harness.client() as second:
        limit = {"principal": "web", "principal_max_requests": 1}
        await first.send({"type": "rerank", "query": QUERY, "documents": ["x" * 450] * 100, **limit})
        await trio.sleep(0.1)
        with pytest.raises(ServerError, match="E_LIMIT_REQUESTS"):
            await second.rerank(QUERY, DOCUMENTS, **limit)


async def test_a_full_queue(autojump_clock):
    async with serving(ranking_engine(), max_queue=1) as harness, harness.client() as first, harness.client() as second:
        await first.send({"type": "rerank", "query": QUERY, "documents": ["x" * 450] * 100})
        await trio.sleep(0.1)
        checks = {check.name: check for check in (await second.health(keep_alive=True)).checks}
        assert not checks["queue"].ok
        with pytest.raises(ServerError, match="E_LIMIT_QUEUE"):
            await second.rerank(QUERY, DOCUMENTS)


async def test_an_engine_that_dies_changes_nothing(autojump_clock):
    engine = ranking_engine()
    async with serving(engine) as harness, harness.client() as client:
        engine.fail_next = EngineDied("killed")
        assert pairs(await client.rerank(QUERY, DOCUMENTS * 10)) == expected(QUERY, DOCUMENTS * 10)
        assert harness.service.snapshot()["engine"]["restarts_total"] == 1


async def test_a_document_that_kills_the_engine_costs_its_own_request_alone(autojump_clock):
    engine = ranking_engine()
    engine.poison = tokens_of("!")[0]
    async with (
        serving(engine) as harness,
        harness.client() as poisoned,
        harness.client() as client,
        trio.open_nursery() as nursery,
    ):

        async def fail():
            with pytest.raises(ServerError, match=r"E_RUNTIME_DECODE.*failed twice"):
                await poisoned.rerank(QUERY, ["fine", "not fine!"])

        nursery.start_soon(fail)
        assert pairs(await client.rerank(QUERY, DOCUMENTS)) == expected(QUERY, DOCUMENTS)


async def test_scores_that_are_no_numbers_fail_the_request(autojump_clock, monkeypatch):
    async with serving(ranking_engine()) as harness:
        async with harness.client() as client:
            monkeypatch.setattr(
                "tests.support.fake_engine.expected_score_of", lambda tokens: float("nan") * expected_score_of(tokens)
            )
            with pytest.raises(ServerError, match=r"E_RUNTIME_DECODE.*no finite numbers for text 0"):
                await client.rerank(QUERY, DOCUMENTS)
        await harness.settled()
