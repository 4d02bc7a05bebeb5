"""Small GGUF files, sound and damaged, as bytes."""

from __future__ import annotations

import struct

U32, I32, F32, STRING, ARRAY, U64 = 4, 5, 6, 8, 9, 10


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def array(kind, count, data):
    return struct.pack("<IQ", kind, count) + data


def tensor(name, dimensions, kind, offset):
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


PAIRS = (
    pair("general.architecture", STRING, text("llama")),
    pair("general.name", STRING, text("tiny")),
    pair("llama.context_length", U32, struct.pack("<I", 4096)),
    pair("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
    pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("bc") + text(""))),
    pair("tokenizer.ggml.scores", ARRAY, array(F32, 3, bytes(12))),
    pair("split.count", U32, struct.pack("<I", 1)),
)
TENSORS = (tensor("one.weight", [32, 2], 8, 0), tensor("two", [5], 0, 96))
DATA = bytes(96 + 20)


def gguf(pairs=PAIRS, tensors=TENSORS, data=DATA, *, version=3, n_tensors=None, n_kv=None, alignment=32):
    counts = len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_kv is None else n_kv
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def big_vocabulary(n):
    tokens = b"".join(text(f"token {i}") for i in range(n))
    return (*PAIRS[:4], pair("tokenizer.ggml.tokens", ARRAY, array(STRING, n, tokens)))


def with_pairs(data, *pairs, alignment=32):
    """The GGUF file ``data`` with more metadata in front; its tensors stay aligned."""
    n_kv = struct.unpack_from("<Q", data, 16)[0]
    added = b"".join(pairs)
    filler = -(len(added) + len(pair("test.filler", STRING, text("")))) % alignment
    added += pair("test.filler", STRING, text(b"x" * filler))
    return data[:16] + struct.pack("<Q", n_kv + len(pairs) + 1) + added + data[24:]
