"""A start has the device compile what later calls need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fake_engine import FakeEngine, VirtualLink
from uma_trio.daemon.engines.warm_up import MAX_OUTPUTS, N_PASSES, warm_up
from uma_trio.engine_link.messages import AdapterFile, StepInput
from uma_trio.engine_link.row_counts import MAX_VECTOR_ROWS, row_counts


def shader_engine(**options: Any) -> FakeEngine:
    fields = {
        "compiles_shaders": True,
        "adapters": options.pop("adapters", ()),
        "can_truncate": options.pop("can_truncate", True),
    }
    engine = FakeEngine(**options)
    engine.info = msgspec.structs.replace(engine.info, **fields)
    return engine


def calls_of(engine: FakeEngine) -> list[list[StepInput]]:
    return [list(call) for step in engine.steps for call in step.calls]


def test_each_row_count_up_to_eight_and_each_doubling() -> None:
    assert row_counts(512) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512]
    assert row_counts(100)[-3:] == [32, 64, 100]
    assert row_counts(3) == [1, 2, 3]


@pytest.mark.parametrize("n_batch", [64, 512])
@pytest.mark.parametrize("unified", [True, False])
async def test_every_class_of_calls_is_computed_twice_over(autojump_clock, unified, n_batch):
    engine = shader_engine(n_batch=n_batch, n_ctx=32 * 1024, n_seq_max=16, unified=unified)
    shares: list[float] = []
    assert await warm_up(VirtualLink(engine), shares.append)
    assert engine.used_cells() == {}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    calls = calls_of(engine)
    chunks = [call[0] for call in calls if len(call) == 1 and len(call[0].samples) == 1]
    for rows in row_counts(n_batch)[1:]:
        same = [chunk.position for chunk in chunks if len(chunk.tokens) == rows]
        assert min(same) < 1024 <= max(same), "after a short and after a long context"
    decodes = [call for call in calls if len(call) > 1 or len(call[0].samples) > 1]
    widths = [sum(len(each.samples) for each in call) for call in decodes]
    assert widths == N_PASSES * [rows for rows in row_counts(n_batch) if 1 < rows <= MAX_OUTPUTS]
    assert [len(call) for call in decodes if len(call) > 1] == N_PASSES * [*range(2, MAX_VECTOR_ROWS + 1), 16]


async def test_a_full_sequence_makes_room_for_decodes(autojump_clock):
    engine = shader_engine(n_batch=64, n_ctx=4096, n_seq_max=4, unified=False)
    assert engine.info.n_ctx_seq == 1024
    await warm_up(VirtualLink(engine))
    decodes = [call for call in calls_of(engine) if len(call) > 1 or len(call[0].samples) > 1]
    behind = [call[0].position for call in decodes[len(decodes) // 2 :]]
    assert min(behind) >= 768, "of 1024 cells, of which attention sees multiples of 256"


@pytest.mark.parametrize("n_ctx", [1, 7, 64, 300, 600, 1100])
@pytest.mark.parametrize("can_truncate", [True, False])
@pytest.mark.parametrize("n_seq_max", [1, 3])
async def test_an_engine_with_little_room_computes_what_fits(autojump_clock, n_ctx, can_truncate, n_seq_max):
    engine = shader_engine(n_batch=512, n_ctx=n_ctx, n_seq_max=n_seq_max, can_truncate=can_truncate)
    assert await warm_up(VirtualLink(engine))
    assert engine.used_cells() == {}
    most = max(len(each.tokens) for call in calls_of(engine) for each in call)
    assert most <= min(512, engine.info.n_ctx_seq)
    if can_truncate and n_seq_max == 1:
        assert most == min(512, engine.info.n_ctx_seq)


async def test_adapters_have_passes_of_their_own(autojump_clock):
    engine = shader_engine(n_batch=16, n_ctx=2048, n_seq_max=4)
    await warm_up(VirtualLink(engine))
    alone = len(calls_of(engine))
    adapter = AdapterFile(name="a", path=Path("a.gguf"), fingerprint="0")
    engine = shader_engine(n_batch=16, n_ctx=2048, n_seq_max=4, adapters=(adapter,))
    await warm_up(VirtualLink(engine))
    calls = calls_of(engine)
    assert len(calls) == 2 * alone
    assert [bool(call[0].adapters) for call in calls] == [False] * alone + [True] * alone


async def test_loading_can_be_given_up(autojump_clock):
    engine = shader_engine(n_ctx=2048)
    answers = iter([True, True, False])
    assert not await warm_up(VirtualLink(engine), should_continue=lambda: next(answers))
    assert len(calls_of(engine)) == 4, "a chunk and decodes for each of two numbers of rows"


async def test_other_devices_compute_nothing(autojump_clock):
    engine = FakeEngine()
    assert await warm_up(VirtualLink(engine))
    assert engine.steps == []
