"""Layout trials with the real library: measured once, cached, and abandoned when they take too long."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest

import llama_abi
from tests.support.profile import sampled, thorough
from tests.support.random_models import random_model
from tests.support.real_daemon import ROOT, real_daemon
from uma_trio import config
from uma_trio.engine import layout_choice, layout_trial
from uma_trio.engine.layout import Layout, LayoutChoice, MeasuredLayout, choose
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine.saved_layouts import GIVEN_UP_S, FileLayoutCache
from uma_trio.engine_link.messages import SampleRequest, Step, StepInput
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.models.packaged import EMBEDDED

PLENTY_S = 600.0
SETTINGS = config.Model(ctx=8192, parallel=4, threads=1, layout_trial_s=PLENTY_S, devices=("none",))
"""On the CPU: most GPUs get their layout by rule."""


@pytest.fixture
def choice_of(library, tmp_path):
    """Loads a model, lets it answer, and returns its layout choice."""

    def load(settings=SETTINGS, path=EMBEDDED):
        engine = LlamaEngine(path, settings, layout_cache=FileLayoutCache(path, tmp_path))
        greedy = SampleRequest(SamplingParams(0.0, 0, 1.0, 0))
        assert len(engine.step(Step(calls=[[StepInput(0, 0, [5, 6, 7], [greedy])]])).tokens) == 1
        assert engine.used_cells() == {0: 3}, "nothing is left of the trial"
        assert engine.info.unified == engine.layout_choice.layout.unified
        engine.close()
        return engine.layout_choice

    return load


def test_all_layouts_are_measured_once(choice_of):
    first = choice_of()
    assert first.why == "measured"
    assert {(each.layout.unified, each.layout.flash_attn) for each in first.measured} == {
        (False, "off"),
        (False, "auto"),
        (True, "auto"),
    }
    assert all(each.decode_ms > 0 for each in first.measured)
    default, *others = first.measured
    assert default.mixed_ms is not None
    assert all(each.mixed_ms is not None or each.decode_ms > default.cost_ms for each in others)
    assert first.layout == choose(first.measured)
    second = choice_of()
    assert (second.why, second.layout) == ("measured before", first.layout)


def test_the_cached_choice_is_used_for_the_same_settings_only(choice_of, tmp_path):
    choice_of()
    [file] = tmp_path.iterdir()
    kept = json.loads(file.read_bytes())
    kept["layout"] = "unified KV, flash attention auto"
    file.write_text(json.dumps(kept))
    found = choice_of()
    assert (found.why, found.layout.unified, found.layout.flash_attn) == ("measured before", True, "auto")
    assert choice_of(attrs.evolve(SETTINGS, ctx=16_384)).why == "measured before", "ctx varies with the free memory"
    assert choice_of(attrs.evolve(SETTINGS, batch_tokens=128)).why == "measured"


@pytest.mark.parametrize(
    "harm",
    [
        '{"layout": "sideways"}',
        *map(thorough, ('{"layout', "", "[]", '{"layout": 7}', '{"layout": "x", "given_up_at": "now", "trial_s": 1}')),
    ],
)
def test_a_damaged_cache_is_measured_again(choice_of, tmp_path, harm):
    choice_of()
    [file] = tmp_path.iterdir()
    file.write_text(harm)
    assert choice_of().why == "measured"


def test_a_trial_out_of_time_takes_the_default_and_is_not_repeated_with_as_little_time(
    choice_of, tmp_path, monkeypatch
):
    short = attrs.evolve(SETTINGS, layout_trial_s=1e-4)
    with monkeypatch.context() as counted:
        tried = []
        trial = layout_choice.try_layouts
        counted.setattr(layout_choice, "try_layouts", lambda *given, **named: tried.append(1) or trial(*given, **named))
        for _ in range(2):
            found = choice_of(short)
            assert (found.why, found.layout.name) == ("no time", "per-sequence KV, flash attention off")
        assert len(tried) == 1
        [file] = tmp_path.iterdir()
        kept = json.loads(file.read_bytes())
        file.write_text(json.dumps({**kept, "given_up_at": kept["given_up_at"] - GIVEN_UP_S}))
        assert (choice_of(short).why, len(tried)) == ("no time", 2), "a day later the machine may have time"
    assert choice_of().why == "measured", "uma-trio doctor gives it more time"
    assert choice_of(short).why == "measured before"


def test_nothing_is_measured_if_disabled_or_impossible(choice_of, tmp_path):
    for changes, why in (
        ({"layout_trial_s": 0}, "default"),
        ({"ctx": 1024}, "default"),
        ({"kv_unified": "on"}, "only one"),
        ({"kv_unified": "off", "flash_attn": "on"}, "only one"),
    ):
        assert choice_of(attrs.evolve(SETTINGS, **changes)).why == why
    assert list(tmp_path.iterdir()) == []


def test_the_default_is_used_if_the_choice_does_not_fit_into_memory(choice_of, monkeypatch):
    """The trial's small contexts fit, the real one does not."""
    monkeypatch.setattr(
        layout_choice, "try_layouts", lambda model, layouts, *_, **__: LayoutChoice(layout=layouts[-1], why="measured")
    )
    real = llama_abi.Context

    def refusing(model, options, adapters=None):
        if options.kv_unified:
            raise llama_abi.LlamaError("no memory")
        return real(model, options)

    monkeypatch.setattr(llama_abi, "Context", refusing)
    found = choice_of()
    assert (found.why, found.layout.name) == ("no room", "per-sequence KV, flash attention off")


@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-hybrid"])
def test_sliding_window_and_hybrid_models_are_measured_too(choice_of, shape):
    found = choice_of(path=random_model(shape))
    assert found.why == "measured"
    assert len(found.measured) == {"tiny-swa": 2, "tiny-hybrid": 3}[shape]


def test_a_small_batch_and_many_sequences(choice_of):
    assert choice_of(attrs.evolve(SETTINGS, batch_tokens=32, parallel=12)).why == "measured"


def options(layout: Layout) -> llama_abi.ContextOptions:
    return llama_abi.ContextOptions(
        n_ctx=layout.n_ctx, n_batch=512, n_seq_max=4, kv_unified=layout.unified, flash_attn=layout.flash_attn
    )


PER_SEQUENCE = Layout(n_ctx=8192, unified=False, flash_attn="off", n_ubatch=512)
UNIFIED = Layout(n_ctx=8192, unified=True, flash_attn="auto", n_ubatch=512)


@pytest.fixture(scope="module")
def model(library):
    with llama_abi.Model(llama_abi.load(), EMBEDDED) as model:
        yield model


def test_an_unsupported_layout_is_skipped(model):
    """llama.cpp refuses one layout.  Without the default there is nothing to compare with."""

    def refused(layout):
        made = options(layout)
        return attrs.evolve(made, type_v="q8_0", flash_attn="off") if layout is UNIFIED else made

    found = layout_trial.try_layouts(model, [PER_SEQUENCE, UNIFIED], refused, budget_s=PLENTY_S)
    assert (found.why, [each.layout for each in found.measured]) == ("measured", [PER_SEQUENCE])
    found = layout_trial.try_layouts(model, [UNIFIED, PER_SEQUENCE], refused, budget_s=PLENTY_S)
    assert (found.why, found.layout, [*found.measured]) == ("default", UNIFIED, [])


@pytest.mark.parametrize(("again_ms", "chosen"), [(10.0, PER_SEQUENCE), (20.0, UNIFIED)])
def test_a_slow_moment_of_the_default_does_not_choose_another_layout(model, monkeypatch, again_ms, chosen):
    """All later starts would keep the choice."""
    found_ms = iter([20.0, 12.0, again_ms])

    def measure(trial, layout, hopeless_ms):
        ms = next(found_ms)
        return MeasuredLayout(layout=layout, decode_ms=ms, mixed_ms=ms)

    monkeypatch.setattr(layout_trial._Trial, "measure", measure)
    found = layout_trial.try_layouts(model, [PER_SEQUENCE, UNIFIED], options, budget_s=PLENTY_S)
    assert (found.why, found.layout) == ("measured", chosen)


@pytest.mark.parametrize("layout", sampled([PER_SEQUENCE, UNIFIED], 2), ids=["per-sequence", "unified"])
def test_each_sequence_has_cells_of_its_own(model, layout):
    """With shared cells, attention would read them once for all, and unified KV would look too fast."""
    with layout_trial._Deadline(1) as deadline:
        trial = layout_trial._Trial(model, options(layout), deadline)
        trial._fill()
        trial._ms([(seq, 1) for seq in range(4)])
        context, batch = trial._context, llama_abi.Batch(1)
        assert [context.seq_pos_max(seq) for seq in range(4)] == [layout_trial.FILLED] * 4
        room = layout_trial.CELLS - layout_trial.FILLED - 1
        for n in range((4 if layout.unified else 1) * room + 1):
            batch.clear()
            batch.add([7], pos=layout_trial.FILLED + 1 + n, seq=0, logits="none")
            code = context.decode(batch)
            if code != llama_abi.OK:
                break
        assert code == llama_abi.NO_KV_SLOT
        assert n == (4 if layout.unified else 1) * room
        trial.close()


def test_the_daemon_logs_the_layout(library, tmp_path):
    environment = {"UMA_LAYOUT_TRIAL_S": "600", "XDG_CACHE_HOME": str(tmp_path)}
    logged, measured = [], []
    for n in range(2):
        folder = tmp_path / str(n)
        folder.mkdir()
        flags = ("--parallel", "2", "--ctx", "2048", "--devices", "none")
        with real_daemon(*flags, folder=folder, environment=environment) as daemon:
            daemon.logged("serving")
        lines = [json.loads(line) for line in daemon.logs().splitlines() if line.startswith("{")]
        logged += [line for line in lines if line["event"] == "layout of the KV cache"]
        measured += [line["layout"] for line in lines if line["event"] == "measured a layout of the KV cache"]
    assert [line["why"] for line in logged] == ["measured", "measured before"]
    assert logged[0]["layout"] == logged[1]["layout"]
    assert logged[0]["layout"] in measured
    assert len(measured) == len(set(measured)), "the second start measures nothing"


@pytest.mark.benches
def test_the_bench_shows_each_start(library):
    script = ROOT / "benches" / "layout_choice.py"
    command = [sys.executable, script, "--repeat", "2", "--parallel", "2", "--ctx", "2048", "--budget", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    for start in ("1", "2"):
        found = [[cell.strip() for cell in row] for row in rows if row[0].strip() == start]
        assert [row[1] for row in found[:3]] == [
            "per-sequence KV, flash attention off",
            "per-sequence KV, flash attention auto",
            "unified KV, flash attention auto",
        ]
        assert [row[6] for row in found[:3]].count("yes") == 1
        assert len(found) == 4
