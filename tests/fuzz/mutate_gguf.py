"""Mutates small GGUF files and tries each of them in the real library.

    python -m tests.fuzz.mutate_gguf                          10,000 files, seed 0
    python -m tests.fuzz.mutate_gguf --count 100000 --seed 7
    python -m tests.fuzz.mutate_gguf --replay 1234 --out /tmp/bad.gguf

A file that passes ``check_gguf`` is loaded in a child process, which then does what a daemon does with a model: read
the whole vocabulary, tokenize, open a context, decode eight tokens, save a sequence; or embed or rank three texts, if
that is what the model is for. A child serves one file after
another until a file kills it. Every file has one of these outcomes:

    refused by us           ``check_gguf`` raised GgufError
    refused by the library  llama.cpp reported an error, and the process goes on
    ran                     eight tokens were decoded, or three texts computed
    aborted                 the child died; the assertion is reported
    hung                    the child took longer than ``--timeout`` seconds
    python error            the check or the wrapper raised anything else

The exit code is 1 if any file aborted, hung or raised a Python error.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import re
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import attrs
import gguf

import llama_abi
from tests.support.bench_scripts import bench_script
from tests.support.real_daemon import ROOT
from uma_trio import config
from uma_trio.engine.pooling import PoolingEngine
from uma_trio.engine_link.messages import EmbeddingInput, LoadError, Step
from uma_trio.models.gguf_check import GgufError, check_gguf
from uma_trio.models.gguf_header import TENSOR_TYPES
from uma_trio.models.purpose import Purpose
from uma_trio.tokenizer.tokenizer import Tokenizer, open_vocabulary

EMBEDDED = ROOT / "uma_trio" / "models" / "embedded" / "embedded.gguf"
SENTENCEPIECE = ROOT / "build" / "llama.cpp" / "models" / "ggml-vocab-llama-spm.gguf"
WORDPIECE = SENTENCEPIECE.with_name("ggml-vocab-bert-bge.gguf")

N_TOKENS = 600
"""Size of the vocabularies, so that a file has about 200 KB."""
MEMORY_BYTES = 4 << 30
"""Address space of a child: a file that claims too much must fail here, and not take the machine's memory."""
MAX_TENSOR_BYTES = 4 << 20

ASSERTION = re.compile(r"GGML_ASSERT|what\(\)|unsupported|fatal|Abort|terminate|error")

BAD = ("aborted", "hung", "python error")
OUTCOMES = ("refused by us", "refused by the library", "ran", *BAD)

STRING, ARRAY = 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOATS = (6, 12)
BLOCKS = {kind: (block, size) for kind, (_, block, size) in TENSOR_TYPES.items()}


# -- a GGUF that can be edited ------------------------------------------------------------------


@attrs.define
class Pair:
    """A key and its value: a number, bytes, or a list of either."""

    key: str
    kind: int
    value: Any
    item_kind: int = 0
    """Type of the items of an array."""


@attrs.define
class Tensor:
    """A tensor and its bytes."""

    name: str
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None
    """Offset to write; ``None`` for the right one."""
    fit_data: bool = True
    """Cut or pad ``data`` to the size that type and shape require."""

    @property
    def n_bytes(self) -> int:
        block, size = BLOCKS.get(self.kind, (1, 1))
        return math.prod(self.shape) // block * size


@attrs.define
class Gguf:
    """All of a file, as lists that a mutation edits."""

    pairs: list[Pair]
    tensors: list[Tensor]

    @classmethod
    def parse(cls, data: bytes) -> Gguf:
        """Parse a valid file of version 3 with the default alignment."""
        at = 8

        def take(layout: str) -> Any:
            nonlocal at
            found = struct.unpack_from("<" + layout, data, at)
            at += struct.calcsize("<" + layout)
            return found[0] if len(found) == 1 else found

        def text() -> bytes:
            nonlocal at
            length = take("Q")
            at += length
            return data[at - length : at]

        def value(kind: int) -> Any:
            return text() if kind == STRING else take(FORMATS[kind])

        n_tensors, n_pairs = take("QQ")
        pairs, infos = [], []
        for _ in range(n_pairs):
            key, kind = text().decode(), take("I")
            if kind == ARRAY:
                item_kind, count = take("IQ")
                pairs.append(Pair(key, kind, [value(item_kind) for _ in range(count)], item_kind))
            else:
                pairs.append(Pair(key, kind, value(kind)))
        for _ in range(n_tensors):
            name, n_dims = text().decode(), take("I")
            shape = [take("Q") for _ in range(n_dims)]
            infos.append((name, shape, *take("IQ")))
        start = -(-at // 32) * 32
        tensors = []
        for name, shape, kind, offset in infos:
            tensor = Tensor(name, shape, kind, b"")
            tensor.data = data[start + offset : start + offset + tensor.n_bytes]
            tensors.append(tensor)
        return cls(pairs, tensors)

    def to_bytes(self) -> bytes:
        """Serialize. Values that do not fit their type are cut to it."""
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.pairs))]
        for pair in self.pairs:
            parts += [_text(pair.key.encode()), struct.pack("<I", pair.kind)]
            if pair.kind == ARRAY:
                parts.append(struct.pack("<IQ", pair.item_kind, len(pair.value)))
                parts += [_packed(pair.item_kind, item) for item in pair.value]
            else:
                parts.append(_packed(pair.kind, pair.value))
        position, bodies = 0, []
        for tensor in self.tensors:
            body = tensor.data
            if tensor.fit_data:
                body = body[: tensor.n_bytes].ljust(min(tensor.n_bytes, MAX_TENSOR_BYTES), b"\x11")
            offset = position if tensor.offset is None else tensor.offset
            layout = f"<I{len(tensor.shape)}QIQ"
            parts += [
                _text(tensor.name.encode()),
                struct.pack(layout, len(tensor.shape), *tensor.shape, tensor.kind, offset),
            ]
            body += bytes(-len(body) % 32)
            bodies.append(body)
            position += len(body)
        head = b"".join(parts)
        return head + bytes(-len(head) % 32) + b"".join(bodies)

    def pair(self, key: str) -> Pair:
        return next(pair for pair in self.pairs if pair.key == key)

    @property
    def architecture(self) -> str:
        return next((_string(p.value) for p in self.pairs if p.key == "general.architecture"), "")


def _string(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _packed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value if isinstance(value, bytes) else str(value).encode())
    layout = "<" + FORMATS[kind]
    number = value if isinstance(value, int | float) else len(value)
    if kind in FLOATS:
        with contextlib.suppress(OverflowError, struct.error):
            return struct.pack(layout, number)
        return struct.pack(layout, math.inf)
    if kind == 7:
        return struct.pack(layout, bool(number))
    whole = int(number) if math.isfinite(number) else 0
    bits = 8 * struct.calcsize(layout)
    return (whole % (1 << bits)).to_bytes(bits // 8, "little")


# -- the files to start from --------------------------------------------------------------------


def make_bases(folder: Path) -> list[bytes]:
    """Make the valid files that are mutated: three kinds of memory, three kinds of vocabulary, experts, encoders."""
    script = bench_script("make_model")
    byte_level = _short_vocabulary(EMBEDDED, folder / "byte-level.gguf")
    sentencepiece = _short_vocabulary(SENTENCEPIECE, folder / "sentencepiece.gguf")
    shape = script.Shape(layers=2, width=64, heads=2, kv_heads=1, ffn=64)
    made = []
    for architecture, vocabulary in (
        ("llama", byte_level),
        ("llama", sentencepiece),
        ("gemma3", sentencepiece),
        ("lfm2", byte_level),
    ):
        path = folder / f"{architecture}-{vocabulary.stem}.gguf"
        script.make_model(path, attrs.evolve(shape, architecture=architecture), "q8_0", vocabulary=vocabulary, ctx=256)
        made.append(path.read_bytes())
    wordpiece = _short_vocabulary(WORDPIECE, folder / "wordpiece.gguf")
    for pooling in ("mean", "cls", "rank"):
        path = folder / f"bert-{pooling}.gguf"
        of_encoder = script.Shape(layers=2, width=64, heads=2, kv_heads=2, ffn=64, architecture="bert", pooling=pooling)
        script.make_model(path, of_encoder, "q8_0", vocabulary=wordpiece, ctx=256)
        made.append(path.read_bytes())
    return [*made, _with_experts(Gguf.parse(made[0])).to_bytes()]


def _short_vocabulary(source: Path, out: Path) -> Path:
    """Copy the tokenizer of ``source`` with its first ``N_TOKENS`` tokens."""
    found = Gguf.parse(source.read_bytes())
    tokens = set(found.pair("tokenizer.ggml.tokens").value[:N_TOKENS])
    for pair in found.pairs:
        if pair.key == "tokenizer.ggml.merges":
            pair.value = [merge for merge in pair.value if b"".join(merge.split(b" ")) in tokens]
        elif pair.key.startswith("tokenizer.ggml.") and pair.kind == ARRAY:
            pair.value = pair.value[:N_TOKENS]
    found.tensors.clear()
    out.write_bytes(found.to_bytes())
    return out


def _with_experts(model: Gguf, n_experts: int = 4) -> Gguf:
    """Replace the feed-forward layers with mixtures of experts."""
    for key, value in (("llama.expert_count", n_experts), ("llama.expert_used_count", 2)):
        model.pairs.append(Pair(key, 4, value))
    for tensor in list(model.tensors):
        if re.search(r"ffn_(gate|up|down)\.", tensor.name):
            tensor.name = tensor.name.replace(".weight", "_exps.weight")
            tensor.shape.append(n_experts)
            tensor.data *= n_experts
        if "ffn_gate_exps" in tensor.name:
            router = tensor.name.replace("gate_exps", "gate_inp")
            shape = [tensor.shape[0], n_experts]
            model.tensors.append(Tensor(router, shape, 0, bytes(4 * math.prod(shape))))
    return model


# -- mutations ----------------------------------------------------------------------------------

ARCHITECTURES = sorted(set(gguf.MODEL_ARCH_NAMES.values()))
WORDS = (
    *("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace", "test", "none", "no_vocab"),
    *("default", "llama-bpe", "qwen2", "deepseek-llm", "falcon", "tekken", "chameleon", "phi-3", "kimi-k2", "yarn"),
    *("linear", "longrope", "none", "", " ", "\n", "<0x0A>", "<|im_end|>", "</s>", "[UNK]", "▁", "a", "\0"),
)
NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 100, 255, 256, 511, 512, 513, 1024, 4096, 65535, 2**16, 2**24)
HUGE = (-1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-6, -1e-6, 1e6, 3e38, -3e38, math.inf, -math.inf, math.nan)
TENSOR_NAMES = tuple(
    (f"blk.0.{name.split('.{bid}.')[-1]}" if "{bid}" in name else name) + suffix
    for name in sorted(set(gguf.TENSOR_NAMES.values()))
    for suffix in (".weight", ".bias")
)


def _known_keys() -> tuple[str, ...]:
    found = set()
    for group in vars(gguf.Keys).values():
        if isinstance(group, type):
            found |= {key for key in vars(group).values() if isinstance(key, str) and "." in key}
    return tuple(sorted(key for key in found if "__" not in key and " " not in key))


KEYS = _known_keys()


def number(rng: Random, before: object) -> int | float:
    """A number in place of ``before``: near it, or where code is seldom tested."""
    whole = int(before) if isinstance(before, int | float) and math.isfinite(before) else 1
    return rng.choice(
        (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(HUGE),
            lambda: rng.choice((whole - 1, whole + 1, whole * 2, whole // 2, -whole)),
            lambda: rng.choice(REALS),
            lambda: rng.randrange(2 ** rng.choice((8, 16, 32, 64))),
        )
    )()


def word(rng: Random, before: object) -> bytes:
    """A text in place of ``before``."""
    old = before if isinstance(before, bytes) else b""
    return rng.choice(
        (
            lambda: rng.choice(WORDS).encode(),
            lambda: rng.choice(ARCHITECTURES).encode(),
            lambda: old + rng.randbytes(rng.choice((1, 2, 3))),
            lambda: old[:-1],
            lambda: old + b"\0",
            lambda: rng.randbytes(rng.randrange(20)),
            lambda: b"x" * rng.choice((100, 5000)),
        )
    )()


def _value(rng: Random, kind: int, before: object) -> Any:
    if kind == STRING:
        return word(rng, before)
    if kind in FLOATS and rng.random() < 0.6:
        return rng.choice(REALS)
    return number(rng, before)


def change_value(rng: Random, model: Gguf) -> str:
    pair = rng.choice([pair for pair in model.pairs if pair.kind != ARRAY])
    before, pair.value = pair.value, _value(rng, pair.kind, pair.value)
    return f"{pair.key}: {before!r:.60} -> {pair.value!r:.60}"


def change_kind(rng: Random, model: Gguf) -> str:
    pair = rng.choice([pair for pair in model.pairs if pair.kind != ARRAY])
    pair.kind = rng.choice((*FORMATS, STRING))
    if rng.random() < 0.5:
        pair.value = _value(rng, pair.kind, pair.value)
    return f"{pair.key}: of type {pair.kind}, {pair.value!r:.60}"


def change_key(rng: Random, model: Gguf) -> str:
    pair = rng.choice(model.pairs)
    before = pair.key
    if rng.random() < 0.3:
        model.pairs.remove(pair)
        return f"{before}: removed"
    pair.key = _key(rng, model) if rng.random() < 0.9 else pair.key + "\0"
    return f"{before}: renamed to {pair.key!r}"


def add_pair(rng: Random, model: Gguf) -> str:
    key, kind = _key(rng, model), rng.choice((4, 4, 4, 5, 6, 6, 7, STRING, 10))
    pair = Pair(key, kind, _value(rng, kind, 1))
    if rng.random() < 0.3:
        count = rng.choice((0, 1, 2, 3, 4, 512, 513))
        pair = Pair(key, ARRAY, [_value(rng, kind, 1) for _ in range(count)], kind)
    model.pairs = [each for each in model.pairs if each.key != key] + [pair]
    return f"{key}: added, {kind}, {pair.value!r:.60}"


def _key(rng: Random, model: Gguf) -> str:
    return rng.choice(KEYS).replace("{arch}", model.architecture)


def change_item(rng: Random, model: Gguf) -> str:
    arrays = [pair for pair in model.pairs if pair.kind == ARRAY and pair.value]
    pair = rng.choice(arrays)
    changes = []
    for _ in range(rng.choice((1, 1, 1, 2, 20))):
        at = rng.randrange(len(pair.value))
        twin = rng.random() < 0.2
        pair.value[at] = rng.choice(pair.value) if twin else _value(rng, pair.item_kind, pair.value[at])
        changes.append(f"[{at}] = {pair.value[at]!r:.40}")
    return f"{pair.key}{', '.join(changes[:2])}"


def change_array(rng: Random, model: Gguf) -> str:
    pair = rng.choice([pair for pair in model.pairs if pair.kind == ARRAY])
    kind = rng.randrange(5)
    if kind == 0:
        pair.value = pair.value[: rng.choice((0, 1, len(pair.value) // 2, max(0, len(pair.value) - 1)))]
    elif kind == 1:
        pair.value = pair.value + pair.value[: rng.choice((1, 2, len(pair.value)))]
    elif kind == 2:
        pair.item_kind = rng.choice((*FORMATS, STRING))
    elif kind == 3:
        rng.shuffle(pair.value)
    else:
        pair.kind, pair.value = pair.item_kind, next(iter(pair.value), 0)
    return f"{pair.key}: {len(pair.value) if isinstance(pair.value, list) else 'one'} of type {pair.item_kind}"


def spread_value(rng: Random, model: Gguf) -> str:
    """One value becomes an array, as for layers that differ."""
    pair = rng.choice([pair for pair in model.pairs if pair.kind not in (ARRAY, STRING)])
    count = rng.choice((0, 1, 2, 2, 2, 3, 512, 513))
    vary = rng.random() < 0.5
    values = [_value(rng, pair.kind, pair.value) if vary else pair.value for _ in range(count)]
    pair.item_kind, pair.kind, pair.value = pair.kind, ARRAY, values
    return f"{pair.key}: {count} values, {values[:3]}"


def change_vocabulary(rng: Random, model: Gguf) -> str:
    """The tokenizer's model, pre-tokenizer or kinds of tokens no longer fit the vocabulary."""
    key = "tokenizer.ggml." + rng.choice(("model", "model", "pre", "token_type"))
    pair = next((pair for pair in model.pairs if pair.key == key), None)
    if pair is None:
        return add_pair(rng, model)
    if key.endswith("token_type"):
        if pair.kind == ARRAY and pair.value:
            kind = rng.randrange(8)
            for _ in range(rng.choice((1, 10, 1000))):
                pair.value[rng.randrange(len(pair.value))] = kind
            return f"{key}: some are {kind}"
        return change_value(rng, model)
    pair.kind, pair.value = STRING, rng.choice(WORDS[:22]).encode()
    if rng.random() < 0.3:
        tokens = next((each for each in model.pairs if each.key == "tokenizer.ggml.tokens"), None)
        if tokens is not None and tokens.kind == ARRAY and tokens.value:
            tokens.value[rng.randrange(min(300, len(tokens.value)))] = word(rng, b"")
    return f"{key} = {pair.value!r}"


def change_architecture(rng: Random, model: Gguf) -> str:
    before = model.architecture
    with contextlib.suppress(StopIteration):
        model.pair("general.architecture").value = rng.choice(ARCHITECTURES).encode()
    if rng.random() < 0.85:
        for pair in model.pairs:
            if pair.key.startswith(before + "."):
                pair.key = model.architecture + pair.key.removeprefix(before)
    return f"{before} -> {model.architecture}"


def change_tensor_kind(rng: Random, model: Gguf) -> str:
    tensor = rng.choice(model.tensors)
    before = tensor.kind
    tensor.kind = rng.choice((*BLOCKS, 4, 99)) if rng.random() < 0.9 else rng.randrange(2**32)
    return f"{tensor.name}: type {before} -> {tensor.kind}"


def change_shape(rng: Random, model: Gguf) -> str:
    tensor = rng.choice(model.tensors)
    before = list(tensor.shape)
    kind = rng.randrange(5)
    if kind == 0:
        tensor.shape.append(rng.choice((1, 1, 2, 4)))
    elif kind == 1 and len(tensor.shape) > 1:
        tensor.shape.pop()
    elif kind == 2:
        rng.shuffle(tensor.shape)
    else:
        at = rng.randrange(len(tensor.shape))
        tensor.shape[at] = int(max(0, min(2**64 - 1, rng.choice((*NUMBERS, *HUGE, before[at] * 2, before[at] // 2)))))
    return f"{tensor.name}: {before} -> {tensor.shape}"


def change_name(rng: Random, model: Gguf) -> str:
    tensor = rng.choice(model.tensors)
    before = tensor.name
    if rng.random() < 0.3:
        model.tensors.remove(tensor)
        return f"{before}: removed"
    if rng.random() < 0.3:
        model.tensors.append(attrs.evolve(tensor, name=rng.choice(TENSOR_NAMES)[:63], shape=list(tensor.shape)))
        return f"{before}: copied to {model.tensors[-1].name}"
    tensor.name = rng.choice((rng.choice(TENSOR_NAMES)[:63], before[:-1], rng.choice(model.tensors).name))
    return f"{before}: renamed to {tensor.name}"


def change_data(rng: Random, model: Gguf) -> str:
    tensor = rng.choice(model.tensors)
    fill = rng.choice((b"\xff", b"\x00", b"\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\x00\x7e"))
    size = len(tensor.data)
    tensor.data = (fill * size)[:size] if rng.random() < 0.7 else rng.randbytes(size)
    return f"{tensor.name}: filled with {fill!r} or noise"


def change_offset(rng: Random, model: Gguf) -> str:
    tensor = rng.choice(model.tensors)
    tensor.offset = rng.choice((0, 32, 64, 1, 2**31, 2**63, 2**64 - 32))
    tensor.fit_data = rng.random() < 0.5
    return f"{tensor.name}: at {tensor.offset}"


MUTATIONS: tuple[tuple[Callable[[Random, Gguf], str], int], ...] = (
    (change_value, 6),
    (change_kind, 2),
    (change_key, 2),
    (add_pair, 5),
    (change_item, 4),
    (change_array, 2),
    (spread_value, 2),
    (change_vocabulary, 4),
    (change_architecture, 2),
    (change_tensor_kind, 3),
    (change_shape, 2),
    (change_name, 2),
    (change_data, 1),
    (change_offset, 1),
)


def mutant(bases: list[bytes], seed: int, case: int) -> tuple[bytes, str]:
    """The file ``case`` of ``seed``, and what was changed in it."""
    rng = Random(f"{seed} {case}")
    base = rng.randrange(len(bases))
    model = Gguf.parse(bases[base])
    functions, weights = zip(*MUTATIONS, strict=True)
    changes = []
    for mutation in rng.choices(functions, weights, k=rng.choice((1, 1, 1, 2, 3))):
        with contextlib.suppress(IndexError):  # an earlier mutation has left nothing of that kind
            changes.append(mutation(rng, model))
    return model.to_bytes(), f"base {base}; " + "; ".join(changes)


# -- trying a file ------------------------------------------------------------------------------


def run_file(library: llama_abi.Library, path: Path, purpose: Purpose) -> None:
    """Load a file and do with it once what serving does."""
    if purpose == "generate":
        run_model(library, path)
    else:
        run_pooling(path, purpose)


def run_model(library: llama_abi.Library, path: Path) -> None:
    """Load a model that generates, and compute a few tokens."""
    with llama_abi.Model(library, path) as model:
        tokenizer = Tokenizer(model.vocab)
        assert tokenizer.control_tokens is not None
        assert tokenizer.user_defined_controls is not None
        for text in ("Hello, wörld 42\n\n\t▁ \0\x7f🦊", "", " ", "".join(map(chr, range(1, 256)))):
            for parse_special in (False, True):
                tokenizer.encode_with_offsets(text, parse_special=parse_special)
        assert (model.description, model.metadata(), model.chat_template) is not None
        options = llama_abi.ContextOptions(n_ctx=256, n_batch=32, n_ubatch=32, n_seq_max=2)
        with llama_abi.Context(model, options) as context:
            batch = llama_abi.Batch(32)
            for pos in range(4):
                batch.clear()
                for seq in range(2):
                    batch.add([(7 * pos + seq) % model.vocab.n_tokens], pos=pos, seq=seq)
                if context.decode(batch) != llama_abi.OK:
                    raise llama_abi.LlamaError("no KV cells for eight tokens")
                context.logits().array.sum()
            state = bytearray(context.state_size(0))
            if state:
                context.save_state_into(0, state)
            context.seq_remove(0)


def run_pooling(path: Path, purpose: Purpose) -> None:
    """Load ``path`` and let it compute three texts together."""
    engine = PoolingEngine(path, config.Model(threads=1), purpose)
    try:
        with open_vocabulary(path) as vocabulary:
            found = [vocabulary.tokenizer.encode(text).tolist() for text in ("Hello, wörld 42", "a", "b c")]
        texts = [tokens[: engine.info.embedding_ctx] for tokens in found if tokens]
        inputs = [EmbeddingInput(number, 0, tokens, len(tokens)) for number, tokens in enumerate(texts)]
        output = engine.step(Step(embeddings=inputs))
        if output.embedding_failure is not None:
            raise llama_abi.LlamaError(output.embedding_failure)
        assert len(output.embeddings) == len(texts)
    finally:
        engine.close()


def attempt(library: llama_abi.Library, path: Path) -> tuple[str, str]:
    """The outcome of a file that does not end the process, and its message."""
    try:
        summary = check_gguf(path)
    except GgufError as error:
        return "refused by us", str(error).removeprefix(f"{path}: ")
    except Exception as error:  # noqa: BLE001  (a finding)
        return "python error", f"check_gguf: {error!r}"
    try:
        run_file(library, path, summary.purpose)
    except (llama_abi.LlamaError, LoadError) as error:
        return "refused by the library", str(error)
    except Exception as error:  # noqa: BLE001  (a finding)
        return "python error", repr(error)
    return "ran", ""


def serve(pipe: Connection, folder: Path, bases: list[bytes], seed: int) -> None:
    """Try the cases that come through ``pipe`` until it closes. Runs in a child process."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    library = llama_abi.load()
    path = folder / "mutant.gguf"
    with contextlib.suppress(EOFError):
        while True:
            data, _ = mutant(bases, seed, pipe.recv())
            os.ftruncate(errors, 0)
            os.lseek(errors, 0, os.SEEK_SET)
            path.write_bytes(data)
            pipe.send(attempt(library, path))


Serve = Callable[[Connection, Path, list[bytes], int], None]


def _start(serve: Serve, pipe: Connection, *args: Any) -> None:
    """Say that this process has started, then ``serve``."""
    pipe.send("started")
    serve(pipe, *args)


class Worker:
    """A child process, and the case that it works on."""

    def __init__(self, folder: Path, bases: list[bytes], seed: int, serve: Serve) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_start, args=(serve, theirs, folder, bases, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.case: int | None = None
        self.deadline = math.inf

    def begin(self, case: int, timeout_s: float) -> None:
        if self.case is None:  # its first one, which waits until its imports are done
            with contextlib.suppress(EOFError, ConnectionResetError):
                self.pipe.recv()
        self.case, self.deadline = case, time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError):  # it died at its start; the end of the pipe says so
            self.pipe.send(case)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def result(self) -> tuple[str, str]:
        """The outcome of its case, once the pipe is readable or the deadline has passed."""
        if self.pipe.poll():
            with contextlib.suppress(EOFError, ConnectionResetError):
                found: tuple[str, str] = self.pipe.recv()
                return found
            self.process.join()
            return "aborted", self._last_words()
        return "hung", ""

    def _last_words(self) -> str:
        lines = (self.folder / "stderr").read_text(errors="replace").splitlines()
        assertions = [line for line in lines if ASSERTION.search(line)]
        return f"{(assertions or lines or [''])[0]} (exit code {self.process.exitcode})"


@attrs.frozen
class Result:
    """What became of one file."""

    case: int
    outcome: str
    message: str


def run(
    bases: list[bytes],
    cases: Iterable[int],
    *,
    seed: int = 0,
    workers: int = 2,
    timeout_s: float = 60,
    serve: Serve = serve,
) -> Iterator[Result]:
    """Try the files ``cases``, in any order.

    Args:
        bases: valid files to mutate.
        workers: number of child processes.
        timeout_s: seconds until a file counts as hung.
        serve: runs in a child process.
    """
    with tempfile.TemporaryDirectory(prefix="uma-trio-mutants-") as name:
        folder = Path(name)
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        pool = [Worker(folder / str(index), bases, seed, serve) for index in range(workers)]
        todo = iter(cases)
        try:
            for worker in pool:
                if (case := next(todo, None)) is not None:
                    worker.begin(case, timeout_s)
            while busy := [worker for worker in pool if worker.case is not None]:
                soonest = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                ready = wait([worker.pipe for worker in busy], soonest)
                for worker in busy:
                    if worker.pipe not in ready and time.monotonic() < worker.deadline:
                        continue
                    assert worker.case is not None
                    found = Result(worker.case, *worker.result())
                    if found.outcome in ("aborted", "hung"):
                        worker.stop()
                        index = pool.index(worker)
                        worker = pool[index] = Worker(worker.folder, bases, seed, serve)
                    if (case := next(todo, None)) is None:
                        worker.case, worker.deadline = None, math.inf
                    else:
                        worker.begin(case, timeout_s)
                    yield found
        finally:
            for worker in pool:
                worker.stop()


def main(arguments: list[str]) -> int:
    """0 if every file was refused or ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutate_gguf", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="files to try (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other files (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first file (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="child processes (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds until a file hangs (default: %(default)s)")
    parser.add_argument("--replay", type=int, metavar="CASE", help="write this file and say what was changed in it")
    parser.add_argument("--out", type=Path, default=Path("mutant.gguf"), help="for --replay: the file to write")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="uma-trio-mutants-") as folder:
        bases = make_bases(Path(folder))
    if chosen.replay is not None:
        data, changes = mutant(bases, chosen.seed, chosen.replay)
        chosen.out.write_bytes(data)
        print(f"{chosen.out}: {changes}")
        return 0
    outcomes: Counter[str] = Counter()
    messages: dict[tuple[str, str], list[int]] = {}
    cases = range(chosen.first, chosen.first + chosen.count)
    for found in run(bases, cases, seed=chosen.seed, workers=chosen.workers, timeout_s=chosen.timeout):
        outcomes[found.outcome] += 1
        if found.outcome in BAD:
            messages.setdefault((found.outcome, re.sub(r"\d{3,}", "N", found.message)), []).append(found.case)
            print(f"{found.outcome}: case {found.case}: {mutant(bases, chosen.seed, found.case)[1]}", flush=True)
            print(f"    {found.message:.300}", flush=True)
    print()
    for outcome in OUTCOMES:
        print(f"{outcomes[outcome]:8}  {outcome}")
    for (outcome, message), cases in sorted(messages.items(), key=lambda item: -len(item[1])):
        print(f"{len(cases):8}  {outcome}: {message:.200}   e.g. case {cases[0]}")
    return 1 if any(outcomes[bad] for bad in BAD) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
