"""LoRA adapters with random matrices, and models with the adapters merged; each is made once in a test run."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import numpy as np

from tests.support.bench_scripts import bench_script
from tests.support.run import locked, run_folder
from uma_trio import config
from uma_trio.daemon.engines.adapter_check import check_adapters
from uma_trio.engine_link.messages import AdapterFile


@functools.cache
def random_adapter(model: Path, seed: int = 0, rank: int = 4, strength: float = 0.3) -> Path:
    """An adapter of ``model`` that changes its text; of a trained model with a ``strength`` of about 1."""
    made = run_folder() / f"{model.stem}-lora-{seed}-{rank}-{strength:g}.gguf"
    with locked(made.name):
        if not made.exists():
            part = made.with_suffix(".part")
            bench_script("make_adapter").make_adapter(part, model, rank=rank, seed=seed, strength=strength)
            part.replace(made)
    return made


def two_adapters(model: Path) -> tuple[AdapterFile, ...]:
    """Two adapters of ``model``, checked."""
    paths = [random_adapter(model, seed) for seed in (0, 1)]
    return check_adapters([config.Adapter(name=path.stem, path=str(path)) for path in paths], model)


def adapter_of_all_matrices(
    made: Path,
    model: gguf.GGUFReader,
    *,
    rank: int,
    alpha: float | None,
    dtype: gguf.GGMLQuantizationType,
    seed: int = 0,
) -> Path:
    """Write an adapter that changes all matrices of ``model``, with its experts, its embeddings and its output."""
    writer = gguf.GGUFWriter(made, str(model.fields["general.architecture"].contents()))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    noise = np.random.default_rng(seed)
    for tensor in model.tensors:
        *experts, rows, columns = (int(n) for n in reversed(tensor.shape.tolist())) if len(tensor.shape) > 1 else (0, 0)
        shapes = {"lora_a": (*experts, rank, columns), "lora_b": (*experts, rows, rank)}
        if tensor.name == "token_embd.weight":
            shapes = {"lora_a": (rows, rank), "lora_b": (columns, rank)}
        for half, shape in shapes.items() if rows else ():
            matrix = noise.standard_normal(shape, np.float32) * np.float32(0.3 if half == "lora_a" else 0.1)
            raw = gguf.quantize(matrix, dtype)
            writer.add_tensor(f"{tensor.name}.{half}", raw, raw_dtype=dtype)
    bench_script("gguf_file").write_to_end(writer)
    return made


@functools.cache
def merged_model(model: Path, adapters: tuple[tuple[Path, float], ...]) -> Path:
    """``model`` with adapters in its weights, each with its scale; its matrices are F32."""
    name = "-".join(f"{path.stem}x{scale:g}" for path, scale in adapters)
    made = run_folder() / f"{model.stem}-merged-{name}.gguf"
    with locked(made.name):
        if not made.exists():
            part = made.with_suffix(".part")
            bench_script("make_adapter").merge_adapters(part, model, adapters)
            part.replace(made)
    return made
