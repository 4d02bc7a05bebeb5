"""Architectures of random models: their sizes, their tensors, and the metadata that describes them in a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import attrs
import gguf
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
VOCABULARIES = ROOT / "build/llama.cpp/models"
DEFAULT_VOCABULARY = VOCABULARIES / "ggml-vocab-llama-spm.gguf"
ENCODER_VOCABULARY = VOCABULARIES / "ggml-vocab-bert-bge.gguf"
"""WordPiece, for the shapes of encoders."""

QUANTS = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_k": (gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_S),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}

VECTORS = gguf.GGMLQuantizationType.F32
"""Type of vectors, and of matrices that are narrower than a block."""

BLOCK = 32
"""Weights that share a scale in Q8_0 and Q4_0."""

LOGIT_DEVIATION = 3.0
SHARP_ATTENTION = 1.5
"""Factor for queries and keys.  With sharper attention, the text depends on more than the last token."""

WINDOW = 64
"""Tokens in the window of a layer with sliding-window attention."""
CONVOLUTION = 3
"""Tokens in the kernel of a layer with a short convolution; all but the last are its state."""
EXPERTS_USED = 2
"""Experts that every token uses."""
DELTA_HEADS = 2
"""Heads of a layer with a gated delta net; they share one head of queries and keys."""
DELTA_KERNEL = 4
"""Tokens in the kernel of the convolution before such a layer."""
DECAY = -0.5
"""How quickly the state of such a layer fades."""

BIAS_DEVIATION = 0.1

LABELS = ("yes", "no")
"""What the head of a decoder that ranks decides; the score is the probability of the first one."""


@attrs.frozen
class Shape:
    """Sizes of a model, and its architecture in llama.cpp's words."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    architecture: str = "llama"
    """``llama``; ``gemma3``, in which every second layer has a sliding window; ``lfm2``, in which every second layer is a
    recurrent convolution; ``qwen35``, in which it is a gated delta net, and whose pictures have positions in two dimensions.
    The last three cannot truncate sequences.  ``qwen3``; ``qwen2vl``, with such pictures; ``bert``: an encoder."""
    pooling: str | None = None
    """A name of ``gguf.PoolingType`` for the metadata, in lower case.  With ``rank`` it has a classification head."""
    experts: int = 0
    """Feed-forward networks of each layer, of which every token uses ``EXPERTS_USED``; 0: one, which every token uses."""

    def __attrs_post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.kv_heads, self.ffn) < 1:
            raise ValueError("every part of a shape must be at least 1")
        if self.width % BLOCK or self.ffn % BLOCK:
            raise ValueError(f"the width and the feed-forward width must be multiples of {BLOCK}")
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError("the width must be an even multiple of the number of heads")
        if self.heads % self.kv_heads:
            raise ValueError("the number of heads must be a multiple of the number of KV heads")
        if self.experts and (self.architecture != "llama" or self.experts < EXPERTS_USED):
            raise ValueError(f"experts are for llama, and at least {EXPERTS_USED}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def vocabulary(self) -> Path:
        """A GGUF file with a vocabulary that suits the architecture."""
        return ENCODER_VOCABULARY if self.architecture == "bert" else DEFAULT_VOCABULARY

    def is_plain(self, layer: int) -> bool:
        """Whether the layer has attention over the whole context."""
        return self.architecture in ("llama", "qwen3", "qwen2vl") or layer % 2 == 1


SHAPES = {
    "125m": Shape(layers=12, width=768, heads=12, kv_heads=4, ffn=2048),
    "1b": Shape(layers=16, width=2048, heads=32, kv_heads=8, ffn=8192),
    "7b": Shape(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336),
    "125m-hybrid": Shape(layers=12, width=768, heads=12, kv_heads=4, ffn=2048, architecture="lfm2"),
    "tiny-swa": Shape(layers=4, width=64, heads=2, kv_heads=1, ffn=192, architecture="gemma3"),
    "tiny-hybrid": Shape(layers=4, width=64, heads=2, kv_heads=1, ffn=192, architecture="lfm2"),
    "tiny-hybrid-mrope": Shape(layers=4, width=64, heads=2, kv_heads=1, ffn=192, architecture="qwen35"),
    "tiny-mrope": Shape(layers=4, width=64, heads=2, kv_heads=1, ffn=192, architecture="qwen2vl"),
    "tiny-qwen3-rank": Shape(layers=2, width=64, heads=2, kv_heads=1, ffn=192, architecture="qwen3", pooling="rank"),
    **{
        f"{size}-bert-{pooling}": attrs.evolve(shape, architecture="bert", pooling=pooling)
        for size, shape in (("tiny", Shape(2, 64, 2, 2, 128)), ("33m", Shape(12, 384, 12, 12, 1536)))
        for pooling in ("mean", "cls", "rank")
    },
    "1b-moe": Shape(layers=16, width=1024, heads=16, kv_heads=4, ffn=1024, experts=16),
    "tiny-moe": Shape(layers=4, width=64, heads=2, kv_heads=1, ffn=192, experts=4),
}


def parse_shape(text: str) -> Shape:
    """Parse a name of ``SHAPES``, or LAYERSxWIDTH[xHEADS[xKVHEADS[xFFN]]].

    Defaults: heads of width 64, as many KV heads as heads, and a feed-forward width of 8/3 of the width.

    Raises:
        ValueError: the text is neither, or the shape is impossible.
    """
    if text.lower() in SHAPES:
        return SHAPES[text.lower()]
    try:
        numbers = [int(part) for part in text.lower().split("x")]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 5:
        raise ValueError(f"{text!r} is not one of {', '.join(SHAPES)}, and not of the form 12x768 or 12x768x12x4x2048")
    layers, width, *rest = numbers
    heads = rest[0] if rest else max(1, width // 64)
    kv_heads = rest[1] if len(rest) > 1 else heads
    ffn = rest[2] if len(rest) > 2 else -(-width * 8 // 3 // 64) * 64
    return Shape(layers, width, heads, kv_heads, ffn)


@attrs.frozen
class Tensor:
    """A tensor of the file.  ``deviation`` is the standard deviation of its weights; ``None``: all are ``value``."""

    name: str
    rows: int
    columns: int
    deviation: float | None
    silent_rows: npt.NDArray[np.intp] = attrs.field(factory=lambda: np.empty(0, np.intp))
    """Rows of zeros."""
    is_float: bool = False
    """F32, whatever the model's quantization."""
    value: float = 1.0
    experts: int = 1
    """Matrices one after the other, each of ``rows / experts`` rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As GGUF has it, the columns last."""
        if self.experts > 1:
            return self.experts, self.rows // self.experts, self.columns
        return (self.columns,) if self.rows == 1 else (self.rows, self.columns)

    def ggml_type(self, quant: str) -> gguf.GGMLQuantizationType:
        """Its type in the file.  Rows that are not whole blocks of Q4_K have Q8_0."""
        if self.deviation is None or self.is_float or self.columns % BLOCK:
            return VECTORS
        quantized = QUANTS[quant][0]
        return quantized if self.columns % gguf.GGML_QUANT_SIZES[quantized][0] == 0 else gguf.GGMLQuantizationType.Q8_0


def tensors(shape: Shape, n_vocab: int, silent: npt.NDArray[np.intp], ctx: int) -> Iterator[Tensor]:
    """Yield all tensors in the order of the file.

    A matrix with the deviation 1/sqrt(columns) keeps the size of the vectors that it multiplies.

    Args:
        silent: tokens that get the logit 0, which is far below the largest one.
        ctx: tokens of the training context.
    """
    if shape.architecture == "bert":
        yield from encoder_tensors(shape, n_vocab, ctx)
        return
    width, ffn = shape.width, shape.ffn
    from_width, from_ffn = 1 / math.sqrt(width), 1 / math.sqrt(ffn)
    gemma = shape.architecture == "gemma3"
    # Gemma multiplies embeddings by the root of its width
    yield Tensor("token_embd.weight", n_vocab, width, from_width if gemma else 1.0)
    for layer in range(shape.layers):
        yield Tensor(f"blk.{layer}.attn_norm.weight", 1, width, None)
        if shape.architecture == "lfm2" and not shape.is_plain(layer):
            yield from convolution(layer, width)
        elif shape.architecture == "qwen35" and not shape.is_plain(layer):
            yield from delta_net(layer, shape)
        else:
            yield from attention(layer, shape)
        if gemma or shape.architecture == "qwen35":
            yield Tensor(f"blk.{layer}.post_attention_norm.weight", 1, width, None)
        if shape.architecture != "qwen35":
            yield Tensor(f"blk.{layer}.ffn_norm.weight", 1, width, None)
        n, of = (shape.experts, "_exps") if shape.experts else (1, "")
        if shape.experts:
            yield Tensor(f"blk.{layer}.ffn_gate_inp.weight", n, width, from_width)
        yield Tensor(f"blk.{layer}.ffn_gate{of}.weight", n * ffn, width, from_width, experts=n)
        yield Tensor(f"blk.{layer}.ffn_up{of}.weight", n * ffn, width, from_width, experts=n)
        yield Tensor(f"blk.{layer}.ffn_down{of}.weight", n * width, ffn, from_ffn, experts=n)
        if gemma:
            yield Tensor(f"blk.{layer}.post_ffw_norm.weight", 1, width, None)
    norm = "token_embd_norm" if shape.architecture == "lfm2" else "output_norm"
    yield Tensor(f"{norm}.weight", 1, width, None)
    yield Tensor("output.weight", n_vocab, width, from_width * LOGIT_DEVIATION, silent)
    if shape.pooling == "rank":
        yield Tensor("cls.output.weight", len(LABELS), width, from_width * LOGIT_DEVIATION, is_float=True)


def encoder_tensors(shape: Shape, n_vocab: int, ctx: int) -> Iterator[Tensor]:
    """Yield the tensors of a BERT: norms after attention and feed-forward, biases everywhere, absolute positions."""
    width, ffn = shape.width, shape.ffn
    from_width, from_ffn = 1 / math.sqrt(width), 1 / math.sqrt(ffn)
    yield Tensor("token_embd.weight", n_vocab, width, 1.0)
    yield Tensor("token_types.weight", 2, width, BIAS_DEVIATION, is_float=True)
    yield Tensor("position_embd.weight", ctx, width, 0.5, is_float=True)
    yield from norm("token_embd_norm", width)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        for name, deviation in (("q", SHARP_ATTENTION), ("k", SHARP_ATTENTION), ("v", 1.0), ("output", 1.0)):
            yield from linear(f"{block}.attn_{name}", width, width, deviation * from_width)
        yield from norm(f"{block}.attn_output_norm", width)
        yield from linear(f"{block}.ffn_up", ffn, width, from_width)
        yield from linear(f"{block}.ffn_down", width, ffn, from_ffn)
        yield from norm(f"{block}.layer_output_norm", width)
    if shape.pooling == "rank":
        yield from linear("cls", width, width, from_width)
        yield from linear("cls.output", 1, width, LOGIT_DEVIATION * from_width)


def linear(name: str, rows: int, columns: int, deviation: float) -> Iterator[Tensor]:
    """Yield a matrix and its bias."""
    yield Tensor(f"{name}.weight", rows, columns, deviation, is_float=rows == 1)
    yield Tensor(f"{name}.bias", 1, rows, BIAS_DEVIATION, is_float=True)


def norm(name: str, width: int) -> Iterator[Tensor]:
    """Yield the weight and the bias of a LayerNorm."""
    yield Tensor(f"{name}.weight", 1, width, None)
    yield Tensor(f"{name}.bias", 1, width, BIAS_DEVIATION, is_float=True)


def attention(layer: int, shape: Shape) -> Iterator[Tensor]:
    """Yield the tensors of attention in one layer."""
    width, kv = shape.width, shape.kv_heads * shape.head_width
    deviation = 1 / math.sqrt(width)
    gates = width if shape.architecture == "qwen35" else 0  # after the queries of each head
    yield Tensor(f"blk.{layer}.attn_q.weight", width + gates, width, deviation * SHARP_ATTENTION)
    yield Tensor(f"blk.{layer}.attn_k.weight", kv, width, deviation * SHARP_ATTENTION)
    yield Tensor(f"blk.{layer}.attn_v.weight", kv, width, deviation)
    yield Tensor(f"blk.{layer}.attn_output.weight", width, width, deviation)
    if shape.architecture == "qwen2vl":
        for name, rows in (("q", width), ("k", kv), ("v", kv)):
            yield Tensor(f"blk.{layer}.attn_{name}.bias", 1, rows, BIAS_DEVIATION, is_float=True)
    elif shape.architecture != "llama":
        yield Tensor(f"blk.{layer}.attn_q_norm.weight", 1, shape.head_width, None)
        yield Tensor(f"blk.{layer}.attn_k_norm.weight", 1, shape.head_width, None)


def convolution(layer: int, width: int) -> Iterator[Tensor]:
    """Yield the tensors of a convolution over the last tokens, between two gates, in one layer."""
    deviation = 1 / math.sqrt(width)
    yield Tensor(f"blk.{layer}.shortconv.in_proj.weight", 3 * width, width, deviation)
    yield Tensor(f"blk.{layer}.shortconv.conv.weight", width, CONVOLUTION, 1 / math.sqrt(CONVOLUTION))
    yield Tensor(f"blk.{layer}.shortconv.out_proj.weight", width, width, deviation)


def delta_net(layer: int, shape: Shape) -> Iterator[Tensor]:
    """Yield the tensors of a gated delta net in one layer, a linear attention with a recurrent state."""
    width, head, block = shape.width, shape.head_width, f"blk.{layer}"
    inner, deviation = DELTA_HEADS * head, 1 / math.sqrt(width)
    mixed = 2 * head + inner
    yield Tensor(f"{block}.attn_qkv.weight", mixed, width, deviation)
    yield Tensor(f"{block}.attn_gate.weight", inner, width, deviation)
    yield Tensor(f"{block}.ssm_conv1d.weight", mixed, DELTA_KERNEL, 1 / math.sqrt(DELTA_KERNEL))
    yield Tensor(f"{block}.ssm_dt.bias", 1, DELTA_HEADS, BIAS_DEVIATION, is_float=True)
    yield Tensor(f"{block}.ssm_a", 1, DELTA_HEADS, None, value=DECAY)
    for name in ("beta", "alpha"):
        yield Tensor(f"{block}.ssm_{name}.weight", DELTA_HEADS, width, deviation)
    yield Tensor(f"{block}.ssm_norm.weight", 1, head, None)
    yield Tensor(f"{block}.ssm_out.weight", width, inner, 1 / math.sqrt(inner))


def describe(writer: gguf.GGUFWriter, shape: Shape, quant: str, n_vocab: int, ctx: int) -> None:
    """Add the metadata of the architecture.

    Args:
        quant: a key of ``QUANTS``.
        ctx: tokens of the training context.
    """
    writer.add_file_type(QUANTS[quant][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(ctx)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.pooling is not None:
        writer.add_pooling_type(gguf.PoolingType[shape.pooling.upper()])
        if shape.architecture != "bert" and shape.pooling == "rank":
            writer.add_classifier_output_labels(LABELS)
    if shape.architecture == "bert":
        writer.add_causal_attention(False)
        writer.add_layer_norm_eps(1e-12)
        return
    if shape.architecture == "lfm2":
        writer.add_head_count_kv([shape.kv_heads * shape.is_plain(layer) for layer in range(shape.layers)])
        writer.add_shortconv_l_cache(CONVOLUTION)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(EXPERTS_USED)
    if shape.architecture == "gemma3":
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern([not shape.is_plain(layer) for layer in range(shape.layers)])
    if shape.architecture == "qwen35":
        writer.add_full_attention_interval(2)
        writer.add_ssm_conv_kernel(DELTA_KERNEL)
        writer.add_ssm_inner_size(DELTA_HEADS * shape.head_width)
        writer.add_ssm_state_size(shape.head_width)
        writer.add_ssm_time_step_rank(DELTA_HEADS)
        writer.add_ssm_group_count(1)
    writer.add_rope_dimension_count(shape.head_width)
    if shape.architecture in ("qwen2vl", "qwen35"):  # time, height and width, in pairs of dimensions
        quarter = shape.head_width // 8
        writer.add_rope_dimension_sections([shape.head_width // 2 - 2 * quarter, quarter, quarter, 0])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
