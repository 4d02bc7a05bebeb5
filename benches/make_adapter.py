"""Write a LoRA adapter with random matrices for a GGUF model, and the model with the adapter merged into its weights.

    python benches/make_adapter.py --model model.gguf --rank 8 --out /tmp/one.gguf

The same arguments write the same file.  With --merged, a model is written whose matrices are F32 and include the adapter:
its answers are those of the model with the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import gguf
import numpy as np
import numpy.typing as npt
from gguf_file import Reader, Writer, copy_fields, write_to_end

TARGETS: Final = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Matrices of each layer that an adapter changes."""


def make_adapter(
    out: Path, model: Path, *, rank: int = 8, alpha: float = 16.0, strength: float = 0.3, seed: int = 0,
    targets: Sequence[str] = TARGETS, dtype: str = "f32",
) -> None:  # fmt: skip
    """Write an adapter of ``model``.

    Args:
        strength: size of the change, as a share of the size of each matrix; it changes the text from about 0.1 on.
        targets: names of matrices without layer and suffix.
        dtype: ``f32`` or ``f16``.
    """
    reader = Reader(model)
    writer = Writer(out, _architecture(reader))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    tensors = [tensor for tensor in reader.tensors if _is_target(tensor.name, targets)]
    for number, tensor in enumerate(tensors):
        a, b = _pair(tensor, rank, alpha, strength, seed, number)
        for half, matrix in (("lora_a", a), ("lora_b", b)):
            writer.add_tensor(f"{tensor.name}.{half}", matrix.astype(np.float16 if dtype == "f16" else np.float32))
    if not tensors:
        raise ValueError(f"{model} has none of {', '.join(targets)}")
    write_to_end(writer)


def merge_adapters(out: Path, model: Path, adapters: Sequence[tuple[Path, float]]) -> None:
    """Write ``model`` with each of ``adapters`` merged into its weights, times its scale.  Its matrices are F32."""
    reader = Reader(model)
    writer = Writer(out, _architecture(reader))
    copy_fields(reader, writer)
    changes: dict[str, npt.NDArray[np.float32]] = {}
    for path, scale in adapters:
        other = Reader(path)
        alpha = float(other.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
        matrices = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in other.tensors}
        for name in {name.rpartition(".")[0] for name in matrices}:
            a, b = matrices[f"{name}.lora_a"], matrices[f"{name}.lora_b"]
            change = (scale * alpha / len(a)) * (b.astype(np.float64) @ a.astype(np.float64))
            changes[name] = changes.get(name, np.float32(0)) + change.astype(np.float32)
    for tensor in reader.tensors:
        matrix = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, matrix + changes[tensor.name] if tensor.name in changes else matrix)
    write_to_end(writer)


def _architecture(reader: gguf.GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return name.startswith("blk.") and name.split(".", 2)[2] in {f"{target}.weight" for target in targets}


def _pair(
    tensor: gguf.ReaderTensor, rank: int, alpha: float, strength: float, seed: int, number: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The matrices ``[rank, columns]`` and ``[rows, rank]``."""
    noise = np.random.default_rng([seed, number])
    columns, rows = (int(n) for n in tensor.shape)
    size = float(np.std(gguf.dequantize(tensor.data[: min(rows, 64)], tensor.tensor_type)))
    a = noise.standard_normal((rank, columns)).astype(np.float32)
    b = noise.standard_normal((rows, rank)).astype(np.float32)
    return a, b * np.float32(strength * size * np.sqrt(rank) / alpha)  # B A has the deviation sqrt(rank)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--rank", type=click.IntRange(1, 4096), default=8, show_default=True)
@click.option("--strength", type=click.FloatRange(0), default=0.3, show_default=True, help="Size of the change.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option("--merged", type=click.Path(path_type=Path), help="Also write the model with the adapter merged into it.")
def main(model: Path, rank: int, strength: float, seed: int, out: Path, merged: Path | None) -> None:
    make_adapter(out, model, rank=rank, strength=strength, seed=seed)
    if merged is not None:
        merge_adapters(merged, model, [(out, 1.0)])


if __name__ == "__main__":
    main()
