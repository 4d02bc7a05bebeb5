"""Valid files pass, and all others raise GgufError."""

from __future__ import annotations

import math
import os
import struct

import gguf as gguf_package
import pytest

from tests.support.cases import all_cases
from tests.support.gguf_files import (
    ARRAY,
    F32,
    I32,
    PAIRS,
    STRING,
    TENSORS,
    U32,
    U64,
    array,
    big_vocabulary,
    gguf,
    pair,
    tensor,
    text,
)
from tests.support.profile import amount
from uma_trio.models import gguf_header
from uma_trio.models.gguf_check import GgufError, check_gguf


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"

    def check(content, **options):
        path.write_bytes(content)
        return check_gguf(path, **options)

    return check


def test_a_sound_file(check):
    summary = check(gguf())
    assert (summary.architecture, summary.n_tensors, summary.size_bytes) == ("llama", 2, len(gguf()))
    assert (summary.context_length, summary.n_vocab, summary.has_template) == (4096, 3, False)
    assert check(gguf(version=2)).architecture == "llama"


def test_a_file_that_says_nothing(check):
    summary = check(gguf(pairs=()))
    assert (summary.architecture, summary.context_length, summary.n_vocab) == ("", None, None)


def test_another_alignment(check):
    pairs = (pair("general.alignment", U32, struct.pack("<I", 128)),)
    tensors = (tensor("one.weight", [32, 2], 8, 0), tensor("two", [5], 0, 128))
    assert check(gguf(pairs, tensors, bytes(128 + 20), alignment=128)).n_tensors == 2


def test_only_vocabularies_have_no_tensors(check):
    assert check(gguf(tensors=(), data=b""), vocab_only=True).n_vocab == 3
    with pytest.raises(GgufError, match="no tensors"):
        check(gguf(tensors=(), data=b""))


HUGE = 2**63 - 1

HOSTILE = {
    "empty": (b"", "it is empty"),
    "another format": (b"PK\x03\x04" + bytes(100), "not a GGUF"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "tensors without end": (gguf(n_tensors=2**64 - 1), "claims"),
    "pairs without end": (gguf(n_kv=2**64 - 1), "claims"),
    "more pairs than there are": (gguf(n_kv=8), "damaged|type|cut off"),
    "a key without end": (gguf([struct.pack("<Q", HUGE)]), "bytes, more than"),
    "a key with a NUL": (gguf([pair("a\0b", U32, bytes(4))]), "NUL"),
    "an empty key": (gguf([pair("", U32, bytes(4))]), "empty"),
    "a key twice": (gguf([PAIRS[0], PAIRS[0]]), "duplicate"),
    "a text without end": (gguf([text("k") + struct.pack("<IQ", STRING, HUGE)]), "bytes, more than"),
    "a text beyond the file": (gguf([text("k") + struct.pack("<IQ", STRING, 5000)]), "cut off"),
    "an unknown value type": (gguf([pair("k", 13, bytes(8))]), "type 13"),
    "an unknown entry type": (gguf([pair("k", ARRAY, array(77, 1, bytes(8)))]), "type 77"),
    "an array of arrays": (gguf([pair("k", ARRAY, array(ARRAY, 1, bytes(20)))]), "array of arrays"),
    "an array without end": (gguf([pair("k", ARRAY, array(F32, 2**62, b""))]), "claims"),
    "an array whose size overflows": (gguf([pair("k", ARRAY, array(U64, 2**61 + 1, bytes(8)))]), "claims"),
    "strings without end": (gguf([pair("k", ARRAY, array(STRING, 2**62, b""))]), "claims"),
    "a string of an array without end": (
        gguf([pair("k", ARRAY, array(STRING, 2, struct.pack("<Q", 2**64 - 9) + bytes(9)))]), "cut off"),
    "a string of an array at the end of numbers": (
        gguf([pair("k", ARRAY, array(STRING, 1, struct.pack("<Q", 2**64 - 1)))]), "cut off"),
    "alignment 0": (gguf([pair("general.alignment", U32, bytes(4))]), "power of two"),
    "alignment 16": (gguf([pair("general.alignment", U32, struct.pack("<I", 16))]), "power of two"),
    "alignment 48": (gguf([pair("general.alignment", U32, struct.pack("<I", 48))]), "power of two"),
    "alignment 2**31": (gguf([pair("general.alignment", U32, struct.pack("<I", 2**31))]), "power of two"),
    "alignment of another type": (gguf([pair("general.alignment", U64, struct.pack("<Q", 32))]), "uint32"),
    "alignment as text": (gguf([pair("general.alignment", STRING, text("32"))]), "uint32"),
    "alignment as an array": (gguf([pair("general.alignment", ARRAY, array(U32, 1, bytes(4)))]), "uint32"),
    "a long tensor name": (gguf(tensors=[tensor("n" * 64, [5], 0, 0)]), "bytes, more than 63"),
    "a tensor twice": (gguf(tensors=[TENSORS[0], tensor("one.weight", [5], 0, 96)]), "duplicate"),
    "no dimensions": (gguf(tensors=[tensor("t", [], 0, 0)]), "dimensions"),
    "five dimensions": (gguf(tensors=[tensor("t", [1] * 5, 0, 0)]), "dimensions"),
    "dimensions without end": (gguf(tensors=[text("t") + struct.pack("<I", 2**32 - 1) + bytes(64)]), "dimensions"),
    "a dimension of 0": (gguf(tensors=[tensor("t", [32, 0], 0, 0)]), "dimension of 0"),
    "a negative dimension": (gguf(tensors=[tensor("t", [2**64 - 32], 0, 0)]), "whole file"),
    "a product that overflows": (gguf(tensors=[tensor("t", [2**32, 2**32, 2], 0, 0)]), "whole file"),
    "a size that overflows": (gguf(tensors=[tensor("t", [2**62], 0, 0)]), "whole file"),
    "half a block": (gguf(tensors=[tensor("t", [48], 8, 0)]), "no multiple"),
    "a removed type": (gguf(tensors=[tensor("t", [32], 4, 0)]), "type 4"),
    "a type without end": (gguf(tensors=[tensor("t", [32], 2**32 - 1, 0)]), "type 4294967295"),
    "an offset beyond the file": (gguf(tensors=[tensor("t", [5], 0, 2**40)]), "gap"),
    "an offset that overflows": (gguf(tensors=[tensor("t", [5], 0, 2**64 - 32)]), "gap"),
    "an offset not aligned": (gguf(tensors=[TENSORS[0], tensor("two", [5], 0, 97)]), "not aligned"),
    "tensors that overlap": (gguf(tensors=[TENSORS[0], tensor("two", [5], 0, 64)]), "overlaps"),
    "data cut off": (gguf()[:-1], "cut off"),
    "no data": (gguf(data=b""), "cut off"),
}  # fmt: skip


BYTES = b"".join(text(b"<0x%02X>" % byte) for byte in range(256))


def with_values(**values):
    return gguf(_pairs(**values))


def _pairs(architecture="llama", **values):
    """Hyperparameters; a list becomes an array, and ``__`` in a name a dot."""
    pairs = [pair("general.architecture", STRING, text(architecture))]
    for name, value in values.items():
        key = f"{architecture}." + name.replace("__", ".")
        if isinstance(value, list):
            pairs.append(pair(key, ARRAY, array(U32, len(value), struct.pack(f"<{len(value)}I", *value))))
        elif isinstance(value, str):
            pairs.append(pair(key, STRING, text(value)))
        elif isinstance(value, float):
            pairs.append(pair(key, F32, struct.pack("<f", value)))
        else:
            pairs.append(pair(key, U32 if value >= 0 else I32, struct.pack("<I" if value >= 0 else "<i", value)))
    return pairs


def with_vocabulary(tokens, *, model="gpt2", n=None, types=(), adds=None, bos=None):
    pairs = [
        *PAIRS[:2],
        pair("tokenizer.ggml.model", STRING, text(model)),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, n, tokens)),
        pair("tokenizer.ggml.token_type", ARRAY, array(I32, len(types), struct.pack(f"<{len(types)}i", *types))),
    ]
    if adds:
        pairs.append(pair(f"tokenizer.ggml.add_{adds}_token", 7, b"\1"))
    if bos is not None:
        pairs.append(pair("tokenizer.ggml.bos_token_id", U32, struct.pack("<I", bos)))
    return gguf(pairs)


def with_tensor(name, dimensions, kind, **values):
    block, size = {0: (1, 4), 1: (1, 2), 8: (32, 34), 9: (32, 36), 24: (1, 1), 26: (1, 4), 30: (1, 2)}[kind]
    return gguf(
        _pairs(**values), tensors=[tensor(name, dimensions, kind, 0)], data=bytes(math.prod(dimensions) // block * size)
    )


NAN, INF = math.nan, math.inf
WINDOW = "attention__sliding_window"
PATTERN = "attention__sliding_window_pattern"
EPSILON = "attention__layer_norm_rms_epsilon"
HEADS = {"embedding_length": 64, "attention__head_count": 2}

ENCODER = {
    "context_length": 512, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
    "attention__head_count": 2, "attention__causal": 0,
}  # fmt: skip


def encoder(*tensors, **values):
    """A BERT; a value that is ``None`` is left out."""
    found = {name: value for name, value in (ENCODER | values).items() if value is not None}
    options = {"tensors": list(tensors), "data": bytes(4096)} if tensors else {}
    return gguf(_pairs("bert", **found), **options)


DEADLY = {
    "no context": (with_values(context_length=0), "a context of 0 tokens"),
    "a context of more than 31 bits": (with_values(context_length=1 << 31), "a context of 2147483648 tokens"),
    "no layers": (with_values(block_count=0), "0 layers"),
    "too many layers": (with_values(block_count=513), "513 layers"),
    "layers without end": (with_values(block_count=2690366077), "2690366077 layers"),
    "negative layers": (with_values(block_count=-1), "-1 layers"),
    "more predicting layers than layers": (with_values(block_count=2, nextn_predict_layers=3), "multi-token"),
    "experts without end": (with_values(expert_count=2**32 - 1, expert_used_count=1), "experts"),
    "experts of which none is used": (with_values(expert_count=4), "experts"),
    "experts used of none": (with_values(expert_used_count=2), "experts"),
    "more experts used than there are": (with_values(expert_count=4, expert_used_count=5), "experts"),
    "more experts used in one layer": (with_values(expert_count=4, expert_used_count=[2, 5]), "experts"),
    "no experts in a layer that has them": (
        with_tensor("blk.1.ffn_down_exps.weight", [32, 2], 8, expert_count=4, expert_used_count=[2, 0]), "layer 1"),
    "a negative number of experts used": (
        gguf([*_pairs(), pair("llama.expert_used_count", ARRAY, array(I32, 2, struct.pack("<2i", -1, 0)))]),
        "experts",
    ),
    "no experts where the architecture needs them": (gguf(_pairs("grovemoe")), "experts"),
    "no sections for RoPE": (gguf(_pairs("qwen3vl")), "sections"),
    "groups of no experts": (with_values(expert_group_count=1), "experts"),
    "groups that do not divide the experts": (
        with_values(expert_count=4, expert_used_count=2, expert_group_count=3, expert_group_used_count=1), "experts"),
    "no group used": (with_values(expert_count=4, expert_used_count=2, expert_group_count=2), "experts"),
    "a negative epsilon": (with_values(**{EPSILON: -1e-6}), "epsilon is -"),
    "an epsilon that is not a number": (with_values(**{EPSILON: NAN}), "epsilon is nan"),
    "an infinite epsilon": (with_values(**{EPSILON: INF}), "epsilon is inf"),
    "another negative epsilon": (with_values(attention__group_norm_epsilon=-1.0), "epsilon is -1"),
    "layers of an architecture with a NUL": (
        gguf([pair("general.architecture", STRING, text("llama\0x")), *_pairs(block_count=0)[1:]]), "0 layers"),
    "KV heads that do not match a layer's keys": (
        with_tensor("blk.1.attn_k.weight", [32, 32], 0, attention__head_count_kv=[1, 2], **HEADS),
        "layer 1 claims 2",
    ),
    "an encoder": (gguf(_pairs("t5")), "encoder"),
    "the tokenizer of encoders": (with_vocabulary(text("a") + text("b"), n=2, model="t5"), "encoder"),
    "diffusion": (gguf(_pairs("llada")), "diffusion"),
    "a head of EAGLE-3": (gguf(_pairs("eagle3")), "drafts tokens from the inner states of another model"),
    "an unknown pooling": (with_values(pooling_type=5), "pooling_type is 5, not one of 0 \\(none\\)"),
    "a negative pooling": (encoder(pooling_type=-1), "pooling_type is -1"),
    "an unknown pooling of a classifier": (encoder(classifier__pooling_type=9), "classifier.pooling_type is 9"),
    "an encoder without a context": (encoder(context_length=None), "no bert.context_length"),
    "an encoder with a negative context": (encoder(context_length=-512), "claims -512 for bert.context_length"),
    "an encoder without heads": (encoder(attention__head_count=0), "claims 0 for bert.attention.head_count"),
    "an encoder without a width": (encoder(embedding_length=None), "no bert.embedding_length"),
    "an encoder without a feed-forward width": (encoder(feed_forward_length=None), "no bert.feed_forward_length"),
    "an encoder whose width does not fit its heads": (encoder(attention__head_count=3), "cannot be divided"),
    "an encoder with keys of another width": (encoder(attention__key_length=16), "keys and values of different widths"),
    "an encoder with embeddings of another width": (encoder(embedding_length_out=64), "out is 64, and .* 32 numbers"),
    "a reranker without a head": (encoder(pooling_type=4), "has no classification head.*cls.output.weight"),
    "types of tokens in half precision": (encoder(tensor("token_types.weight", [32, 2], 1, 0)), "F16, not F32"),
    "a damaged table of characters": (
        gguf([*_pairs("bert", **ENCODER), pair("tokenizer.ggml.model", STRING, text("t5")),
              pair("tokenizer.ggml.precompiled_charsmap", ARRAY, array(0, 9, struct.pack("<II", 4, 1 << 30) + b"\0"))]),
        "precompiled_charsmap"),
    "an empty RoPE scaling": (with_values(rope__scaling__type=""), "RoPE scaling is ''"),
    "an unknown RoPE scaling": (with_values(rope__scaling__type="round"), "RoPE scaling is 'round'"),
    "no rotated dimensions": (with_values(rope__dimension_count=0, **HEADS), "rotates 0"),
    "negative rotated dimensions": (with_values(rope__dimension_count=-2, **HEADS), "rotates -2"),
    "part of a head rotated where all must be": (with_values(rope__dimension_count=16, **HEADS), "rotates all 32"),
    "an odd number of rotated dimensions": (with_values(rope__dimension_count=31, **HEADS), "rotates 31"),
    "more rotated dimensions than a head has": (with_values(rope__dimension_count=34, **HEADS), "rotates 34"),
    "more than a shorter head has": (
        with_values(rope__dimension_count=32, attention__key_length=16, **HEADS), "heads of 16"),
    "a window without end": (with_values(**{WINDOW: 2**31}), "window of 2147483648"),
    "a window that no layer has": (with_values(**{WINDOW: 64, PATTERN: [0, 0]}), "no layer"),
    "a window that only missing layers have": (
        with_values(block_count=2, **{WINDOW: 64, PATTERN: [0, 0, 1]}), "no layer"),
    "a window for an empty list of layers": (with_values(**{WINDOW: 64, PATTERN: []}), "no layer"),
    "a window that every layer is exempt from": (with_values(**{WINDOW: 64, PATTERN: 1}), "no layer"),
    "no tokens": (with_vocabulary(b"", n=0), "no tokens"),
    "a token twice": (with_vocabulary(text("a") + text("b") + text("a"), n=3), "b'a' twice, the second time as 2"),
    "tokens alike up to a NUL": (with_vocabulary(text("a\0b") + text("a\0c"), n=2), "twice"),
    "a token with the name of an empty one": (with_vocabulary(text("[EMPTY_1]") + text(""), n=2), "twice"),
    "an unknown tokenizer": (with_vocabulary(text("a"), n=1, model="mine"), "tokenizer is 'mine'.*gpt2"),
    "the tokenizer of RWKV": (with_vocabulary(text("a"), n=1, model="rwkv"), "tokenizer is 'rwkv'.*gpt2"),
    "SentencePiece without bytes": (with_vocabulary(text("a"), n=1, model="llama"), "255 of the 256 bytes"),
    "byte tokens in a WordPiece vocabulary": (with_vocabulary(text("a"), n=1, model="bert", types=[6]), "byte tokens"),
    "no BOS where the tokenizer adds it": (with_vocabulary(text("a"), n=1, adds="bos"), "adds the token bos"),
    "a BOS outside the vocabulary": (with_vocabulary(text("a"), n=1, adds="bos", bos=1), "adds the token bos"),
    "no EOS where the tokenizer adds it": (with_vocabulary(text("a"), n=1, adds="eos"), "adds the token eos"),
    "gemma4 without BOS": (with_vocabulary(text("a"), n=1, model="gemma4"), "adds the token bos"),
    "a norm in half precision": (with_tensor("blk.0.attn_norm.weight", [32], 1), "type F16, not F32"),
    "a norm of several heads, quantized": (with_tensor("blk.0.attn_q_norm.weight", [32, 2], 8), "type Q8_0, not F32"),
    "a bias in bfloat16": (with_tensor("blk.0.attn_q.bias", [32], 30), "type BF16, not F32"),
    "a norm of whole numbers": (with_tensor("output_norm.weight", [32], 26), "type I32, not F32"),
    "a convolution in half precision": (with_tensor("blk.0.shortconv.conv.weight", [3, 32], 1), "type F16, not F32"),
    "a matrix of whole numbers": (with_tensor("blk.0.attn_q.weight", [32, 2], 24), "type I8"),
    "a matrix in a type for activations": (with_tensor("blk.0.attn_q.weight", [32, 2], 9), "type Q8_1"),
}  # fmt: skip
"""Well-formed files that end the process when llama.cpp loads them or decodes with them, or that never return."""


@all_cases("name", DEADLY)
def test_values_that_llama_cpp_asserts(check, name):
    content, says = DEADLY[name]
    with pytest.raises(GgufError, match=says):
        check(content)


@all_cases(
    "content",
    [
        with_values(block_count=512, nextn_predict_layers=1),
        with_values(expert_count=0, expert_used_count=0),
        with_values(expert_count=8, expert_used_count=[2, 0], expert_group_count=4, expert_group_used_count=2),
        with_values(expert_count=8, expert_used_count=2, expert_group_count=1),
        with_values(**{EPSILON: 0.0}, rope__scaling__type="yarn"),
        with_values(rope__dimension_count=32, **HEADS),
        with_values(rope__dimension_count=128, attention__key_length=128, **HEADS),
        gguf(_pairs("phi3", rope__dimension_count=16, **HEADS)),
        with_values(rope__dimension_count=0),
        gguf(_pairs("glm5-next", rope__dimension_count=0, **HEADS)),
        with_values(rope__dimension_count=32, embedding_length=64, attention__head_count=NAN),
        with_values(**{WINDOW: 0, PATTERN: [0, 0]}),
        with_values(**{WINDOW: 4096, PATTERN: [1, 0]}),
        with_values(**{WINDOW: 4096, PATTERN: 6}),
        with_vocabulary(BYTES, n=256, model="llama", types=[6] * 256),
        with_vocabulary(text("a") + text("") + text(""), n=3),
        with_tensor("blk.0.attn_k.weight", [32, 32], 0, attention__head_count_kv=[1, 0], **HEADS),
        with_vocabulary(text("a"), n=1),
        with_vocabulary(text("a"), n=1, adds="bos", bos=0),
        with_vocabulary(text("a"), n=1, model="gemma4", bos=0),
        with_tensor("token_embd.weight", [32, 2], 8),
        with_tensor("blk.0.ffn_gate_tid2eid.weight", [32, 2], 26),
    ],
)
def test_values_of_sound_models(check, content):
    check(content)


@all_cases(
    ("content", "purpose"),
    [
        (gguf(), "generate"),
        (encoder(), "embed"),
        (encoder(pooling_type=1), "embed"),
        (encoder(tensor("cls.weight", [32, 32], 0, 0), pooling_type=4), "rank"),
        (encoder(tensor("cls.output.weight", [32], 0, 0), pooling_type=4), "rank"),
        (encoder(tensor("cls.output.weight", [32], 0, 0), pooling_type=2), "embed"),
        (with_values(pooling_type=1), "generate"),
        (with_values(pooling_type=4), "generate"),
        (gguf([*_pairs("llama", pooling_type=1), pair("llama.attention.causal", 7, b"\0")]), "embed"),
        (gguf([*_pairs("llama", pooling_type=1), pair("llama.attention.causal", 7, b"\1")]), "generate"),
        (gguf(_pairs("qwen3", pooling_type=4), [tensor("cls.output.weight", [32, 2], 0, 0)], bytes(256)), "rank"),
    ],
)
def test_what_a_model_is_for(check, content, purpose):
    assert check(content).purpose == purpose


def test_an_encoder_needs_no_memory_for_a_kv_cache_or_an_output(check):
    sizes = check(encoder(tensor("token_embd.weight", [32, 2], 0, 0))).sizes
    assert (sizes.keys, sizes.values, sizes.output_bytes) == ((0, 0), (0, 0), 0)


def test_a_vocabulary_alone_is_checked_for_its_tokens(check):
    assert check(with_values(block_count=0), vocab_only=True).architecture == "llama"
    with pytest.raises(GgufError, match="twice"):
        check(with_vocabulary(text("a") * 2, n=2), vocab_only=True)


@all_cases("name", HOSTILE)
def test_hostile_files(check, name):
    content, says = HOSTILE[name]
    with pytest.raises(GgufError, match=says) as caught:
        check(content)
    assert "model.gguf" in str(caught.value)


def test_every_truncation(check):
    content = gguf()
    for length in range(0, len(content), amount(quick=7, thorough=1)):
        with pytest.raises(GgufError):
            check(content[:length])


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_gguf(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        check_gguf(tmp_path)
    with pytest.raises(GgufError, match="regular file"):
        check_gguf(os.devnull)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GgufError, match="regular file"):  # and does not wait for a writer
        check_gguf(tmp_path / "pipe")


def test_a_header_in_several_reads_is_read_as_one(check, monkeypatch):
    content = gguf(big_vocabulary(500))
    whole = check(content)
    for first in (4, 23, 24, 100, 1000, 8191):
        monkeypatch.setattr(gguf_header, "_FIRST_READ", first)
        assert check(content) == whole


def test_type_sizes_are_those_of_the_gguf_package():
    for kind, (block, size) in gguf_package.GGML_QUANT_SIZES.items():
        name, our_block, our_size = gguf_header.TENSOR_TYPES[int(kind)]
        if kind.name == "Q8_1":  # the package counts two floats where the C struct has two halves
            size = 4 + block
        assert (name, our_block, our_size) == (kind.name, block, size)
