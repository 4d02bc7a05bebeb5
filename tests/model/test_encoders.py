"""Encoders in the real engine and daemon: llama.cpp's own embeddings, batched as alone, next to crashes."""

from __future__ import annotations

import os
import random
import signal
import struct

import gguf
import numpy as np
import pytest
import trio

import llama_abi
from tests.pure.test_charsmap import table
from tests.support.bench_scripts import bench_script
from tests.support.commands import run_process
from tests.support.gguf_files import U32, pair, with_pairs
from tests.support.gpu import tolerance
from tests.support.profile import sampled
from tests.support.random_models import random_model
from tests.support.real_daemon import asked, real_daemon
from uma_trio.client import ServerError
from uma_trio.engine.embedding import MIN_CALL
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.vocabulary import vocabulary

CTX = 512
BOOL = 7
QUANT = "f32"
"""With quantized weights, values of activations at a boundary round up or down with the size of a call."""


def close():
    """The largest difference of embeddings and scores of the same text.  Texts that differ have scores that differ by 1."""
    return tolerance(1e-3, on_gpu=0.03)


WORDS = [
    "how",
    "do",
    "i",
    "make",
    "pancakes",
    "mix",
    "flour",
    "milk",
    "and",
    "eggs",
    "the",
    "capital",
    "of",
    "france",
    "is",
    "paris",
]


def model(pooling):
    return random_model(f"tiny-bert-{pooling}", QUANT, ctx=CTX)


def texts(n, most=60):
    """Texts of 1 to ``most`` words."""
    rng = random.Random(n)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, most))) for _ in range(n)]


def tokens_of(path, given):
    with vocabulary(path) as tokenizer:
        return [tokenizer.encode(text, parse_special=False).tolist() for text in given]


def reference(path, tokens):
    """What llama.cpp itself computes of each of ``tokens``, one at a time: a vector of length 1, or a score."""
    found = []
    options = {"n_ctx": CTX, "n_batch": CTX, "n_ubatch": CTX, "embeddings": True}
    with llama_abi.Model(llama_abi.load(), path) as model:
        for each in tokens:
            options["flash_attn"] = "auto" if len(each) >= MIN_CALL else "off"
            with llama_abi.Context(model, llama_abi.ContextOptions(**options)) as context:
                batch = llama_abi.Batch(len(each))
                batch.add(each, pos=0, seq=0, logits="all")
                assert context.decode(batch) == llama_abi.OK
                if context.ranks:
                    found.append(context.score(0))
                else:
                    vector = context.pooled_embedding(0)
                    found.append(vector / np.linalg.norm(vector))
    return found


@pytest.fixture(scope="module")
def encoder(library):
    """A daemon with a BERT that pools the mean."""
    with real_daemon("--model", str(model("mean"))) as daemon:
        yield daemon


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_embeddings_are_those_of_llama_cpp(library, pooling):
    path = model(pooling)
    given = texts(40)
    with real_daemon("--model", str(path)) as daemon:
        found = asked(daemon, lambda client: client.embed(given))
        tokens = tokens_of(path, given)
        expected = reference(path, tokens)
        assert np.abs(np.array(found.embeddings) - expected).max() < close()
        assert found.usage.prompt_tokens == sum(map(len, tokens))
        alone = [asked(daemon, lambda client, text=text: client.embed([text])).embeddings[0] for text in given[:5]]
        assert np.allclose(alone, found.embeddings[:5], atol=close())
    similar = np.array(expected) @ np.array(expected).T
    assert np.min(similar) < 0.99, "texts that differ have vectors that differ"


def test_texts_of_any_length_up_to_the_context(encoder):
    with vocabulary(model("mean")) as tokenizer:
        token = int(tokenizer.encode("milk", add_special=False)[0])
    given = [[token] * n for n in (1, CTX, 2, 300, 16, CTX)]
    found = asked(encoder, lambda client: client.embed(given))
    assert np.abs(np.array(found.embeddings) - reference(model("mean"), given)).max() < close()
    with pytest.raises(ServerError, match=rf"E_LIMIT_CONTEXT.*input\[1\] has {CTX + 1} tokens.*at most {CTX}"):
        asked(encoder, lambda client: client.embed([[token], [token] * (CTX + 1)]))


def unigram_vocabulary(folder):
    """A vocabulary like that of XLM-RoBERTa: pieces with scores, and a table that makes capitals small."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *letters, *(f"\u2581{word}" for word in sorted({*WORDS}))]
    kinds = [3, 3, 3, 2, *[1] * (len(pieces) - 4)]
    path = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 4 + [-10.0 if len(piece) == 1 else -1.0 for piece in pieces[4:]])
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(table({ord(each.upper()): each.encode() for each in letters}))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def test_an_encoder_with_a_unigram_vocabulary(library, tmp_path):
    script = bench_script("make_model")
    path = tmp_path / "unigram.gguf"
    shape = script.parse_shape("tiny-bert-rank")
    script.make_model(path, shape, QUANT, vocabulary=unigram_vocabulary(tmp_path), ctx=CTX)
    query, documents = "How do I make pancakes", ["mix FLOUR milk", "the capital of France", "xyz 12"]
    with vocabulary(path) as tokenizer:
        assert tokenizer.encode("MIX milk").tolist() == tokenizer.encode("mix milk").tolist()

        def plain(text):
            return tokenizer.encode(text, add_special=False, parse_special=False).tolist()

        pairs = [[0, *plain(query), 2, *plain(document), 2] for document in documents]
    with real_daemon("--model", str(path)) as daemon:
        found = asked(daemon, lambda client: client.rerank(query, documents))
    expected = reference(path, pairs)
    assert [each.score for each in found.results] == pytest.approx(sorted(expected, reverse=True), abs=close())


@pytest.mark.thorough
def test_a_decoder_whose_tokens_attend_to_later_ones_embeds(library, tmp_path):
    made = random_model("2x64", QUANT, ctx=CTX)
    path = tmp_path / "bidirectional.gguf"
    pooling = pair("llama.pooling_type", U32, struct.pack("<I", 1))
    path.write_bytes(with_pairs(made.read_bytes(), pair("llama.attention.causal", BOOL, b"\0"), pooling))
    given = texts(20)
    with real_daemon("--model", str(path)) as daemon:
        found = asked(daemon, lambda client: client.embed(given))
        [known, *_] = asked(daemon, lambda client: client.models())
        answer = daemon.ask(prompt="hello")
    assert known.capabilities == ["embedding"]
    assert answer.code == "E_PROTO_BAD_REQUEST"
    assert np.abs(np.array(found.embeddings) - reference(path, tokens_of(path, given))).max() < close()


def test_what_the_daemon_says_of_an_encoder(encoder):
    [known, *_] = asked(encoder, lambda client: client.models())
    assert known.capabilities == ["embedding"]
    assert (known.architecture, known.embedding_length) == ("bert", 64)
    assert (known.context_per_request, known.parallel, known.chat_template) == (CTX, 1, None)
    logged = {line["event"]: line for line in encoder.log_lines()}
    assert logged["purpose"]["purpose"] == "it embeds texts"
    assert logged["purpose"]["pooling"] == "mean"
    assert "KV cache" not in logged
    health = asked(encoder, lambda client: client.health())
    assert health.ready
    assert {check.name for check in health.checks if check.model} == {"model", "engine", "queue"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello"},
        {"prompt": "hello", "session_id": "s"},
        {"prompt": "hello", "constraint": {"regex": "a+"}},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"controller": "gh-none"},
    ],
)
def test_a_request_for_text_says_what_an_encoder_does(encoder, fields):
    answer = encoder.ask(**fields)
    assert answer.code == "E_PROTO_BAD_REQUEST"
    assert "generates no text. It embeds texts" in answer.last["message"]
    encoder.settled()


def test_requests_of_many_clients_are_computed_together(encoder):
    given = texts(30)
    expected = reference(model("mean"), tokens_of(model("mean"), given))
    found = [None] * len(given)

    async def main():
        async def one(number):
            async with encoder.client() as client:
                found[number] = (await client.embed([given[number]])).embeddings[0]

        async with trio.open_nursery() as nursery:
            for number in range(len(given)):
                nursery.start_soon(one, number)

    trio.run(main)
    assert np.abs(np.array(found) - expected).max() < close()
    encoder.settled()


def test_a_closed_connection_ends_the_request(encoder):
    with encoder.wire() as wire:
        wire.send(type="embed", input=["a long text " * 100] * 1000)
        encoder.wait_until(lambda snapshot: snapshot["embeddings"]["requests"] == 1, "the request runs")
    encoder.wait_until(lambda snapshot: snapshot["embeddings"]["requests"] == 0, "the request has ended")
    encoder.settled()


@pytest.mark.thorough
def test_an_engine_that_is_killed_changes_nothing(library):
    path = model("mean")
    given = texts(400)
    with real_daemon("--model", str(path)) as daemon:
        expected = asked(daemon, lambda client: client.embed(given))
        before = daemon.metrics()

        async def embed_and_kill():
            async with daemon.client() as client, trio.open_nursery() as nursery:

                async def kill():
                    done = before["embeddings"]["texts_total"] + 5
                    snapshot = await trio.to_thread.run_sync(
                        daemon.wait_until, lambda each: each["embeddings"]["texts_total"] >= done, "it is on its way"
                    )
                    os.kill(snapshot["engine"]["pid"], signal.SIGKILL)

                nursery.start_soon(kill)
                return await client.embed(given)

        found = trio.run(embed_and_kill)
        assert np.allclose(found.embeddings, expected.embeddings, atol=close())
        again = asked(daemon, lambda client: client.embed(given[:3]))
        assert np.allclose(again.embeddings, expected.embeddings[:3], atol=close())
        assert daemon.metrics()["engine"]["restarts_total"] == 1


@pytest.mark.parametrize(
    ("pooling", "does", "makes"),
    sampled([("cls", "embeds texts", "64 numbers"), ("rank", "ranks documents for a query", "a score")], 2),
)
def test_what_the_commands_say_of_a_model_that_does_not_generate(library, pooling, does, makes):
    ended = run_process("doctor", "--model", model(pooling))
    lines = {line.split()[1]: line for line in ended.stdout.splitlines() if len(line.split()) > 1}
    assert f"it {does}; a text has at most {CTX} tokens" in lines["purpose"], ended.stdout
    assert makes in lines["answer"]
    assert "problem" not in ended.stdout
    shown = run_process("models", "show", model(pooling)).stdout
    assert f"it {does}" in shown


def test_a_draft_model_is_for_models_that_generate(library, tmp_path):
    for flags in (("--model", model("mean"), "--draft-model", EMBEDDED), ("--draft-model", model("mean"))):
        ended = run_process("serve", "--socket", tmp_path / "s", *flags)
        assert ended.returncode == 1
        assert f"{model('mean')} embeds texts, and a draft model is for models that generate text" in ended.stderr
