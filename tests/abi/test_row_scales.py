"""Adapters of single rows: what each row computes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

import llama_abi
from llama_abi import Batch, Context, ContextOptions, LlamaError, LoraAdapter, Model, StackedAdapters, StackedPart
from llama_abi import row_scales as row_scales_module
from tests.support.bench_scripts import bench_script

TOKENS = [464, 3290, 318, 257, 845, 922, 5044, 13]
OPTIONS = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4, kv_unified=True)
ALPHA, RANKS = 16.0, (4, 8)


@pytest.fixture(scope="module")
def paths(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters and their stack."""
    folder = tmp_path_factory.mktemp("row-scales")
    found = [folder / f"{rank}.gguf" for rank in RANKS]
    for rank, path in zip(RANKS, found, strict=True):
        bench_script("make_adapter").make_adapter(path, tiny, rank=rank, seed=rank, alpha=ALPHA)
    readers = [gguf.GGUFReader(path) for path in found]
    writer = gguf.GGUFWriter(folder / "stack.gguf", "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    for tensors in zip(*[reader.tensors for reader in readers], strict=True):
        axis = 0 if tensors[0].name.endswith("lora_a") else 1
        writer.add_tensor(tensors[0].name, np.concatenate([np.array(each.data) for each in tensors], axis))
    bench_script("gguf_file").write_to_end(writer)
    return [*found, folder / "stack.gguf"]


@pytest.fixture
def adapters(model: Model, paths: list[Path]) -> Iterator[list[LoraAdapter]]:
    found = [LoraAdapter(model, path) for path in paths[:2]]
    yield found
    for adapter in found:
        adapter.close()


@pytest.fixture
def stacked(model: Model, paths: list[Path]) -> Iterator[StackedAdapters]:
    weights = [
        tensor.name[: -len(".lora_a")] for tensor in gguf.GGUFReader(paths[0]).tensors if "lora_a" in tensor.name
    ]
    parts = [StackedPart(dict.fromkeys(weights, rank), dict.fromkeys(weights, ALPHA / rank)) for rank in RANKS]
    with StackedAdapters(model, paths[2], parts) as found:
        yield found


def rows(*scales: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(scales, np.float32)


def decode(context: Context, seqs: Sequence[int], pos: int = 0) -> npt.NDArray[np.float32]:
    """Logits of one token of each sequence."""
    batch = Batch(64)
    batch.add_decodes([TOKENS[seq] for seq in seqs], positions=[pos] * len(seqs), seqs=seqs)
    assert context.decode(batch) == llama_abi.OK
    return context.logits().array.copy()


def test_each_row_has_its_own_adapters(model: Model, adapters: list[LoraAdapter], stacked: StackedAdapters) -> None:
    one, two = adapters
    chosen: list[list[tuple[LoraAdapter, float]]] = [[], [(one, 1.0)], [(two, 0.5)], [(one, 1.0), (two, -1.0)]]
    expected = []
    with Context(model, OPTIONS) as context:
        for seq, each in enumerate(chosen):
            context.set_adapters(each)
            expected.append([decode(context, [seq], pos)[0] for pos in range(3)])
    with Context(model, OPTIONS, stacked) as context:
        context.set_adapter_scales(rows([0, 0], [1, 0], [0, 0.5], [1, -1]))
        for pos in range(3):  # the second and third decode reuse the graph of the first
            found = decode(context, range(4), pos)
            np.testing.assert_allclose(found, [each[pos] for each in expected], atol=1e-3)


def test_a_reused_graph_follows_the_scales_and_the_rows_with_outputs(
    model: Model, adapters: list[LoraAdapter], stacked: StackedAdapters
) -> None:
    """The last layer is computed for rows with outputs only, so its scales are at another place than those of all rows."""
    with Context(model, OPTIONS) as context:
        context.set_adapters([(adapters[0], 1.0)])
        with_one = decode(context, [1])[0]
        context.set_adapters([])
        plain = decode(context, [2])[0]
    with Context(model, OPTIONS, stacked) as context:
        for scales, seq, expected in [
            (rows([0, 0], [1, 0], [0, 0], [0, 1]), 1, with_one),
            (rows([0, 1], [0, 1], [0, 0], [1, 0]), 2, plain),
            (rows([0, 1], [1, 0], [1, 1], [1, 0]), 1, with_one),
        ]:
            context.set_adapter_scales(scales)
            context.clear()
            batch = Batch(64)
            batch.add_decodes(TOKENS[:4], positions=[0] * 4, seqs=range(4), logits=[n == seq for n in range(4)])
            assert context.decode(batch) == llama_abi.OK
            np.testing.assert_allclose(context.logits(1).array[0], expected, atol=1e-3)


def test_scales_of_0_compute_the_model_itself(model: Model, stacked: StackedAdapters) -> None:
    with Context(model, OPTIONS) as context:
        expected = decode(context, range(4))
    with Context(model, OPTIONS, stacked) as context:
        context.set_adapter_scales(np.zeros(2, np.float32))
        np.testing.assert_array_equal(decode(context, range(4)), expected)
        context.set_adapter_scales(None)
        context.clear()
        np.testing.assert_array_equal(decode(context, range(4)), expected)


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_call_of_several_passes_has_the_same_scales_in_all_rows(
    model: Model, adapters: list[LoraAdapter], stacked: StackedAdapters, kv_unified: bool
) -> None:
    options = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=8, n_seq_max=2, kv_unified=kv_unified)
    batch = Batch(64)
    batch.add(TOKENS * 3, pos=0, seq=0)
    batch.add(TOKENS, pos=0, seq=1)
    with Context(model, options) as context:
        context.set_adapters([(adapters[1], 0.5)])
        assert context.decode(batch) == llama_abi.OK
        expected = context.logits().array.copy()
    with Context(model, options, stacked) as context:
        context.set_adapter_scales(rows([0, 0.5])[0])
        assert context.decode(batch) == llama_abi.OK
        np.testing.assert_allclose(context.logits().array, expected, atol=1e-3)


def test_what_is_refused_changes_nothing(model: Model, stacked: StackedAdapters, library: llama_abi.Library) -> None:
    with Context(model, OPTIONS, stacked) as context:
        for wrong in (
            rows([1, 0, 0]),
            np.empty((0, 2), np.float32),
            np.zeros((1, 1, 2), np.float32),
            rows([np.nan, 0]),
        ):
            with pytest.raises(LlamaError, match=r"cannot have the shape|must be finite"):
                context.set_adapter_scales(wrong)
        plain = decode(context, [0])
        context.set_adapter_scales(rows([1, 0], [0, 1]))
        with pytest.raises(LlamaError, match="there are scales for 2 rows, and the call has 1"):
            decode(context, [1])
        context.set_adapter_scales(None)
        context.clear()
        np.testing.assert_array_equal(decode(context, [0]), plain)
    with Context(model, OPTIONS) as context:
        context.set_adapter_scales(None)
        with pytest.raises(LlamaError, match="created without adapters"):
            context.set_adapter_scales(rows([1, 0]))
    with Model(library, model.path) as other, pytest.raises(LlamaError, match="another model"):
        Context(other, OPTIONS, stacked)


def test_rows_in_another_order_than_that_of_the_batch_are_noticed(model: Model, stacked: StackedAdapters) -> None:
    """Per-sequence KV splits this call into passes of which the scales know nothing."""
    options = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=4)
    batch = Batch(64)
    batch.add(TOKENS, pos=0, seq=0)
    batch.add(TOKENS[:3], pos=0, seq=1)
    with Context(model, options, stacked) as context:
        context.set_adapter_scales(np.repeat(rows([1, 0], [0, 1]), [8, 3], axis=0))
        with pytest.raises(LlamaError, match="computes 6 rows together, of a call of 11 with 2 outputs"):
            context.decode(batch)
        context.clear()
        context.set_adapter_scales(np.zeros(2, np.float32))
        assert context.decode(batch) == llama_abi.OK


def test_a_graph_without_their_products_is_noticed(
    model: Model, stacked: StackedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another version of llama.cpp had other nodes: wrong logits would be the alternative."""
    monkeypatch.setattr(row_scales_module, "MUL_MAT", -1)
    with Context(model, OPTIONS, stacked) as context:
        context.set_adapter_scales(np.ones(2, np.float32))
        with pytest.raises(LlamaError, match="no product has one of their matrices"):
            decode(context, [0, 1])
