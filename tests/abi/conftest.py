"""Fixtures: the library with its headers, the vocabularies of its source, and a small random model.

Without ``llama_abi/lib`` the tests are skipped with the command that builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

import llama_abi
from llama_abi.locations import library_directory
from tests.support.bench_scripts import bench_script

ROOT = Path(__file__).parents[2]
VOCABULARIES = ROOT / "build" / "llama.cpp" / "models"

WIDTH, LAYERS, HEADS, HEADS_KV, FEED = 64, 2, 4, 2, 128


@pytest.fixture(scope="session")
def directory() -> Path:
    """Directory of the library, ``include/`` and ``stamp.json``."""
    found = library_directory()
    if not found.is_dir():
        pytest.skip(f"there is no library in {found}: ./build_llama.sh --dev builds it")
    return found


@pytest.fixture(scope="session")
def headers(directory: Path) -> Path:
    return directory / "include"


@pytest.fixture(scope="session")
def library(directory: Path) -> llama_abi.Library:
    return llama_abi.load(directory)


@pytest.fixture(scope="session")
def vocabularies(directory: Path) -> Path:
    """Directory of llama.cpp's ``ggml-vocab-*.gguf`` files and their test texts."""
    if not VOCABULARIES.is_dir():
        pytest.skip(f"there is no {VOCABULARIES}: ./build_llama.sh --dev unpacks it")
    return VOCABULARIES


@pytest.fixture(scope="session")
def vocab(library: llama_abi.Library, vocabularies: Path) -> Iterator[Callable[[str], llama_abi.Vocab]]:
    """Function that loads a vocabulary by name, such as ``vocab("llama-spm")``, once."""
    models: dict[str, llama_abi.Model] = {}

    def load(name: str) -> llama_abi.Vocab:
        if name not in models:
            path = vocabularies / f"ggml-vocab-{name}.gguf"
            models[name] = llama_abi.Model(library, path, vocab_only=True)
        return models[name].vocab

    yield load
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def tiny(vocabularies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model of two layers with random weights and the vocabulary of GPT-2, 15 MiB."""
    return _write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", vocabularies, gguf.GGMLQuantizationType.F32)


@pytest.fixture(scope="session")
def tiny_q8(vocabularies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with matrices in Q8_0, which use other kernels."""
    return _write_model(tmp_path_factory.mktemp("tiny") / "tiny-q8.gguf", vocabularies, gguf.GGMLQuantizationType.Q8_0)


def _write_model(path: Path, vocabularies: Path, kind: gguf.GGMLQuantizationType) -> Path:
    files = bench_script("gguf_file")
    reader, writer = files.Reader(vocabularies / "ggml-vocab-gpt-2.gguf"), files.Writer(path, "llama")
    files.copy_fields(reader, writer, "tokenizer.")
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_chat_template("{{ messages }}")
    random = np.random.default_rng(7)

    def tensor(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            values = random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    tensor("token_embd.weight", n_vocab, WIDTH)
    tensor("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        kv_width = WIDTH // HEADS * HEADS_KV
        for name, *shape in (
            ("attn_norm", WIDTH),
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", kv_width, WIDTH),
            ("attn_v", kv_width, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_norm", WIDTH),
            ("ffn_gate", FEED, WIDTH),
            ("ffn_up", FEED, WIDTH),
            ("ffn_down", WIDTH, FEED),
        ):
            tensor(f"blk.{layer}.{name}.weight", *shape)
    files.write_to_end(writer)
    return path


@pytest.fixture(scope="session")
def model(library: llama_abi.Library, tiny: Path) -> Iterator[llama_abi.Model]:
    with llama_abi.Model(library, tiny) as opened:
        yield opened


@pytest.fixture
def context(model: llama_abi.Model) -> Iterator[llama_abi.Context]:
    options = llama_abi.ContextOptions(n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=4)
    with llama_abi.Context(model, options) as opened:
        yield opened


@pytest.fixture
def unified(model: llama_abi.Model) -> Iterator[llama_abi.Context]:
    options = llama_abi.ContextOptions(n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=4, kv_unified=True)
    with llama_abi.Context(model, options) as opened:
        yield opened
