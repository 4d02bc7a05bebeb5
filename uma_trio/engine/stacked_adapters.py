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
        return llama_abi.StackedAdapters(model, out, _write(out, paths))


def _write(out: Path, paths: Sequence[Path]) -> list[llama_abi.StackedPart]:
    readers = [gguf.GGUFReader(path) for path in paths]
    found = [{tensor.name: tensor for tensor in reader.tensors} for reader in readers]
    names = {name: None for tensors in found for name in tensors if name.endswith((".lora_a", ".lora_b"))}
    writer = gguf.GGUFWriter(out, str(readers[0].fields[gguf.Keys.General.ARCHITECTURE].contents()))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
    ranks: list[dict[str, int]] = [{} for _ in paths]
    for name in names:
        weight, _, half = name.rpartition(".")
        axis = -2 if half == "lora_a" and weight != EMBEDDING else -1
        parts: list[Matrix] = []
        for tensors, of_adapter in zip(found, ranks, strict=True):
            if name in tensors:
                parts.append(_matrix(tensors[name]))
                of_adapter[weight] = parts[-1].shape[axis]
        writer.add_tensor(name, np.ascontiguousarray(np.concatenate(parts, axis)))
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
    alphas = [_alpha(reader) for reader in readers]
    return [llama_abi.StackedPart(alpha, of_adapter) for alpha, of_adapter in zip(alphas, ranks, strict=True)]


def _matrix(tensor: gguf.ReaderTensor) -> Matrix:
    """As it is if it is float16, and as float32 otherwise."""
    if tensor.tensor_type is gguf.GGMLQuantizationType.F16:
        return np.asarray(tensor.data, np.float16)
    return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)


def _alpha(reader: gguf.GGUFReader) -> float:
    field = reader.fields.get(gguf.Keys.Adapter.LORA_ALPHA)
    return 0.0 if field is None else float(field.contents())
