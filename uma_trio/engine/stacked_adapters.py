"""Stack LoRA adapters of one model into one adapter, of which each row of a call uses its own part.

Source: llama_abi.StackedAdapters; llama-adapter.cpp, ``llama_adapter_lora_init_impl``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

import llama_abi
from uma_trio.engine.messages import EngineError

EMBEDDING: Final = "token_embd.weight"
"""Its matrix A has a row for each token, and not one for each rank."""

ONE_BLOCK_RANKS: Final = 32
"""A stacked rank that is a multiple of this gets ``MORE_RANKS`` of zeros.  CUDA would compute the whole product with A in a
block for each 32 ranks: with a 7B model and rank 32 a tick of 16 rows took 6 ms longer on an H200."""
MORE_RANKS: Final = 8

Matrix: TypeAlias = npt.NDArray[np.float16] | npt.NDArray[np.float32]


def stack_adapters(model: llama_abi.Model, paths: Sequence[Path]) -> llama_abi.StackedAdapters:
    """Load adapters as one.  Blocks while it reads them and writes a temporary file of their size.

    Args:
        paths: checked GGUF files.

    Raises:
        EngineError: there is no room for the temporary file.
        OSError: an adapter cannot be read.
        llama_abi.LlamaError: llama.cpp cannot load them.
    """
    with tempfile.TemporaryDirectory(prefix="uma-trio-") as folder:
        out = Path(folder, "adapters.gguf")
        return llama_abi.StackedAdapters(model, out, write_stacked(out, paths))


def write_stacked(out: Path, paths: Sequence[Path]) -> list[llama_abi.StackedPart]:
    """Write the adapters of ``paths`` as one into ``out``; returns what its parts are."""
    readers = [gguf.GGUFReader(path) for path in paths]
    alphas = [_alpha(reader) for reader in readers]
    found = [{tensor.name: tensor for tensor in reader.tensors} for reader in readers]
    names = {name: None for tensors in found for name in tensors if name.endswith((".lora_a", ".lora_b"))}
    writer = gguf.GGUFWriter(out, str(readers[0].fields[gguf.Keys.General.ARCHITECTURE].contents()))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    parts = [llama_abi.StackedPart({}, {}) for _ in paths]
    for name in names:
        weight, _, half = name.rpartition(".")
        axis = -2 if half == "lora_a" and weight != EMBEDDING else -1
        matrices: list[Matrix] = []
        for tensors, part, alpha in zip(found, parts, alphas, strict=True):
            if name in tensors:
                matrices.append(_matrix(tensors[name]))
                rank = part.ranks[weight] = matrices[-1].shape[axis]
                part.factors[weight] = alpha / rank if alpha else 1.0
                last = part
        if sum([matrix.shape[axis] for matrix in matrices]) % ONE_BLOCK_RANKS == 0:
            shape = [*matrices[-1].shape]
            shape[axis] = MORE_RANKS
            matrices.append(np.zeros(shape, matrices[-1].dtype))
            last.ranks[weight] += MORE_RANKS
        writer.add_tensor(name, np.ascontiguousarray(np.concatenate(matrices, axis)))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise EngineError(
            f"cannot write the adapters to {out}: {error.strerror}; make room there, or set TMPDIR"
        ) from error
    finally:
        writer.close()
    return parts


def _matrix(tensor: gguf.ReaderTensor) -> Matrix:
    """As it is if it is float16, and as float32 otherwise."""
    if tensor.tensor_type is gguf.GGMLQuantizationType.F16:
        return np.asarray(tensor.data, np.float16)
    return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)


def _alpha(reader: gguf.GGUFReader) -> float:
    field = reader.fields.get(gguf.Keys.Adapter.LORA_ALPHA)
    return 0.0 if field is None else float(field.contents())
