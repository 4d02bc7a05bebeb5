"""LoRA adapters in llama.cpp: answers are those of the merged weights, and no adapter leaks into another sequence."""

from __future__ import annotations

import contextlib
import itertools
import resource

import gguf
import numpy as np
import pytest

import llama_abi
from llama_abi import OK, Batch, Context, ContextOptions, LoraAdapter, Model, Placement
from tests.support.bench_scripts import bench_script
from tests.support.engine_contract import GREEDY
from tests.support.gpu import tolerance
from tests.support.placements import answers
from tests.support.profile import sampled, thorough
from tests.support.random_adapters import adapter_of_all_matrices, merged_model, random_adapter
from tests.support.random_models import random_model
from tests.support.rpc_server import rpc_server
from uma_trio import config
from uma_trio.daemon.engines.adapter_check import check_adapters
from uma_trio.engine.stacked_adapters import stack_adapters, write_stacked
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import EngineError, SampleRequest, Step, StepInput
from uma_trio.models.packaged import EMBEDDED

N = 24
SETTINGS = {"ctx": 2048, "parallel": 4, "batch_tokens": 64, "threads": 1, "layout_trial_s": 0}


@pytest.fixture
def open_engine(library):
    from uma_trio.engine.llama import LlamaEngine

    made = []

    def open_engine(model, adapters=(), **options):
        named = [config.Adapter(name=f"a{n}", path=str(path)) for n, path in enumerate(adapters)]
        made.append(LlamaEngine(model, config.Model(**SETTINGS | options), adapters=check_adapters(named, model)))
        return made[-1]

    yield open_engine
    for engine in made:
        engine.close()


def teacher_forced(engine, tokens, scales=(), *, seq_id=0):
    """Log-probabilities of 20 tokens after each of ``tokens``."""
    engine.step(Step([Truncate(seq_id)]))
    samples = [SampleRequest(GREEDY, 0, logprobs=20) for _ in tokens]
    output = engine.step(Step((), [[StepInput(seq_id, 0, tokens, samples, adapters=scales)]]))
    engine.step(Step([Truncate(seq_id)]))
    return [dict(score.top_logprobs) for score in output.scores]


def largest_difference(one, other):
    """The largest difference of log-probabilities that both report."""
    pairs = [(a[token], b[token]) for a, b in zip(one, other, strict=True) for token in a.keys() & b.keys()]
    assert len(pairs) > 15 * len(one)
    a, b = np.array(pairs).T
    return abs(a - b).max()


CLOSE = 0.05
"""Keys and values are F16: 0.03 was seen with AVX2 alone."""
PROMPT = list(range(300, 330))
MODELS = {
    "embedded": lambda: EMBEDDED,
    "llama": lambda: random_model("4x128x4x2x256", "f16"),
    "window": lambda: random_model("tiny-swa", "f16"),
    "hybrid": lambda: random_model("tiny-hybrid", "f16"),
}


@pytest.mark.parametrize("unified", ["on", thorough("off")])
@pytest.mark.parametrize(
    "scales", [thorough(((0, 1.0),)), thorough(((0, 0.5),)), thorough(((1, -0.7),)), ((0, 0.6), (1, 0.8))], ids=str
)
@pytest.mark.parametrize("name", sampled(MODELS, 3))
def test_an_answer_with_adapters_is_that_of_the_merged_weights(open_engine, name, scales, unified):
    model = MODELS[name]()
    adapters = [random_adapter(model, seed) for seed in (0, 1)]
    merged = merged_model(model, tuple((adapters[number], scale) for number, scale in scales))
    exact = open_engine(merged_model(model, ()), kv_unified=unified)
    whole = open_engine(merged, kv_unified=unified)
    with_adapters = open_engine(merged_model(model, ()), adapters, kv_unified=unified)
    found = teacher_forced(with_adapters, PROMPT, scales)
    expected = teacher_forced(whole, PROMPT)
    assert largest_difference(found, expected) < tolerance(CLOSE, on_gpu=0.2)
    plain = teacher_forced(with_adapters, PROMPT)
    assert largest_difference(plain, teacher_forced(exact, PROMPT)) == 0, "without adapters the model is as it is"
    assert any(one.keys() != other.keys() for one, other in zip(plain, found, strict=True)), "adapters change the text"


@pytest.mark.usefixtures("library")
def test_adapters_of_a_model_that_is_partly_on_a_device():
    """llama.cpp copies matrices from one device to the other in each call, and the copies have other names."""
    model = random_model("4x128x4x2x256", "f16")
    adapters = [random_adapter(model, seed) for seed in (0, 1)]
    with rpc_server() as endpoint:
        placed, _ = answers(model, [Placement(devices=()), Placement()], [endpoint], n_gpu_layers=3, adapters=adapters)
    assert [each.error for each in placed] == ["", ""]
    assert len(placed[0].tokens) > 8
    assert placed[1].tokens == placed[0].tokens


def test_stacked_adapters_of_all_matrices_compute_what_llama_cpp_computes_with_each(library, tmp_path):
    """Matrices of experts, of the embeddings and of the output; all types; a rank of 1; alpha 0, negative and missing."""
    path = random_model("tiny-moe", "f16")
    quants = gguf.GGMLQuantizationType
    kinds = [(32, -8.0, quants.Q8_0), (1, 0.0, quants.F16), (4, 16.0, quants.BF16), (27, None, quants.F32)]
    reader = bench_script("gguf_file").Reader(path)
    files = [
        adapter_of_all_matrices(tmp_path / f"{n}.gguf", reader, rank=rank, alpha=alpha, dtype=dtype, seed=n)
        for n, (rank, alpha, dtype) in enumerate(kinds)
    ]
    assert check_adapters([config.Adapter(name=each.stem, path=str(each)) for each in files], path)
    options = ContextOptions(n_ctx=256, n_seq_max=4, n_batch=64, kv_unified=True)
    tokens = PROMPT[:7]
    with Model(llama_abi.load(), path) as model, contextlib.ExitStack() as stack:
        expected = []
        batch = Batch(64)
        batch.add(tokens, pos=0, seq=0)
        for each in files:
            with LoraAdapter(model, each) as adapter, Context(model, options) as context:
                context.set_adapters([(adapter, -0.5)])
                assert context.decode(batch) == OK
                expected.append(context.logits().array[0].copy())
        stacked = stack.enter_context(stack_adapters(model, files))
        context = stack.enter_context(Context(model, options, stacked))
        batch.clear()
        for n in range(len(files)):
            batch.add(tokens, pos=0, seq=n)
        context.set_adapter_scales(
            np.repeat(np.float32(-0.5) * np.eye(len(files), dtype=np.float32), len(tokens), axis=0)
        )
        assert context.decode(batch) == OK
        found = context.logits().array
        for one, other in itertools.combinations(expected, 2):
            assert abs(one - other).max() > 1
        np.testing.assert_allclose(found, expected, atol=tolerance(0.3, on_gpu=1.0))


def test_a_large_alpha_with_matrices_of_float16(open_engine, tmp_path):
    """llama.cpp multiplies them with float16 numbers, which end at 65504."""
    model, path = random_model("4x128x4x2x256", "f16"), tmp_path / "a.gguf"
    bench_script("make_adapter").make_adapter(path, model, rank=1, alpha=2.0**15, dtype="f16")
    found = teacher_forced(open_engine(merged_model(model, ()), [path]), PROMPT, ((0, 1.0),))
    expected = teacher_forced(open_engine(merged_model(model, ((path, 1.0),))), PROMPT)
    assert largest_difference(found, expected) < tolerance(CLOSE, on_gpu=0.2)


@pytest.mark.parametrize(
    ("n", "rank", "on_gpu", "total"),
    [(1, 8, False, 16), (2, 16, False, 32), (1, 5, True, 8), (2, 8, True, 16), (2, 16, True, 40)],
)
def test_ranks_of_zeros_make_the_total_rank_one_that_the_kernels_like(tmp_path, n, rank, on_gpu, total):
    paths = [random_adapter(EMBEDDED, seed, rank) for seed in range(n)]
    parts = write_stacked(tmp_path / "a.gguf", paths, on_gpu=on_gpu)
    weights = parts[0].n_ranks.keys()
    assert {weight: sum(part.n_ranks[weight] for part in parts) for weight in weights} == dict.fromkeys(weights, total)
    assert [set(part.factors.values()) for part in parts] == [{16.0 / rank}] * n, (
        "alpha is 16; zeros have no part in it"
    )


def test_a_full_folder_for_temporary_files_is_named(tmp_path):
    adapter = random_adapter(EMBEDDED)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for room in (0, 10_000, adapter.stat().st_size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            with pytest.raises(EngineError, match=r"cannot write the adapters to .*a\.gguf: (?!None).*set TMPDIR"):
                write_stacked(tmp_path / "a.gguf", [adapter])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_has_changed_since_it_was_checked_is_not_loaded(library, tmp_path):
    """As before a restart of the engine: states on disk would be taken for those of the other adapter."""
    from uma_trio.engine.llama import LlamaEngine

    path = tmp_path / "a.gguf"
    path.write_bytes(random_adapter(EMBEDDED).read_bytes())
    settings = config.Model(**SETTINGS)
    files = check_adapters([config.Adapter(name="a", path=str(path))], EMBEDDED)
    path.write_bytes(random_adapter(EMBEDDED, 1).read_bytes())
    with pytest.raises(EngineError, match=r"a.gguf has changed; restart the server"):
        LlamaEngine(EMBEDDED, settings, adapters=files)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        LlamaEngine(EMBEDDED, settings, adapters=files)
    path.write_bytes(random_adapter(EMBEDDED).read_bytes())
    LlamaEngine(EMBEDDED, settings, adapters=files).close()
