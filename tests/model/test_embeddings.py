"""Embeddings of the real engine and daemon: llama.cpp's own, pooled as the model says, next to streams and crashes."""

from __future__ import annotations

import os
import random
import signal
import struct

import numpy as np
import pytest
import trio

import llama_abi
from tests.support.gguf_files import U32, pair, with_pairs
from tests.support.gpu import tolerance
from tests.support.real_daemon import Canary, asked, real_daemon
from uma_trio import config
from uma_trio.client import ServerError
from uma_trio.engine_link.messages import EmbeddingInput, Step
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.vocabulary import vocabulary

TEXTS = ["How do I make pancakes?", "Mix flour, milk and eggs.", "The capital of France", "1 2 3 4 5 6 " * 12]
POOLING = {"none": "mean", "mean": "mean", "cls": "cls", "last": "last"}
"""Pooling type of the model file, and what it means here."""
CLOSE = 5e-3
"""How texts are divided among the steps of a daemon depends on time.  With flash attention, which computes in half
precision, that changes an embedding by up to 1.1e-3.  Embeddings of different texts differ by 0.05 at least."""


def with_pooling(folder, pooling):
    """The embedded model with another pooling type in its metadata; unchanged for ``none``."""
    if pooling == "none":
        return EMBEDDED
    kind = llama_abi.options.POOLING[pooling]
    path = folder / f"{pooling}.gguf"
    path.write_bytes(with_pairs(EMBEDDED.read_bytes(), pair("llama.pooling_type", U32, struct.pack("<I", kind))))
    return path


def tokens_of(texts):
    with vocabulary(EMBEDDED) as tokenizer:
        return [tokenizer.encode(text, parse_special=False).tolist() for text in texts]


def reference(path, texts, pooling):
    """What llama.cpp computes and pools itself, each text in one pass, with length 1."""
    found = []
    with llama_abi.Model(llama_abi.load(), path) as model:
        options = llama_abi.ContextOptions(
            n_ctx=1024,
            n_batch=512,
            n_ubatch=512,
            n_threads=1,
            n_threads_batch=1,
            embeddings=True,
            pooling=pooling,
            flash_attn="off",
        )
        with llama_abi.Context(model, options) as context:
            batch = llama_abi.Batch(512)
            for tokens in texts:
                context.clear()
                batch.clear()
                batch.add(tokens, pos=0, seq=0, logits="all")
                assert context.decode(batch) == llama_abi.OK
                vector = context.pooled_embedding(0)
                found.append(vector / np.linalg.norm(vector))
    return found


@pytest.mark.parametrize(("in_file", "pooling"), POOLING.items())
def test_the_embeddings_are_those_of_llama_cpp(library, tmp_path, in_file, pooling):
    from uma_trio.engine.llama import LlamaEngine

    path = with_pooling(tmp_path, in_file)
    texts = tokens_of(TEXTS)
    expected = reference(path, texts, pooling)
    engine = LlamaEngine(path, config.Model(ctx=1024, parallel=2, batch_tokens=64, threads=1, flash_attn="off"))
    try:
        assert engine.info.can_embed
        for tokens, vector in zip(texts, expected, strict=True):
            for at in range(0, len(tokens), 7):
                part = EmbeddingInput(0, at, tokens[at : at + 7], len(tokens))
                [*found] = engine.step(Step(embeddings=[part])).embeddings
            assert np.allclose(found[0], vector, atol=tolerance(1e-3, on_gpu=CLOSE))
    finally:
        engine.close()


def test_a_model_that_ranks_texts_gives_no_embeddings(library, tmp_path):
    with real_daemon("--model", str(with_pooling(tmp_path, "rank")), "--parallel", "2") as daemon:
        assert "embedding" not in asked(daemon, lambda client: client.models())[0].capabilities
        with pytest.raises(ServerError, match="E_PROTO_BAD_REQUEST"):
            asked(daemon, lambda client: client.embed(TEXTS))


def test_embeddings_of_a_daemon(daemon):
    texts = tokens_of(TEXTS)
    found = asked(daemon, lambda client: client.embed(TEXTS))
    assert np.allclose(found.embeddings, reference(EMBEDDED, texts, "mean"), atol=CLOSE)
    assert found.usage.prompt_tokens == sum(map(len, texts))
    again = asked(daemon, lambda client: client.embed(texts))
    assert np.allclose(again.embeddings, found.embeddings, atol=CLOSE)
    width = asked(daemon, lambda client: client.models())[0].embedding_length
    assert {len(vector) for vector in found.embeddings} == {width}
    short = asked(daemon, lambda client: client.embed(TEXTS, dimensions=16))
    for vector, whole in zip(short.embeddings, found.embeddings, strict=True):
        assert np.allclose(vector, np.array(whole[:16]) / np.linalg.norm(whole[:16]), atol=CLOSE)
    daemon.settled()


def test_streams_next_to_embeddings_are_unchanged(daemon):
    texts = [text * 3 for text in TEXTS] * 4
    alone = asked(daemon, lambda client: client.embed(texts[:4]))
    with Canary(daemon) as canary:
        found = asked(daemon, lambda client: client.embed(texts))
    assert canary.rounds
    assert len(found.embeddings) == len(texts)
    for n, vector in enumerate(found.embeddings):
        assert np.allclose(vector, alone.embeddings[n % 4], atol=CLOSE)
    daemon.settled()


def test_a_closed_connection_ends_the_request(daemon):
    with daemon.wire() as wire:
        wire.send(type="embed", input=["a long text " * 100] * 100)
        daemon.wait_until(lambda snapshot: snapshot["embeddings"]["requests"] == 1, "the request runs")
    daemon.wait_until(lambda snapshot: snapshot["embeddings"]["requests"] == 0, "the request has ended")
    daemon.settled()


@pytest.mark.thorough
def test_an_engine_that_is_killed_changes_nothing(library):
    texts = ["".join(random.Random(n).choices("abcdef ", k=200)) for n in range(12)]
    with real_daemon("--parallel", "2") as daemon:
        expected = asked(daemon, lambda client: client.embed(texts))

        async def embed_and_kill():
            async with daemon.client() as client, trio.open_nursery() as nursery:

                async def kill():
                    done = before["embeddings"]["texts_total"] + 3
                    snapshot = await trio.to_thread.run_sync(
                        daemon.wait_until, lambda each: each["embeddings"]["texts_total"] >= done, "it is on its way"
                    )
                    os.kill(snapshot["engine"]["pid"], signal.SIGKILL)

                nursery.start_soon(kill)
                return await client.embed(texts)

        before = daemon.metrics()
        found = trio.run(embed_and_kill)
        assert np.allclose(found.embeddings, expected.embeddings, atol=CLOSE)
        daemon.wait_until(lambda snapshot: snapshot["engine"]["restarts_total"] == 1, "it was restarted")


def test_memory_is_allocated_when_a_text_needs_it_and_is_bounded(library):
    with real_daemon("--parallel", "2", "--embedding-ctx", "600") as daemon:
        assert daemon.metrics()["embeddings"]["bytes"] == 0
        asked(daemon, lambda client: client.embed(["short"]))
        small = daemon.metrics()["embeddings"]["bytes"]
        assert small > 0
        asked(daemon, lambda client: client.embed([[5] * 600]))
        large = daemon.metrics()["embeddings"]["bytes"]
        assert small < large < 4 * small
        asked(daemon, lambda client: client.embed(["short", [5] * 600]))
        assert daemon.metrics()["embeddings"]["bytes"] == large
        with pytest.raises(ServerError, match=r"E_LIMIT_CONTEXT.*input\[1\] has 601 tokens"):
            asked(daemon, lambda client: client.embed(["short", [5] * 601]))
