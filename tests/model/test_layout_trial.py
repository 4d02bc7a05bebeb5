"""Layouts are measured with the real library, remembered, and given up where that takes too long."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest

import llama_abi
from tests.support.random_models import random_model
from tests.support.real_daemon import ROOT, real_daemon
from uma_trio import config
from uma_trio.engine import layout_trial
from uma_trio.engine import llama as llama_engine
from uma_trio.engine.layout import Choice, Layout, choose
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine.records import Draw, Feed, Step
from uma_trio.models.known_layouts import KnownLayouts
from uma_trio.models.loaded import EMBEDDED
from uma_trio.sampling import SamplingParams

PLENTY_S = 600.0
SETTINGS = config.Model(ctx=8192, parallel=4, threads=1, layout_trial_s=PLENTY_S)


@pytest.fixture
def choice_of(library, tmp_path):
    """Loads a model; how its memory was laid out, after it has answered."""

    def load(settings=SETTINGS, path=EMBEDDED):
        engine = LlamaEngine(path, settings, choices=KnownLayouts(path, tmp_path))
        greedy = Draw(SamplingParams(0.0, 0, 1.0, 0), 0)
        assert len(engine.step(Step(batches=[[Feed(0, 0, [5, 6, 7], [greedy])]])).tokens) == 1
        assert engine.used_cells() == {0: 3}, "nothing of the trial is left"
        assert engine.facts.unified == engine.layout_choice.layout.unified
        engine.close()
        return engine.layout_choice

    return load


def test_all_are_measured_once(choice_of):
    first = choice_of()
    assert first.why == "measured"
    assert {(each.layout.unified, each.layout.flash_attn) for each in first.measured} == {
        (False, "off"),
        (False, "auto"),
        (True, "auto"),
    }
    assert all(each.decode_ms > 0 for each in first.measured)
    rule, *others = first.measured
    assert rule.mixed_ms is not None
    assert all(each.mixed_ms is not None or each.decode_ms > rule.cost_ms for each in others)
    assert first.layout == choose(first.measured)
    second = choice_of()
    assert (second.why, second.layout) == ("measured before", first.layout)


def test_what_was_chosen_is_taken_and_other_settings_are_measured_again(choice_of, tmp_path):
    choice_of()
    [file] = tmp_path.iterdir()
    kept = json.loads(file.read_bytes())
    kept["layout"] = "unified, flash attention auto"
    file.write_text(json.dumps(kept))
    found = choice_of()
    assert (found.why, found.layout.unified, found.layout.flash_attn) == ("measured before", True, "auto")
    assert choice_of(attrs.evolve(SETTINGS, ctx=16_384)).why == "measured"


@pytest.mark.parametrize("harm", ["", "[]", '{"layout": 7}', '{"layout": "sideways"}', '{"layout'])
def test_what_is_damaged_is_measured_again(choice_of, tmp_path, harm):
    choice_of()
    [file] = tmp_path.iterdir()
    file.write_text(harm)
    assert choice_of().why == "measured"


def test_without_the_time_it_is_the_rules_and_not_remembered(choice_of, tmp_path):
    found = choice_of(attrs.evolve(SETTINGS, layout_trial_s=1e-4))
    assert (found.why, found.layout.name) == ("no time", "apart, flash attention off")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_where_that_is_not_wanted_or_not_possible(choice_of, tmp_path):
    for changes, why in (
        ({"layout_trial_s": 0}, "by rule"),
        ({"ctx": 1024}, "by rule"),
        ({"kv_unified": "on"}, "only one"),
        ({"kv_unified": "off", "flash_attn": "on"}, "only one"),
    ):
        assert choice_of(attrs.evolve(SETTINGS, **changes)).why == why
    assert list(tmp_path.iterdir()) == []


def test_without_the_room_for_it_the_rules_is_taken(choice_of, monkeypatch):
    """The small contexts can be had, the large one cannot."""
    monkeypatch.setattr(
        llama_engine, "try_layouts", lambda model, layouts, *_, **__: Choice(layout=layouts[-1], why="measured")
    )
    real = llama_abi.Context

    def refusing(model, options):
        if options.kv_unified:
            raise llama_abi.LlamaError("no memory")
        return real(model, options)

    monkeypatch.setattr(llama_abi, "Context", refusing)
    found = choice_of()
    assert (found.why, found.layout.name) == ("no room", "apart, flash attention off")


@pytest.mark.parametrize("shape", ["tiny-swa", "tiny-hybrid"])
def test_other_memories_are_measured_too(choice_of, shape):
    found = choice_of(path=random_model(shape))
    assert found.why == "measured"
    assert len(found.measured) == {"tiny-swa": 2, "tiny-hybrid": 3}[shape]


def test_a_small_batch_and_many_sequences(choice_of):
    assert choice_of(attrs.evolve(SETTINGS, batch_tokens=32, parallel=12)).why == "measured"


def options(layout: Layout) -> llama_abi.ContextOptions:
    return llama_abi.ContextOptions(
        n_ctx=layout.n_ctx, n_batch=512, n_seq_max=4, kv_unified=layout.unified, flash_attn=layout.flash_attn
    )


APART = Layout(n_ctx=8192, unified=False, flash_attn="off", n_ubatch=512)
POOL = Layout(n_ctx=8192, unified=True, flash_attn="auto", n_ubatch=512)


@pytest.fixture(scope="module")
def model(library):
    with llama_abi.Model(llama_abi.load(), EMBEDDED) as model:
        yield model


def test_who_cannot_be_had_is_out(model):
    """A layout that llama.cpp refuses; the rule's own leaves nothing to compare with."""

    def refused(layout):
        made = options(layout)
        return attrs.evolve(made, type_v="q8_0", flash_attn="off") if layout is POOL else made

    found = layout_trial.try_layouts(model, [APART, POOL], refused, budget_s=PLENTY_S)
    assert (found.why, [each.layout for each in found.measured]) == ("measured", [APART])
    found = layout_trial.try_layouts(model, [POOL, APART], refused, budget_s=PLENTY_S)
    assert (found.why, found.layout, [*found.measured]) == ("by rule", POOL, [])


@pytest.mark.parametrize("layout", [APART, POOL], ids=["apart", "unified"])
def test_each_sequence_has_cells_of_its_own(model, layout):
    """Were they shared, streams would read what one of them reads, and a pool would look cheap."""
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


def test_the_daemon_says_what_it_has_chosen(library, tmp_path):
    environment = {"UMA_LAYOUT_TRIAL_S": "600", "XDG_CACHE_HOME": str(tmp_path)}
    told = []
    for _ in range(2):
        with real_daemon("--parallel", "2", "--ctx", "2048", environment=environment) as daemon:
            lines = [json.loads(line) for line in daemon.logs().splitlines() if line.startswith("{")]
        told += [line for line in lines if line["event"] == "layout of the KV cache"]
    assert [line["why"] for line in told] == ["measured", "measured before"]
    assert told[0]["layout"] == told[1]["layout"]
    assert told[0]["layout"] in told[0]["measured"]


def test_the_bench_shows_each_start(library):
    script = ROOT / "benches" / "layout_choice.py"
    command = [sys.executable, script, "--repeat", "2", "--parallel", "2", "--ctx", "2048", "--budget", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    for start in ("1", "2"):
        found = [[cell.strip() for cell in row] for row in rows if row[0].strip() == start]
        assert [row[1] for row in found[:3]] == [
            "apart, flash attention off",
            "apart, flash attention auto",
            "unified, flash attention auto",
        ]
        assert [row[6] for row in found[:3]].count("yes") == 1
        assert len(found) == 4
