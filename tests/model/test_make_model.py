"""The random models of the benches: the contents of the file, and llama.cpp's results with it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import llama_abi
from tests.support.bench_scripts import bench_script
from tests.support.gpu import agree
from tests.support.profile import sampled, thorough
from tests.support.random_models import random_model
from uma_trio import config
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import SampleRequest, Step, StepInput
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.models.gguf_check import check_gguf
from uma_trio.models.packaged import EMBEDDED

VOCABULARIES = Path(__file__).parents[2] / "build/llama.cpp/models"


@pytest.fixture(scope="module")
def bench():
    return bench_script("make_model")


@pytest.fixture(scope="module")
def made():
    """``made(quant)``: a file of two layers, made once; a block of Q4_K takes a whole row."""
    return lambda quant: random_model("2x256" if quant == "q4_k" else "2x64", quant, ctx=512)


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


@pytest.mark.parametrize("text", ["", "9b", "2", "2x63", "2x64x3", "0x64", "2x64x2x3", "1x2x3x4x5x6", "-2x64"])
def test_impossible_shapes(bench, text):
    with pytest.raises(ValueError, match=r"\w"):
        bench.parse_shape(text)


@pytest.mark.parametrize("quant", sampled(["q8_0", "q4_0", "q4_k", "f16"], 2))
def test_the_deviation_of_weights(bench, made, quant):
    reader = bench_script("gguf_file").Reader(made(quant))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    root_of_width = tensors["output_norm.weight"].data.size ** 0.5
    for name, deviation in {
        "token_embd.weight": 1.0,
        "blk.1.ffn_up.weight": 1 / root_of_width,
        "output.weight": 3 / root_of_width,
    }.items():
        tensor = tensors[name]
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert weights.std() == pytest.approx(deviation, rel=0.03)
        assert abs(weights.mean()) < 0.02 * deviation
    output = gguf.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)
    assert not output[:3].any()  # unknown, begin and end of text
    assert output[3:].any(axis=1).all()


@pytest.mark.parametrize(
    "path", [EMBEDDED, thorough(VOCABULARIES / "ggml-vocab-bert-bge.gguf")], ids=lambda path: path.stem
)
def test_a_file_is_read_as_the_library_reads_it_and_copied_unchanged(path, tmp_path):
    files = bench_script("gguf_file")
    expected, found = gguf.GGUFReader(path), files.Reader(path)
    writer = files.Writer(tmp_path / "copy.gguf", expected.fields["general.architecture"].contents())
    files.copy_fields(found, writer)
    files.write_to_end(writer)
    copied = gguf.GGUFReader(tmp_path / "copy.gguf")
    for name, field in expected.fields.items():
        assert (found.fields[name].types, found.fields[name].contents()) == (field.types, field.contents()), name
        if not name.startswith("GGUF."):
            assert copied.fields[name].contents() == field.contents(), name
    assert [(each.name, each.data_offset) for each in found.tensors] == [
        (each.name, each.data_offset) for each in expected.tensors
    ]


def test_the_file_is_sound(made):
    summary = check_gguf(made("q8_0"))
    assert (summary.architecture, summary.n_vocab, summary.context_length) == ("llama", 32_000, 512)
    assert summary.n_tensors == 2 * 9 + 3


def test_the_same_arguments_give_the_same_file(bench, made, tmp_path):
    shape = bench.parse_shape("2x64")
    name = made("q4_0").name
    again, other = tmp_path / name, tmp_path / "other" / name
    other.parent.mkdir()
    bench.make_model(again, shape, "q4_0", ctx=512)
    bench.make_model(other, shape, "q4_0", ctx=512, seed=1)
    assert again.read_bytes() == made("q4_0").read_bytes()
    assert again.read_bytes() != other.read_bytes()


def test_without_a_vocabulary_it_says_what_to_run(tmp_path, bench):
    command = [sys.executable, bench.__file__, "--out", tmp_path / "m.gguf", "--vocab", tmp_path / "none.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "./build_llama.sh" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("quant", sampled(["q8_0", "q4_0", "q4_k", "f16"], 2))
def test_llama_cpp_computes_with_it(made, quant):
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


# -- memories that cannot be truncated ------------------------------------------------------------

GREEDY = SampleRequest(SamplingParams(0.0, 0, 1.0, 0))


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "f16"])
@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-hybrid"])
def test_a_small_shape_is_sound(shape, quant):
    summary = check_gguf(random_model(shape, quant))
    assert summary.architecture == {"tiny-swa": "gemma3", "tiny-hybrid": "lfm2"}[shape]
    assert summary.size_bytes < 16 << 20


@pytest.mark.parametrize(
    ("shape", "n_swa", "is_hybrid", "can_truncate"),
    [("tiny-swa", 64, False, {"off": True, "on": False}), ("tiny-hybrid", 0, True, {"off": False, "on": False})],
)
def test_a_small_shape_has_its_kind_of_memory(library, shape, n_swa, is_hybrid, can_truncate):
    import llama_abi

    with llama_abi.Model(llama_abi.load(), random_model(shape)) as model:
        assert (model.n_swa, model.is_hybrid, model.is_recurrent) == (n_swa, is_hybrid, False)
    for unified, expected in can_truncate.items():
        engine = LlamaEngine(random_model(shape), config.Model(ctx=1024, parallel=2, threads=1, kv_unified=unified))
        assert engine.info.can_truncate == expected
        assert not engine.info.state_can_truncate
        engine.close()


@pytest.mark.parametrize("unified", sampled(["on", "off"], 4))
@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-hybrid"])
def test_a_small_shape_generates(library, shape, unified):
    """Greedy answers are reproducible, and do not depend on the size of prefill chunks."""
    # With flash attention on a CPU, the order of additions depends on the size of the chunk.
    settings = config.Model(ctx=1024, parallel=2, batch_tokens=256, threads=1, kv_unified=unified, flash_attn="off")
    prompt = [int(token) for token in np.random.default_rng(3).integers(100, 30_000, 200)]
    engine = LlamaEngine(random_model(shape), settings)

    def answer(chunk, seq_id):
        ends = [*range(chunk, len(prompt), chunk), len(prompt)]
        for start, end in itertools.pairwise([0, *ends]):
            samples = (GREEDY,) if end == len(prompt) else ()
            result = engine.step(Step(calls=[[StepInput(seq_id, start, prompt[start:end], samples)]]))
        tokens = [result.tokens[0]]
        for pos in range(len(prompt), len(prompt) + 60):
            tokens += engine.step(Step(calls=[[StepInput(seq_id, pos, tokens[-1:], (GREEDY,))]])).tokens
        engine.step(Step([Truncate(seq_id)]))
        return tokens

    answers = [answer(len(prompt), 0), answer(len(prompt), 0), answer(50, 1), answer(7, 0)]
    engine.close()
    assert len(set(answers[0])) > 20
    assert all(agree(found, answers[0]) for found in answers)
