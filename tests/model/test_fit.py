"""Fit with real models: sizes are those of llama.cpp, and what is chosen loads within real limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio

import llama_abi
from tests.support.profile import is_thorough, thorough
from tests.support.random_models import random_model
from tests.support.real_daemon import ROOT, real_daemon
from uma_trio import config
from uma_trio.daemon.engines import loaded
from uma_trio.daemon.engines.link import ProcessLauncher
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.engine import open_fitted as fitting
from uma_trio.engine.fit import DoesNotFit, Memory, estimate_compute, fit
from uma_trio.engine.layout import Environment, Shape, candidates
from uma_trio.engine.layout_choice import context_options
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine.open_fitted import ComputeSizes, is_about_memory, measure, open_fitted
from uma_trio.engine_link.defaults import with_defaults
from uma_trio.engine_link.load_errors import ModelError, explained
from uma_trio.engine_link.messages import EngineDied, LoadError, Start
from uma_trio.models.gguf_check import check_gguf
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.usefixtures("forked_children")

MIB = 1 << 20
SHAPES = ("2x64", "tiny-swa", "tiny-hybrid")


@pytest.fixture
def engine_of(library: Path) -> Any:
    opened: list[LlamaEngine] = []

    def run(path: Path, **settings: Any) -> LlamaEngine:
        opened.append(LlamaEngine(path, config.Model(**{"threads": 1, "layout_trial_s": 0, **settings})))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


@pytest.mark.parametrize("path", [EMBEDDED, *SHAPES], ids=str)
@pytest.mark.parametrize("types", [{}, {"type_k": "q8_0", "type_v": "q4_0"}], ids=["f16", "quantized"])
def test_the_header_tells_the_size_of_weights_and_kv_cache(engine_of: Any, path: Any, types: dict[str, str]) -> None:
    path = path if isinstance(path, Path) else random_model(path)
    sizes = check_gguf(path).sizes
    engine = engine_of(path, ctx=1024, parallel=2, **types)
    assert sizes.kv_bytes_per_token(with_defaults(config.Model(**types))) == engine.info.kv_bytes_per_token
    assert sum(sizes.layers) + sizes.input_bytes <= engine.info.size_bytes
    assert sizes.weight_bytes >= engine.info.size_bytes
    assert sizes.n_vocab == engine.info.n_vocab
    assert sizes.n_ctx_train == engine.info.n_ctx_train


@pytest.mark.parametrize("shape", SHAPES)
def test_recurrent_states_and_the_kv_cache_have_the_predicted_size(library: Path, shape: str) -> None:
    path = random_model(shape)
    sizes, settings = check_gguf(path).sizes, with_defaults(config.Model(parallel=4, ctx=4096))
    predicted = sum(sizes.cache_bytes(settings, layer, 4096) for layer in range(len(sizes.layers)))
    options = llama_abi.ContextOptions(n_ctx=4096, n_seq_max=4, n_batch=64)
    with llama_abi.Model(llama_abi.load(), path) as model, llama_abi.Context(model, options) as context:
        found = sum(each.n_bytes for each in context.buffers if each.kind in ("KV", "RS"))
    assert predicted == pytest.approx(found, abs=0.02 * MIB * 2)


@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_tells_its_compute_buffers_without_allocating_them(library: Path, name: str) -> None:
    path = random_model(name, ctx=8192)
    sizes, memories = check_gguf(path).sizes, measure(llama_abi.load())
    settings = with_defaults(config.Model(parallel=4, ctx=16_384, threads=1))
    found = fit(sizes, settings, memories, estimate_compute(sizes))
    shape = Shape(n_ctx_train=sizes.n_ctx_train, kv_bytes_per_token=sizes.kv_bytes_per_token(settings))
    layouts = candidates(shape, settings, Environment(on_gpu=False), memory_bytes=0, windowed=False)
    with ComputeSizes(llama_abi.load(), path, memories) as compute, llama_abi.Model(llama_abi.load(), path) as model:
        for layout in layouts:
            with llama_abi.Context(model, context_options(settings, layout)) as context:
                real = sum(each.n_bytes for each in context.buffers if each.kind == "compute")
            assert real > 0
            assert sum(compute(settings, layout)) == real
            assert real <= estimate_compute(sizes)(settings, layout)[0], "the estimate is cautious"
        smaller = attrs.evolve(found.layout, n_ctx=4096)
        between = attrs.evolve(found.layout, n_ctx=8192)
        compute(settings, smaller)
        with llama_abi.Context(model, context_options(settings, between)) as context:
            real = sum(each.n_bytes for each in context.buffers if each.kind == "compute")
        assert sum(compute(settings, between)) >= real, "a size in between is estimated, and not too low"


def test_nothing_decodes_without_memory(library: Path) -> None:
    options = llama_abi.ContextOptions(n_ctx=256, n_batch=32)
    with (
        llama_abi.Model(llama_abi.load(), EMBEDDED, no_alloc=True) as model,
        llama_abi.Context(model, options) as context,
    ):
        batch = llama_abi.Batch(1)
        batch.add([0], pos=0, seq=0)
        with pytest.raises(llama_abi.LlamaError, match="loaded to learn sizes"):
            context.decode(batch)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["data", thorough("address-space")])
def test_within_a_real_limit_every_choice_loads_and_uses_most_of_it(library: Path, limit: str) -> None:
    """The bench's daemon and engine, under ``ulimit``; the last step has more than the model needs."""
    path = random_model("12x768x12x4x2048", ctx=8192)
    free = "250,500,800,1100,3000" if is_thorough() else "250,800,3000"
    command = [sys.executable, str(ROOT / "benches" / "fit.py"), "--model", str(path), "--json", "--limit", limit]
    command += ["--free", free, "--fill", "64"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    none, *some, whole = json.loads(ended.stdout)
    assert none["outcome"] == "ok" or "MiB are free" in none["outcome"], "refused with numbers, and not killed"
    for each in (*some, whole):
        assert each["outcome"] == "ok", each
        assert each["taken_mib"] <= each["free_mib"]
    assert [each["choice"] for each in some if "no room" in each["why"]], "the limits are short for this model"
    for each in some:
        if "no room" in each["why"]:
            assert each["predicted_mib"] >= 0.85 * each["free_mib"] or each["free_mib"] < 600
    assert whole["why"] == "everything fits"


def test_a_failed_allocation_counts_as_short_memory(library: Path) -> None:
    code = (
        "import resource, sys, psutil\n"
        "from pathlib import Path\n"
        "from uma_trio import config\n"
        "from uma_trio.engine.open_fitted import open_engine\n"
        "from uma_trio.engine_link.messages import EngineDied, LoadError, Start\n"
        "import llama_abi; llama_abi.load().devices()\n"  # the driver of a GPU has taken its memory
        "used = psutil.Process().memory_info().data\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + (100 << 20),) * 2)\n"
        "import uma_trio.engine.layout_choice as choice\n"
        "choice.free_memory_bytes = lambda: 1 << 40\n"  # a machine whose memory is taken between the look and the load
        "try:\n"
        "    open_engine(Start(Path(sys.argv[1]), config.Model(fit='off', ctx=1 << 18, devices=('none',), threads=1)), lambda share: True)\n"
        "except LoadError as error:\n"
        "    print(error.is_about_memory)\n"
    )
    environment = {**os.environ, "OMP_STACKSIZE": "512K"}  # a thread for each core must not need what is left
    ended = subprocess.run(
        [sys.executable, "-c", code, str(EMBEDDED)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ended.stdout.splitlines()[-1:] == ["True"], ended.stderr


def test_a_gpu_without_room_for_its_own_context_is_not_the_files_fault() -> None:
    death = "it died of SIGABRT: ggml-cuda.cu:103: CUDA error: out of memory"
    error = LoadError(death)
    error.__cause__ = EngineDied(death)
    with pytest.raises(ModelError) as found, explained(EMBEDDED):
        raise error
    assert found.value.remedy.startswith("free memory of the GPU, or hide the GPU")


@attrs.define
class ShortLink:
    """Fails to load until it gets an attempt that takes little."""

    fails: int
    error: LoadError
    starts: list[Start]

    async def load(self, start: Start, on_progress: object, should_continue: object, hang_timeout_s: float) -> bool:
        self.starts.append(start)
        if len(self.starts) <= self.fails:
            raise self.error
        return True


@attrs.define
class ShortLauncher:
    link: ShortLink

    def launch(self, model: str) -> ShortLink:
        return self.link


@pytest.mark.parametrize(
    ("fails", "reason", "about_memory", "attempts"),
    [
        (0, "", True, 1),
        (1, "cudaMalloc failed: out of memory", True, 2),
        (2, "killed by SIGKILL", True, 3),
        (9, "out of memory", True, 3),
        (1, "it is broken", False, 1),
    ],
)
async def test_after_a_failure_for_memory_less_is_taken(
    fails: int, reason: str, about_memory: bool, attempts: int, capsys: Any
) -> None:
    link = ShortLink(fails, LoadError(reason, is_about_memory=about_memory), [])
    start = Start(EMBEDDED, config.Model())
    loading = loaded._load(ShortLauncher(link), start, lambda share: None, lambda: True, 30.0)
    if fails < attempts:
        assert await loading is link
    else:
        with pytest.raises(LoadError, match=reason):
            await loading
    assert [each.attempt for each in link.starts] == list(range(attempts))


async def test_without_fit_a_failure_is_final() -> None:
    link = ShortLink(1, LoadError("out of memory", is_about_memory=True), [])
    with pytest.raises(LoadError):
        await loaded._load(
            ShortLauncher(link), Start(EMBEDDED, config.Model(fit="off")), lambda share: None, lambda: True, 30.0
        )


async def test_a_file_that_cannot_be_mapped_is_read() -> None:
    link = ShortLink(1, LoadError("mmap failed: Cannot allocate memory", is_about_memory=True), [])
    await loaded._load(ShortLauncher(link), Start(EMBEDDED, config.Model()), lambda share: None, lambda: True, 30.0)
    assert [each.settings.mmap for each in link.starts] == [True, False]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", True),
        ("llama_kv_cache: failed to allocate buffer for kv cache", True),
        ("mmap failed: Cannot allocate memory", True),
        ("tensor 'x' not found", False),
    ],
)
def test_words_for_short_memory(reason: str, expected: bool) -> None:
    assert is_about_memory(llama_abi.LlamaError(reason)) is expected


def test_what_was_taken_beyond_the_prediction_counts_at_the_next_start(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = check_gguf(EMBEDDED).sizes
    settings = config.Model(threads=1, parallel=4, layout_trial_s=0, memory_limit_mb=2000)
    start = Start(EMBEDDED, settings, cache_dir=tmp_path, sizes=sizes)

    def predicted(taken: float = 0.0) -> int:
        amounts = iter([0, int(taken)])
        monkeypatch.setattr(fitting, "anonymous_bytes", lambda: next(amounts))
        engine = open_fitted(start)
        engine.close()
        assert engine.fit is not None
        assert engine.fit.taken["RAM"] == int(taken)
        return engine.fit.predicted["RAM"]

    first = predicted()
    assert not list(tmp_path.iterdir()), "a model that takes less than predicted teaches nothing"
    assert predicted(1.3 * first) == first
    assert predicted(9.0 * first) == pytest.approx(1.15 * first, rel=1e-3), "half of the difference is learned"
    assert predicted() == pytest.approx(1.15 * first, rel=1e-3), "so much was another program's"
    assert predicted() == pytest.approx(1.075 * first, rel=1e-3), "it is forgotten again"


def test_a_start_says_what_was_chosen(library: Path, tmp_path: Path) -> None:
    path = random_model("12x768x12x4x2048", ctx=8192)
    with real_daemon(
        "--model", str(path), "--memory-limit-mb", "400", "--kv-unified", "off", folder=tmp_path
    ) as daemon:
        [found] = daemon.logged("fit")
        assert "requests, KV q8_0" in found["choice"]
        assert found["choice"].endswith("MiB allowed")
        assert found["why"].startswith("no room for ctx 8192 for each request, KV f16")
        per_request = daemon.logged("KV cache")[0]["ctx_per_request"]
        assert f"ctx {per_request} x 8 requests" in found["choice"]
        assert daemon.ask(prompt="a", max_tokens=4).reason in ("stop", "length")


def test_memory_is_that_of_the_machine_or_less(library: Path) -> None:
    first, *gpus = measure(llama_abi.load())
    assert first.name == "RAM"
    assert first.free_bytes > 0
    assert all(isinstance(each, Memory) for each in gpus)


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(library: Path, tmp_path: Path) -> None:
    progress: list[float] = []
    settings = config.Model(memory_limit_mb=5)
    start = Start(EMBEDDED, settings, cache_dir=tmp_path, sizes=check_gguf(EMBEDDED).sizes)
    with pytest.raises(DoesNotFit, match=r"memory_limit_mb"):
        open_fitted(start, lambda s: progress.append(s) or True)
    assert progress == []


async def test_a_restart_takes_what_was_chosen_before(library: Path, tmp_path: Path, nursery: trio.Nursery) -> None:
    """Although more memory is free by then, and although another layout would be measured."""
    path = random_model("12x768x12x4x2048", ctx=8192)
    settings = config.Model(threads=1, memory_limit_mb=400, layout_trial_s=0)
    start = Start(path, settings, cache_dir=tmp_path, sizes=check_gguf(path).sizes)
    launcher = ProcessLauncher(nursery)
    link = launcher.launch("fitted")
    assert await link.load(start, lambda share: None, lambda: True)
    engine = SupervisedEngine(launcher, start, link, config.Engine())
    assert link.ready.fit is not None
    assert "no room" in link.ready.fit.why
    engine._start = msgspec.structs.replace(
        engine._start, settings=attrs.evolve(engine._start.settings, layout_trial_s=60.0)
    )
    link.kill()
    with pytest.raises(EngineDied):
        await link.receive()
    await engine.restart_until_ready(0, lambda error, s: pytest.fail(str(error)))
    try:
        assert engine.link.info.n_ctx == link.info.n_ctx
        assert engine.link.ready.layout.name == link.ready.layout.name
        assert engine.link.ready.layout.reason != "measured"
    finally:
        await engine.link.aclose()
