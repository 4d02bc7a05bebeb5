"""LoRA adapters: their lifetime, and arguments that would end the process in C."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import llama_abi
from llama_abi import Batch, Context, ContextOptions, HandleClosed, Library, LlamaError, LoraAdapter, Model
from tests.support.bench_scripts import bench_script

PROMPT = [464, 3290, 318, 257, 845, 922, 5044, 13]


@pytest.fixture(scope="module")
def paths(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    found = [folder / f"{seed}.gguf" for seed in range(2)]
    for seed, path in enumerate(found):
        bench_script("make_adapter").make_adapter(path, tiny, rank=4, seed=seed)
    return found


@pytest.fixture
def adapters(model: Model, paths: list[Path]) -> Iterator[list[LoraAdapter]]:
    found = [LoraAdapter(model, path) for path in paths]
    yield found
    for adapter in found:
        adapter.close()


def logits(context: Context) -> np.ndarray:
    batch = Batch(64)
    context.clear()
    batch.add(PROMPT, pos=0, seq=0)
    assert context.decode(batch) == llama_abi.OK
    return context.logits(1).array[0].copy()


def test_a_context_applies_the_adapters_that_are_set(model: Model, adapters: list[LoraAdapter]) -> None:
    one, two = adapters
    with Context(model, ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64)) as context:
        plain = logits(context)
        context.set_adapters([(one, 1.0)])
        with_one = logits(context)
        context.set_adapters([(one, 0.5)])
        with_half = logits(context)
        context.set_adapters([(two, 1.0), (one, 1.0)])
        with_both = logits(context)
        context.set_adapters([(one, 1.0), (two, 1.0)])
        np.testing.assert_allclose(logits(context), with_both, atol=1e-3)
        context.set_adapters([(one, 0.0)])
        np.testing.assert_array_equal(logits(context), plain)
        context.set_adapters([])
        np.testing.assert_array_equal(logits(context), plain)
        assert min(abs(plain - other).max() for other in (with_one, with_half, with_both)) > 0.1


def test_what_is_refused_changes_nothing(
    library: Library, model: Model, adapters: list[LoraAdapter], tiny: Path
) -> None:
    one, two = adapters
    with Context(model, ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64)) as context:
        context.set_adapters([(one, 1.0)])
        expected = logits(context)
        for wrong in ([(one, 1.0), (one, 0.5)], [(two, math.nan)], [(two, math.inf)]):
            with pytest.raises(LlamaError):
                context.set_adapters(wrong)
        with (
            Model(library, tiny) as other,
            Context(other, ContextOptions(n_ctx=256)) as foreign,
            pytest.raises(LlamaError, match="another model"),
        ):
            foreign.set_adapters([(one, 1.0)])
        np.testing.assert_array_equal(logits(context), expected)
        context.set_adapters([])


def test_lifetimes(library: Library, tiny: Path, paths: list[Path]) -> None:
    model = Model(library, tiny)
    adapter = LoraAdapter(model, paths[0])
    with pytest.raises(LlamaError, match="in use"):
        model.close()
    adapter.close()
    adapter.close()
    with Context(model, ContextOptions(n_ctx=256)) as context, pytest.raises(HandleClosed):
        context.set_adapters([(adapter, 1.0)])
    model.close()


def test_files_that_cannot_be_loaded(library: Library, model: Model, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match="cannot load the adapter"):
        LoraAdapter(model, tmp_path / "nowhere.gguf")
    with pytest.raises(LlamaError, match=r"expect general\.type to be 'adapter'"):
        LoraAdapter(model, tiny)
    with pytest.raises(LlamaError, match="NUL"):
        LoraAdapter(model, "a\0b")
    with Model(library, tiny, vocab_only=True) as vocabulary, pytest.raises(LlamaError, match="without its weights"):
        LoraAdapter(vocabulary, tiny)
