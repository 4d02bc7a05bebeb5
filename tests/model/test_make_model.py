"""The benches' random models: what is in the file, and that llama.cpp computes with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from uma_trio.models.gguf_check import check_gguf

gguf = pytest.importorskip("gguf")

SCRIPT = Path(__file__).parents[2] / "benches" / "make_model.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(bench, tmp_path_factory):
    """``made(quant)``: a file of two layers of width 64, made once."""
    if not bench.DEFAULT_VOCABULARY.exists():
        pytest.skip(f"{bench.DEFAULT_VOCABULARY} is not there: ./build_llama.sh unpacks it")
    folder = tmp_path_factory.mktemp("models")

    def make(quant):
        out = folder / f"{quant}.gguf"
        if not out.exists():
            bench.make_model(out, bench.parse_shape("2x64"), quant, ctx=512)
        return out

    return make


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("125m", (12, 768, 12, 4, 2048)),
        ("7B", (32, 4096, 32, 8, 14336)),
        ("2x64", (2, 64, 1, 1, 192)),
        ("4x256x8x4x704", (4, 256, 8, 4, 704)),
    ],
)
def test_shapes(bench, text, expected):
    shape = bench.parse_shape(text)
    assert (shape.layers, shape.width, shape.heads, shape.kv_heads, shape.ffn) == expected


@pytest.mark.parametrize(
    "text", ["", "9b", "2", "2x63", "2x64x3", "0x64", "2x64x2x3", "1x2x3x4x5x6", "-2x64"]
)
def test_shapes_that_no_model_can_have(bench, text):
    with pytest.raises(ValueError, match=r"\w"):
        bench.parse_shape(text)


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "f16"])
def test_weights_have_the_deviation_they_should(bench, made, quant):
    reader = gguf.GGUFReader(made(quant))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, deviation in {
        "token_embd.weight": 1.0,
        "blk.1.ffn_up.weight": 1 / 8,
        "output.weight": 3 / 8,
    }.items():
        tensor = tensors[name]
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert weights.std() == pytest.approx(deviation, rel=0.03)
        assert abs(weights.mean()) < 0.02 * deviation
    output = gguf.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)
    assert not output[:3].any()  # unknown, begin and end of text
    assert output[3:].any(axis=1).all()


def test_the_file_is_sound(made):
    summary = check_gguf(made("q8_0"))
    assert (summary.architecture, summary.n_vocab, summary.context_length) == ("llama", 32_000, 512)
    assert summary.n_tensors == 2 * 9 + 3


def test_the_same_arguments_give_the_same_file(bench, made, tmp_path):
    shape = bench.parse_shape("2x64")
    again, other = tmp_path / "q4_0.gguf", tmp_path / "other" / "q4_0.gguf"
    other.parent.mkdir()
    bench.make_model(again, shape, "q4_0", ctx=512)
    bench.make_model(other, shape, "q4_0", ctx=512, seed=1)
    assert again.read_bytes() == made("q4_0").read_bytes()
    assert again.read_bytes() != other.read_bytes()


def test_without_a_vocabulary_it_says_what_to_run(tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path / "m.gguf", "--vocab", tmp_path / "none.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "./build_llama.sh" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "f16"])
def test_llama_cpp_computes_with_it(made, quant):
    llama_abi = pytest.importorskip("llama_abi")
    try:
        library = llama_abi.load()
    except llama_abi.LibraryError as error:
        pytest.skip(str(error))
    tokens = []
    with (
        llama_abi.Model(library, made(quant)) as model,
        llama_abi.Context(model, llama_abi.ContextOptions(n_ctx=256)) as context,
    ):
        batch = llama_abi.Batch(64)
        prompt = model.vocab.tokenize("The quick brown fox", add_special=True, parse_special=False)
        batch.add(prompt, pos=0, seq=0)
        for position in range(len(prompt), len(prompt) + 100):
            assert context.decode(batch) == llama_abi.OK
            (logits,) = context.logits(1).array
            assert np.isfinite(logits).all()
            assert 2 < logits.std() < 4
            tokens.append(int(logits.argmax()))
            batch.clear()
            batch.add(tokens[-1:], pos=position, seq=0)
    assert len(set(tokens)) > 50
    assert not {0, 1, 2} & set(tokens)
