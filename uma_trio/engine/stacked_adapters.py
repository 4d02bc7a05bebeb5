"""Stack the LoRA adapters of a model into one adapter, so that each row of a call can use another part of it.

llama.cpp applies the same adapters to all rows of a call; ``llama_abi.row_scales`` says how rows get different ones.

Source: llama_abi.StackedAdapters; llama-adapter.cpp, ``llama_adapter_lora_init_impl``.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio.engine_link.messages import EngineError

EMBEDDING: Final = "token_embd.weight"
"""Its matrix A has one row for each token of the vocabulary.  Those of other weights have one row for each rank."""

CPU_RANK_MULTIPLE: Final = 16
"""On a CPU ranks of zeros make the total rank a multiple of this, which its float32 kernels need to be fast: a tick of 16 rows
of the embedded model took 16 ms with a rank of 40, and 10 ms with 32."""
GPU_RANK_MULTIPLE: Final = 8
"""The same on a GPU.  More ranks cost more there: with four adapters of rank 8, a tick of a 7B model on an H200 took 1.56 times
a plain one with 40 ranks, and 1.63 times with 48."""
GPU_SLOW_RANK_MULTIPLE: Final = 32
"""On a GPU the total rank is no multiple of this.  Otherwise CUDA would divide the product with A into a few large blocks, one
for each 32 ranks: on an H200 with a 7B model and rank 32, a tick of 16 rows took 6 ms longer."""

FLOAT16_BITS: Final = 16
"""Powers of two in front of the point of the largest float16 number."""

Matrix: TypeAlias = npt.NDArray[np.float16] | npt.NDArray[np.float32]


def stack_adapters(model: llama_abi.Model, paths: Sequence[Path], *, on_gpu: bool = False) -> llama_abi.StackedAdapters:
    """Load adapters as one.  Blocks while it reads them, and writes and loads a temporary file of about their size.

    Args:
        paths: checked GGUF files, at least one.  The place of a path is the number of its adapter.
        on_gpu: layers of the model are on a GPU.

    Raises:
        EngineError: there is no room for the temporary file.
        OSError: an adapter cannot be read.
        llama_abi.LlamaError: llama.cpp cannot load them.
    """
    with tempfile.TemporaryDirectory(prefix="uma-trio-") as folder:
        out = Path(folder, "adapters.gguf")
        return llama_abi.StackedAdapters(model, out, write_stacked(out, paths, on_gpu=on_gpu))


def write_stacked(out: Path, paths: Sequence[Path], *, on_gpu: bool = False) -> list[llama_abi.StackedPart]:
    """Write the adapters of ``paths`` into the file ``out``; returns the part of each adapter.  Blocks.

    Raises:
        EngineError, OSError: see ``stack_adapters``.
    """
    readers = [gguf.GGUFReader(path) for path in paths]
    alphas = [_alpha(reader) for reader in readers]
    tensors_by_adapter = [{tensor.name: tensor for tensor in reader.tensors} for reader in readers]
    names = {name: None for tensors in tensors_by_adapter for name in tensors if name.endswith((".lora_a", ".lora_b"))}
    writer = gguf.GGUFWriter(out, str(readers[0].fields[gguf.Keys.General.ARCHITECTURE].contents()))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    parts = [llama_abi.StackedPart({}, {}) for _ in paths]
    for name in names:
        weight, _, half = name.rpartition(".")
        axis = -2 if half == "lora_a" and weight != EMBEDDING else -1
        matrices: list[Matrix] = []
        for tensors, part, alpha in zip(tensors_by_adapter, parts, alphas, strict=True):
            if name in tensors:
                matrix = _matrix(tensors[name])
                rank = part.n_ranks[weight] = matrix.shape[axis]
                if half == "lora_b":
                    matrix, part.factors[weight] = _with_less_factor(matrix, alpha / rank if alpha else 1.0)
                matrices.append(matrix)
                last = part
        padding = _padding(sum([matrix.shape[axis] for matrix in matrices]), on_gpu=on_gpu)
        shape = [*matrices[-1].shape]
        shape[axis] = padding
        matrices.append(np.zeros(shape, matrices[-1].dtype))
        last.n_ranks[weight] += padding
        writer.add_tensor(name, np.ascontiguousarray(np.concatenate(matrices, axis)))
    try:
        with contextlib.closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    except OSError as error:  # of numpy it has no strerror
        raise EngineError(
            f"cannot write the adapters to {out}: {error.strerror or error}; make room there, or set TMPDIR"
        ) from error
    return parts


def _with_less_factor(b: Matrix, factor: float) -> tuple[Matrix, float]:
    """A matrix B and the factor of what it multiplies, where possible with a factor below 2.

    llama.cpp rounds what it multiplies with a float16 matrix to float16.  After the scale that could be infinite.
    """
    room = FLOAT16_BITS - math.frexp(float(np.abs(b).max()))[1]
    shift = min(math.frexp(factor)[1] - 1, room)
    if shift <= 0 or b.dtype != np.float16:
        return b, factor
    return np.ldexp(b, shift), math.ldexp(factor, -shift)


def _padding(rank: int, *, on_gpu: bool) -> int:
    """How many ranks of zeros to add to this total rank."""
    if not on_gpu:
        return -rank % CPU_RANK_MULTIPLE
    padding = -rank % GPU_RANK_MULTIPLE
    return padding + GPU_RANK_MULTIPLE if (rank + padding) % GPU_SLOW_RANK_MULTIPLE == 0 else padding


def _matrix(tensor: gguf.ReaderTensor) -> Matrix:
    """The matrix in float16 if it is stored so, and otherwise in float32."""
    if tensor.tensor_type is gguf.GGMLQuantizationType.F16:
        return np.asarray(tensor.data, np.float16)
    return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)


def _alpha(reader: gguf.GGUFReader) -> float:
    """``alpha`` of an adapter; 0 if it has none."""
    field = reader.fields.get(gguf.Keys.Adapter.LORA_ALPHA)
    return 0.0 if field is None else float(field.contents())
