"""Candidate layouts of the KV cache, and the choice between them."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio import config
from uma_trio.engine.layout import (
    CLEARLY_FASTER,
    TIGHT_TARGET_MS,
    Environment,
    KvCacheTooSmall,
    Layout,
    MeasuredLayout,
    Shape,
    candidates,
    choose,
    default_layout,
    rule_in_words,
)

SHAPE = Shape(n_ctx_train=8192, kv_bytes_per_token=2048)
PER_SEQUENCE_OFF = "per-sequence KV, flash attention off"
PER_SEQUENCE = "per-sequence KV, flash attention auto"
UNIFIED = "unified KV, flash attention auto"
CUDA = Environment(on_gpu=True, computes_masked_cells=True)
TIGHT = attrs.evolve(CUDA, target_itl_ms=TIGHT_TARGET_MS - 1)


def names(
    *,
    on_gpu: bool = False,
    where: Environment | None = None,
    windowed: bool = False,
    shape: Shape = SHAPE,
    memory_gib: int = 64,
    **settings,
) -> list[str]:
    where = where or Environment(on_gpu=on_gpu)
    found = candidates(shape, config.Model(**settings), where, memory_bytes=memory_gib << 30, windowed=windowed)
    assert len(set(found)) == len(found)
    return [each.name for each in found]


def test_the_default_comes_first() -> None:
    assert names() == [PER_SEQUENCE_OFF, PER_SEQUENCE, UNIFIED]
    assert names(on_gpu=True) == [UNIFIED, PER_SEQUENCE_OFF, PER_SEQUENCE]


@all_cases("on_gpu", [False, True])
def test_candidates_follow_the_settings(on_gpu: bool) -> None:
    for unified, flash in itertools.product(("auto", "on", "off"), ("auto", "on", "off")):
        found = names(on_gpu=on_gpu, kv_unified=unified, flash_attn=flash)
        if unified != "auto":
            assert all(name.startswith({"on": "unified", "off": "per-sequence KV"}[unified]) for name in found)
        if flash != "auto":
            assert all(name.endswith(f" {flash}") for name in found)
        left = {("auto", "auto"): 3, ("auto", "on"): 2, ("auto", "off"): 2, ("off", "auto"): 2}
        assert len(found) == left.get((unified, flash), 1)


def test_the_first_candidate_is_the_default_for_all_settings() -> None:
    for unified, flash, on_gpu in itertools.product(("auto", "on", "off"), ("auto", "on", "off"), (False, True)):
        settings = config.Model(kv_unified=unified, flash_attn=flash)
        for where in (Environment(on_gpu=on_gpu), CUDA, TIGHT):
            default = default_layout(SHAPE, settings, where, memory_bytes=64 << 30)
            assert candidates(SHAPE, settings, where, memory_bytes=64 << 30, windowed=False)[0] == default


def test_a_quantized_v_needs_flash_attention() -> None:
    assert names(type_v="q8_0") == [PER_SEQUENCE, UNIFIED]
    assert names(type_v="q8_0", on_gpu=True) == [UNIFIED, PER_SEQUENCE]


def test_unified_or_not_is_the_same_for_one_sequence() -> None:
    assert names(parallel=1) == [PER_SEQUENCE_OFF, PER_SEQUENCE]
    assert names(parallel=1, on_gpu=True) == [UNIFIED]


def test_unified_kv_does_not_replace_per_sequence_kv_with_a_sliding_window() -> None:
    assert names(windowed=True) == [PER_SEQUENCE_OFF, PER_SEQUENCE]
    assert UNIFIED in names(windowed=True, on_gpu=True)


def test_per_sequence_kv_must_fit_a_default_request() -> None:
    """32,768 unified cells serve a request of 8,192 tokens; an eighth of them does not."""
    assert names(on_gpu=True, ctx=32_768) == [UNIFIED]
    assert names(on_gpu=True, ctx=65_536) == [UNIFIED, PER_SEQUENCE_OFF, PER_SEQUENCE]
    assert names(ctx=32_768) == [PER_SEQUENCE_OFF, PER_SEQUENCE, UNIFIED]


def test_a_layout_above_the_memory_limit_is_no_candidate() -> None:
    small = {"kv_mem_limit_mb": 1, "parallel": 8, "ctx": 4096}
    with pytest.raises(KvCacheTooSmall):
        names(**small)
    assert names(on_gpu=True, **small) == [UNIFIED]


def test_where_attention_scans_all_cells_the_target_decides() -> None:
    """Unified KV makes a tick with a prompt shorter, and all ticks longer the more cells are in use."""
    assert names(where=CUDA) == [PER_SEQUENCE, PER_SEQUENCE_OFF]
    assert names(where=TIGHT) == [UNIFIED], "a trial with little context does not know what a full cache costs"
    assert names(where=attrs.evolve(CUDA, target_itl_ms=TIGHT_TARGET_MS)) == names(where=CUDA)
    assert names(where=attrs.evolve(TIGHT, on_gpu=False)) == names(), "on a CPU it decides nothing"
    assert names(where=CUDA, kv_unified="on") == [UNIFIED]
    assert names(where=TIGHT, kv_unified="off") == [PER_SEQUENCE, PER_SEQUENCE_OFF]


def test_on_a_gpu_no_request_loses_context_to_per_sequence_kv() -> None:
    """32,768 cells, or memory for as many, serve a request of 8,192 tokens; an eighth of them does not."""
    assert names(where=CUDA, ctx=32_768) == [UNIFIED]
    assert names(where=CUDA, ctx=65_536) == [PER_SEQUENCE, PER_SEQUENCE_OFF]
    assert names(where=CUDA, kv_mem_limit_mb=100) == [UNIFIED]
    assert names(where=CUDA, kv_mem_limit_mb=1, parallel=8) == [UNIFIED], "per-sequence KV would not start at all"
    assert names(where=CUDA, ctx=32_768, kv_unified="off") == [PER_SEQUENCE, PER_SEQUENCE_OFF], "if set, it is kept"


def test_who_asks_for_many_sequences_gets_per_sequence_kv_with_less_for_each() -> None:
    """A unified cache costs the more, the more sequences it has; llama-server divides ``ctx`` too."""
    assert names(where=CUDA, parallel=32, ctx=32_768) == [PER_SEQUENCE, PER_SEQUENCE_OFF]
    assert names(where=CUDA, parallel=32, ctx=32_000) == [UNIFIED], "fewer than 1,024 for each"
    assert names(where=CUDA, parallel=15, ctx=32_768) == [UNIFIED]
    assert names(where=CUDA, parallel=32, kv_mem_limit_mb=100) == [UNIFIED], "not asked for, but what memory is left"
    assert PER_SEQUENCE in names(on_gpu=True, parallel=32, ctx=32_768), "on other devices a trial may choose it"


def test_the_rule_says_what_the_other_kv_cache_would_give() -> None:
    def words(where: Environment, **settings) -> str:
        model = config.Model(**settings)
        layout = default_layout(SHAPE, model, where, memory_bytes=64 << 30)
        return rule_in_words(layout, attrs.evolve(SHAPE, n_ctx_train=65_536), model, where)

    assert "with kv_unified on, one could have 65536" in words(CUDA, ctx=131_072, parallel=8)
    assert "kv_unified" not in words(CUDA, ctx=524_288, parallel=8), "each has what the model was trained for"
    assert words(TIGHT).startswith("a target_itl_ms below 50")
    assert words(CUDA, ctx=32_768).startswith("requests would have only 4096 tokens each")
    for undecided in (words(CUDA, kv_unified="on"), words(CUDA, parallel=1), words(Environment(on_gpu=True))):
        assert not undecided


def measured(*costs: tuple[float, float]) -> list[MeasuredLayout]:
    layouts = [
        Layout(n_ctx=512, unified=unified, flash_attn=flash, n_ubatch=256)
        for unified, flash in ((False, "off"), (False, "auto"), (True, "auto"))
    ]
    return [
        MeasuredLayout(layout=each, decode_ms=decode, mixed_ms=mixed)
        for each, (decode, mixed) in zip(layouts, costs, strict=False)
    ]


def test_the_clearly_faster_layout_is_chosen() -> None:
    assert choose(measured((10, 20), (8, 16), (5, 30))).name == PER_SEQUENCE  # 12, 9.6, 10
    assert choose(measured((10, 20), (8, 16), (5, 20))).name == UNIFIED
    assert choose(measured((4, 12), (9, 59), (10, 69))).name == PER_SEQUENCE_OFF


def test_mixed_ticks_can_decide() -> None:
    assert choose(measured((10, 12), (8, 40))).name == PER_SEQUENCE_OFF


def test_without_mixed_ticks_the_cost_is_a_lower_bound() -> None:
    layouts = [each.layout for each in measured((10, 20), (15, 15))]
    found = MeasuredLayout(layout=layouts[1], decode_ms=15, mixed_ms=None)
    assert found.cost_ms == 15
    assert choose([MeasuredLayout(layout=layouts[0], decode_ms=10, mixed_ms=20), found]).name == PER_SEQUENCE_OFF


def test_a_small_difference_is_noise() -> None:
    assert choose(measured((10, 20), (9.5, 19))).name == PER_SEQUENCE_OFF
    assert choose(measured((10, 20), (9.5, 19), (9.2, 18.5))).name == PER_SEQUENCE_OFF


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=3))
def test_the_choice_is_the_default_or_clearly_faster_and_the_fastest(costs: list[tuple[float, float]]) -> None:
    found = measured(*costs)
    cost = {each.layout: each.cost_ms for each in found}
    chosen = choose(found)
    if chosen != found[0].layout:
        assert cost[chosen] == min(cost.values())
        assert cost[chosen] < CLEARLY_FASTER * cost[found[0].layout]
    else:
        assert min(cost.values()) >= CLEARLY_FASTER * cost[chosen]


@all_cases(("unified", "n_cells"), [(False, 2048), (True, 256)])
def test_cells_are_rounded_up_as_llama_cpp_does(unified: bool, n_cells: int) -> None:
    layout = Layout(n_ctx=100, unified=unified, flash_attn="off", n_ubatch=64)
    assert layout.n_cells(8) == n_cells
    assert attrs.evolve(layout, n_ctx=n_cells).n_cells(8) == n_cells
