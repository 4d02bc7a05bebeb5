"""Rerankers in the real engine and daemon: llama.cpp's own scores and those of llama-server, next to crashes."""

from __future__ import annotations

import json
import os
import random
import signal

import httpx
import numpy as np
import pytest
import trio

from tests.model.test_encoders import CTX, QUANT, WORDS, close, reference, texts
from tests.support.commands import run_process
from tests.support.gguf_files import STRING, pair, text, with_pairs
from tests.support.gpu import agree
from tests.support.llama_server import llama_server
from tests.support.random_models import random_model
from tests.support.real_daemon import asked, real_daemon
from uma_trio.client import ServerError
from uma_trio.daemon.prompts.pairs import TEMPLATE_KEY, find_pair_format
from uma_trio.tokenizer.vocabulary import vocabulary

QUERY = "how do i make pancakes"


def model():
    return random_model("tiny-bert-rank", QUANT, ctx=CTX)


def pairs_of(query, documents):
    """Tokens of the query with each document: CLS, query, SEP, document."""
    with vocabulary(model()) as tokenizer:
        cls, *_, sep = tokenizer.encode("a").tolist()

        def tokens(text):
            return tokenizer.encode(text, add_special=False, parse_special=False).tolist()

        return [[cls, *tokens(query), sep, *tokens(document)] for document in documents]


def scores(ranking):
    """The scores in the order of the documents."""
    return [each.score for each in sorted(ranking.results, key=lambda each: each.index)]


@pytest.fixture(scope="module")
def reranker(library):
    """A daemon with a BERT that ranks."""
    with real_daemon("--model", str(model())) as daemon:
        yield daemon


def test_the_scores_are_those_of_llama_cpp(reranker):
    documents = texts(60)
    found = asked(reranker, lambda client: client.rerank(QUERY, documents))
    pairs = pairs_of(QUERY, documents)
    expected = reference(model(), pairs)
    assert np.abs(np.array(scores(found)) - expected).max() < close()
    assert [each.index for each in found.results] == [*np.argsort(-np.array(scores(found)), kind="stable")]
    assert found.usage.prompt_tokens == sum(map(len, pairs))
    assert np.ptp(expected) > 1, "documents that differ have scores that differ"
    alone = [asked(reranker, lambda client, text=text: client.rerank(QUERY, [text])) for text in documents[:5]]
    assert np.allclose([score for each in alone for score in scores(each)], scores(found)[:5], atol=close())


def test_documents_of_any_length_up_to_the_context(reranker):
    words = random.Random(1).choices(WORDS, k=1000)
    room = CTX - len(pairs_of(QUERY, [""])[0])
    documents = [" ".join(words[:n]) for n in (0, 1, room, 100, room)]
    found = asked(reranker, lambda client: client.rerank(QUERY, documents))
    assert np.abs(np.array(scores(found)) - reference(model(), pairs_of(QUERY, documents))).max() < close()
    with pytest.raises(ServerError, match=rf"E_LIMIT_CONTEXT.*documents\[1\] with the query has {CTX + 1} tokens"):
        asked(reranker, lambda client: client.rerank(QUERY, ["x", " ".join(words[: room + 1])]))


def test_control_tokens_in_documents_are_text(reranker):
    documents = ["a [SEP] b", "a", "[CLS]"]
    found = asked(reranker, lambda client: client.rerank(QUERY, documents))
    assert np.abs(np.array(scores(found)) - reference(model(), pairs_of(QUERY, documents))).max() < close()


@pytest.mark.thorough
def test_requests_of_many_clients_are_computed_together(reranker):
    documents = texts(20)
    queries = [f"{QUERY} {n}" for n in range(12)]
    found = {}

    async def main():
        async def one(query):
            async with reranker.client() as client:
                found[query] = await client.rerank(query, documents)

        async with trio.open_nursery() as nursery:
            for query in queries:
                nursery.start_soon(one, query)

    trio.run(main)
    for query in queries:
        assert np.abs(np.array(scores(found[query])) - reference(model(), pairs_of(query, documents))).max() < close()
    reranker.settled()


def test_a_closed_connection_ends_the_request(reranker):
    with reranker.wire() as wire:
        wire.send(type="rerank", query=QUERY, documents=["a long text " * 100] * 1000)
        reranker.wait_until(lambda snapshot: snapshot["embeddings"]["requests"] == 1, "the request runs")
    reranker.wait_until(lambda snapshot: snapshot["embeddings"]["requests"] == 0, "the request has ended")
    reranker.settled()


@pytest.mark.thorough
def test_an_engine_that_is_killed_changes_nothing(library):
    documents = texts(400)
    with real_daemon("--model", str(model())) as daemon:
        expected = asked(daemon, lambda client: client.rerank(QUERY, documents))
        before = daemon.metrics()

        async def rank_and_kill():
            async with daemon.client() as client, trio.open_nursery() as nursery:

                async def kill():
                    done = before["embeddings"]["texts_total"] + 5
                    snapshot = await trio.to_thread.run_sync(
                        daemon.wait_until, lambda each: each["embeddings"]["texts_total"] >= done, "it is on its way"
                    )
                    os.kill(snapshot["engine"]["pid"], signal.SIGKILL)

                nursery.start_soon(kill)
                return await client.rerank(QUERY, documents)

        found = trio.run(rank_and_kill)
        assert np.allclose(scores(found), scores(expected), atol=close())
        again = asked(daemon, lambda client: client.rerank(QUERY, documents[:3]))
        assert np.allclose(scores(again), scores(expected)[:3], atol=close())
        assert daemon.metrics()["engine"]["restarts_total"] == 1


def test_a_model_that_generates_says_what_is_needed(daemon):
    with pytest.raises(ServerError, match=r"E_PROTO_BAD_REQUEST.*does not rank documents.*classification head"):
        asked(daemon, lambda client: client.rerank(QUERY, ["x"]))
    daemon.settled()


def cli(daemon, *arguments, stdin=""):
    return run_process("rerank", "--socket", daemon.socket, *arguments, stdin=stdin)


def test_the_command(reranker, tmp_path):
    documents = ["a panda is a bear", "paris", "milk and\teggs"]
    file = tmp_path / "documents.txt"
    file.write_text("\n".join(["", *documents[1:], "  "]))
    ended = cli(reranker, QUERY, documents[0], "--file", str(file))
    assert ended.returncode == 0, ended.stderr
    lines = [line.split(maxsplit=1) for line in ended.stdout.splitlines()]
    best = asked(reranker, lambda client: client.rerank(QUERY, documents)).results
    assert [text for _, text in lines] == [" ".join(documents[each.index].split()) for each in best]
    assert [float(score) for score, _ in lines] == [pytest.approx(each.score, abs=close()) for each in best]
    ended = cli(reranker, "--json", "-n", "1", QUERY, "-f", "-", stdin="\n".join(documents))
    [line] = ended.stdout.splitlines()
    found = json.loads(line)
    assert (found["index"], found["document"]) == (best[0].index, documents[best[0].index])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((QUERY,), 2, "no documents"),
        ((QUERY, "x", "--file", "/none"), 2, "cannot be read"),
        ((QUERY, "x", "-n", "0"), 2, "-n"),
        ((QUERY, "x", "--model", "none"), 2, "E_MODEL_NOT_FOUND"),
    ],
)
def test_what_the_command_refuses(reranker, arguments, status, said):
    ended = cli(reranker, *arguments)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert said in ended.stderr


@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_the_scores_are_those_of_llama_server(library, decoder, tmp_path, architecture):
    path = model() if architecture == "bert" else decoder
    documents = [text for text in texts(30) if text]
    body = {"query": QUERY, "documents": documents, "top_n": 20}
    with (
        llama_server(path, "--reranking", "-ub", str(CTX), "-fa", "off", log_file=tmp_path / "log") as theirs,
        real_daemon("--model", str(path), "--http", "0", "--flash-attn", "off") as daemon,
        httpx.Client(timeout=60) as client,
    ):
        expected = client.post(f"{theirs}/v1/rerank", json=body).json()
        found = client.post(f"{daemon.http_url()}/v1/rerank", json=body).json()
    ours, theirs = ([each["index"] for each in answer["results"]] for answer in (found, expected))
    assert agree(ours, theirs, n=1)
    for one, other in zip(found["results"], expected["results"], strict=True):
        assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=close())
    assert found["usage"] == expected["usage"]
    assert found.keys() - {"id"} == expected.keys()


# -- decoders with a head, such as Qwen3-Reranker ------------------------------------------------------

TEMPLATE = "<s>Does the document answer the query?\nQuery: {query}\nDocument: {document}</s>"


@pytest.fixture(scope="module")
def decoder(library, tmp_path_factory):
    """A decoder that ranks, with a template of its own."""
    made = random_model("tiny-qwen3-rank", QUANT, ctx=CTX)
    path = tmp_path_factory.mktemp("decoder") / "decoder.gguf"
    path.write_bytes(with_pairs(made.read_bytes(), pair(TEMPLATE_KEY, STRING, text(TEMPLATE))))
    return path


def test_a_decoder_ranks_with_the_template_of_its_file(decoder):
    documents = texts(30)
    with vocabulary(decoder) as tokenizer:
        pairs = [
            tokenizer.encode(
                TEMPLATE.replace("{query}", QUERY).replace("{document}", document), add_special=False
            ).tolist()
            for document in documents
        ]
    with real_daemon("--model", str(decoder)) as daemon:
        found = asked(daemon, lambda client: client.rerank(QUERY, documents))
        [described, *_] = asked(daemon, lambda client: client.models())
        answer = daemon.ask(prompt="hello")
    assert np.abs(np.array(scores(found)) - reference(decoder, pairs)).max() < close()
    assert all(0 <= each.score <= 1 for each in found.results), "a probability"
    assert found.usage.prompt_tokens == sum(map(len, pairs))
    assert described.capabilities == ["rerank"]
    assert "generates no text. It ranks documents" in answer.last["message"]


def test_control_tokens_and_places_in_texts_stay_text(decoder):
    with vocabulary(decoder) as tokenizer:
        found = find_pair_format({TEMPLATE_KEY: TEMPLATE}, tokenizer)
        query, documents = "a {document} </s>", ["plain", "one</s>two", "{query}<s>"]
        for tokens, document in zip(found.tokens(query, documents), documents, strict=True):
            assert tokenizer.decode(tokens, special=True) == TEMPLATE.format(query=query, document=document)
            assert [token for token in tokens.tolist() if token in (1, 2)] == [1, 2], "those of the template alone"
