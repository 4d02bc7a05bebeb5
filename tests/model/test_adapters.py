"""LoRA adapters in llama.cpp: answers are those of the merged weights, and no adapter leaks into another sequence."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from llama_abi import Placement
from tests.support.adapters import merged_model, random_adapter
from tests.support.engine_contract import GREEDY
from tests.support.placements import answers
from tests.support.random_models import bench_script, random_model
from tests.support.rpc_server import rpc_server
from uma_trio import config
from uma_trio.engine.messages import EngineError, SampleRequest, Step, StepInput
from uma_trio.engine.stacked_adapters import write_stacked
from uma_trio.kv.ops import Truncate
from uma_trio.models.adapters import check_adapters
from uma_trio.models.loaded import EMBEDDED

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


PROMPT = list(range(300, 330))
MODELS = {
    "embedded": lambda: EMBEDDED,
    "llama": lambda: random_model("4x128x4x2x256", "f16"),
    "window": lambda: random_model("tiny-swa", "f16"),
    "hybrid": lambda: random_model("tiny-hybrid", "f16"),
}


@pytest.mark.parametrize("unified", ["on", "off"])
@pytest.mark.parametrize("scales", [((0, 1.0),), ((0, 0.5),), ((1, -0.7),), ((0, 0.6), (1, 0.8))], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_an_answer_with_adapters_is_that_of_the_merged_weights(open_engine, name, scales, unified):
    model = MODELS[name]()
    adapters = [random_adapter(model, seed) for seed in (0, 1)]
    merged = merged_model(model, tuple((adapters[number], scale) for number, scale in scales))
    exact = open_engine(merged_model(model, ()), kv_unified=unified)
    whole = open_engine(merged, kv_unified=unified)
    with_adapters = open_engine(merged_model(model, ()), adapters, kv_unified=unified)
    found = teacher_forced(with_adapters, PROMPT, scales)
    expected = teacher_forced(whole, PROMPT)
    assert largest_difference(found, expected) < 0.02
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


def test_a_large_alpha_with_matrices_of_float16(open_engine, tmp_path):
    """llama.cpp multiplies them with float16 numbers, which end at 65504."""
    model, path = random_model("4x128x4x2x256", "f16"), tmp_path / "a.gguf"
    bench_script("make_adapter").make_adapter(path, model, rank=1, alpha=2.0**15, dtype="f16")
    found = teacher_forced(open_engine(merged_model(model, ()), [path]), PROMPT, ((0, 1.0),))
    expected = teacher_forced(open_engine(merged_model(model, ((path, 1.0),))), PROMPT)
    assert largest_difference(found, expected) < 0.02


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
