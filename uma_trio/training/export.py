"""Write weights and tokenizer to a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from uma_trio.training.bpe import Pair, Tokenizer
from uma_trio.training.chat import BOS, END, EOS, PAD, TEMPLATE
from uma_trio.training.shape import Shape, TowerShape

DESCRIPTION = (
    "A demo and test model of about seven million parameters, trained on text that a script made. "
    "It answers simple questions, counts, spells, adds, fills JSON records, calls tools and finds facts in long documents."
)

NAME = "uma-trio embedded"
NAME_OF_DRAFT = "uma-trio embedded, draft model"
NAME_OF_PROJECTOR = "uma-trio embedded, projector"


def write_gguf(
    path: Path,
    weights: Mapping[str, npt.NDArray[np.float32]],
    tokenizer: Tokenizer,
    shape: Shape,
    name: str = NAME,
) -> None:
    """Write Q8_0 matrices and F32 norms.

    There is no output matrix: without ``output``, llama.cpp uses ``token_embd``.

    Args:
        weights: by tensor name in the GGUF.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_tags(["demo", "test"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    _add_tokenizer(writer, tokenizer, shape.n_vocab)
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight.astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_merges(path: Path) -> list[Pair]:
    """The merges of the tokenizer in the file at ``path``."""
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.merges"]
    pairs = [bytes(field.parts[at]).decode().split(" ") for at in field.data]
    return [(one, other) for one, other in pairs]


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, size: int) -> None:
    tokens = tokenizer.tokens
    spare = [f"<|spare_{at}|>" for at in range(len(tokens), size)]
    kinds = [gguf.TokenType.CONTROL] * len(tokenizer.controls)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    kinds += [gguf.TokenType.UNUSED] * len(spare)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *spare])
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{one} {other}" for one, other in tokenizer.merges])
    writer.add_bos_token_id(tokenizer.control(BOS))
    writer.add_eos_token_id(tokenizer.control(EOS))
    writer.add_eot_token_id(tokenizer.control(END))
    writer.add_pad_token_id(tokenizer.control(PAD))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def write_projector(path: Path, weights: Mapping[str, npt.NDArray[np.float32]], shape: TowerShape, n_embd: int) -> None:
    """Write a projector of LLaVA's type: Q8_0 matrices, F16 patches, F32 for the rest.

    All layers are computed: llama.cpp leaves out the last one of LLaVA's, unless the file names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(NAME_OF_PROJECTOR)
    writer.add_license("MIT")
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": shape.side,
        "patch_size": shape.patch,
        "embedding_length": shape.width,
        "feed_forward_length": shape.n_ff,
        "projection_dim": n_embd,
        "attention.head_count": shape.n_head,
        "block_count": shape.n_layer,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_array("clip.vision.feature_layer", [shape.n_layer])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    for name, weight in weights.items():
        if name == "v.patch_embd.weight":
            writer.add_tensor(name, weight.astype(np.float16))
        elif weight.ndim == 2 and name != "v.position_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
