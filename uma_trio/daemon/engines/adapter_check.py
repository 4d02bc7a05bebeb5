"""LoRA adapters of a model: which of them are safe to hand to llama.cpp.

llama.cpp compares some shapes when it loads an adapter, and others only when it computes, with assertions that abort the
process.  So everything is compared with the model's own tensors here.

Source: llama-adapter.cpp, ``llama_adapter_lora_init_impl``; llama-graph.cpp, ``build_lora_mm`` and ``build_inp_embd``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from uma_trio import config
from uma_trio.engine_link.load_errors import ModelError
from uma_trio.engine_link.messages import AdapterFile
from uma_trio.models.fingerprint import file_fingerprint
from uma_trio.models.gguf_header import AGAIN, GgufError, GgufHeader, Tensor, parts_of, read_header

WRONG_MODEL: Final = "give an adapter that was trained for this model"
CONVERT: Final = "convert the adapter again, with llama.cpp's convert_lora_to_gguf.py"

GIVE_A_FILE: Final = "give --adapter NAME=FILE the path of a .gguf file"

MAX_RANK: Final = 4096
MATRIX_TYPES: Final = ("F32", "F16", "BF16", "Q8_0")
"""What convert_lora_to_gguf.py writes."""

EMBEDDING: Final = "token_embd.weight"
IGNORED: Final = "_norm.weight"
"""Ends the names of tensors that llama.cpp leaves out."""
ALPHA: Final = "adapter.lora.alpha"
INVOCATION: Final = "adapter.alora.invocation_tokens"


def check_adapters(settings: Sequence[config.Adapter], model: Path) -> tuple[AdapterFile, ...]:
    """Check the files of ``settings`` against the GGUF file of their model, which was checked before.

    Blocks while it reads the adapters.

    Raises:
        ModelError: a file cannot be read, is not an adapter, is damaged, or does not fit the model.
    """
    if not settings:
        return ()
    header = read_header(model)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for part in parts_of(model, header.n_parts)[1:]:
        tensors |= {tensor.name: tensor for tensor in read_header(part).tensors}
    architecture, files = header.text("general.architecture"), []
    for adapter in settings:
        path = Path(adapter.path).expanduser()
        try:
            rank = check_adapter(read_header(path), architecture, tensors)
            size, fingerprint = path.stat().st_size, file_fingerprint(path)
        except GgufError as error:
            raise ModelError(f"cannot load the adapter {adapter.name}, {path}: {error.reason}", error.remedy) from None
        except OSError as error:
            raise ModelError(f"cannot read the adapter {adapter.name}, {path}: {error.strerror}", GIVE_A_FILE) from None
        files.append(
            AdapterFile(
                name=adapter.name, path=path, scale=adapter.scale, fingerprint=fingerprint, size_bytes=size, rank=rank
            )
        )
    return tuple(files)


def check_adapter(header: GgufHeader, architecture: str, model: Mapping[str, Tensor]) -> int:
    """Check the header of an adapter; returns its rank.

    Args:
        model: the model's tensors by name.

    Raises:
        GgufError: it is no LoRA adapter, or does not fit the model.
    """
    _check_metadata(header, architecture)
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in header.tensors:
        name, _, half = tensor.name.rpartition(".")
        if half in ("lora_a", "lora_b") and ".lora_" not in name:
            halves.setdefault(name, {})[half] = tensor
        elif not tensor.name.endswith(IGNORED):
            raise GgufError(f"its tensor {tensor.name} is neither a .lora_a nor a .lora_b", CONVERT)
    if not halves:
        raise GgufError("it has no matrices", CONVERT)
    return max([_check_pair(name, pair, model) for name, pair in halves.items()])


def _check_metadata(header: GgufHeader, architecture: str) -> None:
    if header.n_parts != 1:
        raise GgufError("it is a part of a split file, which an adapter cannot be", CONVERT)
    kind = header.text("general.type")
    if kind != "adapter":
        raise GgufError(f"it is {f'a {kind!r:.40}' if kind else 'a model'}, and not an adapter", "give a LoRA adapter")
    if header.text("adapter.type") != "lora":
        raise GgufError(
            f"it is an adapter of the type {header.text('adapter.type')!r:.40}, and not lora", "give a LoRA adapter"
        )
    own = header.text("general.architecture")
    if own != architecture:
        raise GgufError(f"it is for the architecture {own!r:.40}, and the model has {architecture!r:.40}", WRONG_MODEL)
    alpha = header.values.get(ALPHA, 0.0)
    if header.has(ALPHA) and not (header.is_float32(ALPHA) and isinstance(alpha, float) and math.isfinite(alpha)):
        raise GgufError(f"its {ALPHA} is not a finite 32-bit number", CONVERT)
    if header.has(INVOCATION):
        raise GgufError("it is an activated LoRA (aLoRA), which is not supported", "give a plain LoRA adapter")


def _check_pair(name: str, pair: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> int:
    """Check the two matrices that change the model's tensor ``name``; returns their rank."""
    for half in ("lora_a", "lora_b"):
        if half not in pair:
            raise GgufError(f"it has no {name}.{half}", AGAIN)
        if pair[half].type not in MATRIX_TYPES:
            raise GgufError(
                f"the tensor {pair[half].name} has the type {pair[half].type}, not {', '.join(MATRIX_TYPES)}", CONVERT
            )
    weight = model.get(name)
    if weight is None:
        raise GgufError(f"it changes {name}, which the model does not have", WRONG_MODEL)
    if len(weight.shape) < 2 or weight.type == "NVFP4":  # the latter has scales of its own
        raise GgufError(f"it changes {name}, to which llama.cpp cannot apply an adapter", WRONG_MODEL)
    a, b = pair["lora_a"].shape, pair["lora_b"].shape
    if name == EMBEDDING:
        if "output.weight" not in model:  # the same tensor computes the logits, with the matrices the other way round
            raise GgufError(
                f"it changes {name}, which is also the model's output, so llama.cpp cannot apply it",
                "train an adapter that leaves the embeddings as they are",
            )
        rank, fits = a[0], a == (b[0], weight.shape[1]) and b == (a[0], weight.shape[0])
    else:
        rank = b[0]
        fits = a == (weight.shape[0], rank, *weight.shape[2:]) and b == (rank, *weight.shape[1:])
    if not fits:
        raise GgufError(
            f"its matrices {_shape(a)} and {_shape(b)} do not fit the model's {name}, which is {_shape(weight.shape)}",
            WRONG_MODEL,
        )
    if rank > MAX_RANK:
        raise GgufError(f"its matrices for {name} have the rank {rank}, more than {MAX_RANK}", CONVERT)
    return rank


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
