"""Decides whether a GGUF file is safe to hand to llama.cpp.

llama.cpp parses the file in C inside the process, and checks many values with assertions, which abort the process. Two
steps keep such files away from it: ``gguf_header`` verifies the structure, and the rules in this module verify the
values. ``tests/fuzz/mutate_gguf.py`` found most of the rules; run it again after an update of llama.cpp.

Each rule names the place in llama.cpp that it protects.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from uma_trio.models.charsmap import check_charsmap
from uma_trio.models.gguf_header import AGAIN, GgufError, GgufHeader, parts_of, read_header
from uma_trio.models.purpose import ENCODERS, HEADS, POOLING, Purpose, purpose_of
from uma_trio.models.sizes import ModelSizes, sizes_of

__all__ = ["GgufError", "GgufSummary", "check_gguf", "check_gguf_parts"]

MAX_LAYERS = 512
"""``LLAMA_MAX_LAYERS``"""
MAX_CONTEXT = 1 << 30
"""Tokens that a model was trained with; positions have 32 bits."""
MAX_EXPERTS = 1024
"""``LLAMA_MAX_EXPERTS``"""
MAX_WINDOW = 1 << 23
"""Tokens of a sliding window: llama.cpp multiplies the window by up to 256 sequences in 32 bits."""

TOKENIZER_MODELS = frozenset(
    {"llama", "bert", "gpt2", "t5", "plamo2", "gemma4", "hybriddna", "whitespace", "none", "no_vocab"}
)
"""Values of ``tokenizer.ggml.model`` that can be served."""
DEFAULT_SPECIAL_TOKENS: dict[str, dict[str, int | None]] = {
    "llama": {"bos": 1, "eos": 2},
    "bert": {"bos": 101, "eos": None, "seperator": 102},
    "gpt2": {"bos": 11, "eos": 11},
    "hybriddna": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "t5": {"bos": None, "eos": 1},
    "plamo2": {"bos": 1, "eos": 2},
    "gemma4": {"bos": None, "eos": None},
}
"""Ids that llama.cpp uses where the file has none, or one outside the vocabulary."""
ROPE_SCALING = frozenset({"none", "linear", "yarn", "longrope"})
BYTE_TOKEN = 6
"""``LLAMA_TOKEN_TYPE_BYTE``"""

NO_ROPE = frozenset({
    "arwkv7", "bloom", "clip", "glm5-next", "gpt2", "gptj", "jais", "jamba", "jina-bert-v2", "kimi-k3", "kimi-linear",
    "mamba", "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "refact", "rwkv6", "rwkv6qwen2", "rwkv7",
    "wavtokenizer-dec",
})  # fmt: skip
"""Architectures without RoPE (``llama_model_rope_type``), which may claim 0 rotated dimensions."""
FULL_ROPE = frozenset({
    "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "cohere2moe", "dbrx", "deci",
    "deepseek", "dots1", "dream", "ernie4_5", "ernie4_5-moe", "exaone", "exaone-moe", "exaone4", "falcon", "granite",
    "granite_swa", "graniteswitch", "grok", "grovemoe", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v3",
    "internlm2", "jais2", "llada", "llada-moe", "llama", "llama4", "maincoder", "mellum", "mistral3", "olmo", "olmo2",
    "olmoe", "orion", "paddleocr", "pangu-embedded", "plamo", "pockettts", "qwen2", "qwen2moe", "qwen2vl", "qwen3",
    "qwen3moe", "qwen3vl", "qwen3vlmoe", "rnd1", "seed_oss", "smallthinker", "smollm3", "starcoder2", "talkie",
    "xverse",
})  # fmt: skip
"""Architectures whose graph asserts ``n_embd_head == n_rot``."""
SECTIONED_ROPE = frozenset(
    {"qwen2vl", "paddleocr", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp", "qwen3tts"}
)
"""Architectures that rotate sections of a head with positions of their own (M-RoPE)."""
WITH_ENCODER = frozenset({"t5", "t5encoder"})
DRAFT_HEADS = frozenset({"eagle3", "dflash"})
"""Together with ``WITH_ENCODER``: architectures of ``llama_model_has_encoder``.  These draft from the states of a model."""
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Architectures that generate all tokens of an answer at once, and have no KV cache."""
ENCODER_KEYS = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
"""Numbers that the graph of every encoder uses."""
NEED_EXPERTS = frozenset({"bailingmoe2", "grovemoe", "llada-moe", "smallthinker"})
"""Architectures that assert that they have experts; others report an error."""

NOT_MULTIPLIED = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
"""Tensor types without a matrix product in ggml's CPU backend."""
INDEX_TABLES = ("tid2eid", "d2t", "masked_embd", "token_ordering")
"""Parts of the names of tensors that hold integers."""
FLOAT_ONLY = (
    "norm.weight",
    "shortconv.conv.weight",
    *(f"ssm_conv1d{suffix}.weight" for suffix in ("", "_q", "_k", "_v")),
    "token_types.weight",
)
"""Ends of the names of matrices that ggml's kernels take as F32 alone."""


@attrs.frozen(kw_only=True)
class GgufSummary:
    """The facts of a header that are of use before the model is loaded."""

    architecture: str = ""
    """``""`` where the file has none."""
    n_tensors: int = 0
    n_parameters: int = 0
    size_bytes: int = 0
    """Size of all files."""
    context_length: int | None = None
    """Tokens of context that the model was trained with."""
    n_vocab: int | None = None
    """Items of ``tokenizer.ggml.tokens``."""
    has_template: bool = False
    """There is a chat template."""
    purpose: Purpose = "generate"
    """What the model is for."""
    sizes: ModelSizes | None = None
    """How much memory the model needs; ``None`` for a vocabulary."""


def check_gguf(path: str | os.PathLike[str], *, vocab_only: bool = False) -> GgufSummary:
    """Check the header of a GGUF file, and refuse files that would end the process.

    If the file is the first part of a model, the other parts are checked as well.
    Blocks for about 1 ms for each thousand tokens of the vocabulary.

    Args:
        path: a regular file.
        vocab_only: check only what loading the vocabulary uses, and accept a file without tensors.

    Raises:
        GgufError: the file is not a GGUF, is damaged, or cannot be served.
        OSError: the file cannot be opened or read.
    """
    path = Path(path)
    with _about(path):
        header = read_header(path, vocab_only=vocab_only)
        others = parts_of(path, header.n_parts)[1:]
    return _check([path, *others], header, vocab_only=vocab_only)


def check_gguf_parts(paths: Sequence[Path]) -> None:
    """As ``check_gguf``, for files that do not have the names of parts yet.

    A LoRA adapter passes if its header is sound: its matrices are checked when its model is known.

    Args:
        paths: all parts in order; one for a model in one file.
    """
    with _about(paths[0]):
        header = read_header(paths[0])
        if header.n_parts != len(paths):
            raise GgufError(f"it is one of {header.n_parts} parts, and there are {len(paths)}", AGAIN)
    if header.text("general.type") != "adapter" or len(paths) > 1:
        _check(paths, header, vocab_only=False)


def _check(paths: Sequence[Path], header: GgufHeader, *, vocab_only: bool) -> GgufSummary:
    size = header.size_bytes
    if len(paths) > 1 and not vocab_only:
        for number, path in enumerate(paths):
            with _about(path):
                part = read_header(path) if number else header
                size += part.size_bytes if number else 0
                if part.values.get("split.no") != number:  # llama-model-loader.cpp, ``llama_model_loader``
                    raise GgufError(f"it is not part {number + 1} of {len(paths)}", AGAIN)
                header.tensors += part.tensors if number else []
    with _about(paths[0]):
        if header.text("general.type") == "adapter":
            raise GgufError(
                "it is an adapter, and not a model", "give its model, and the adapter as --adapter NAME=FILE"
            )
        if not header.tensors and not vocab_only:
            raise GgufError("none of its parts has tensors", AGAIN)
        check_values(header, vocab_only=vocab_only)
    architecture = header.text("general.architecture")
    context = header.values.get(f"{architecture}.context_length")
    purpose = _purpose(header)
    return GgufSummary(
        architecture=architecture,
        n_tensors=len(header.tensors),
        n_parameters=sum([math.prod(tensor.shape) for tensor in header.tensors]),
        size_bytes=size,
        context_length=context if isinstance(context, int) else None,
        n_vocab=header.count("tokenizer.ggml.tokens"),
        has_template="tokenizer.chat_template" in header.values,
        purpose=purpose,
        sizes=None if vocab_only else sizes_of(header, generates=purpose == "generate"),
    )


@contextlib.contextmanager
def _about(path: Path) -> Iterator[None]:
    """Put the path in front of what is wrong with the file."""
    try:
        yield
    except GgufError as error:
        raise GgufError(f"{path}: {error.reason}", error.remedy) from None


def check_values(header: GgufHeader, *, vocab_only: bool) -> None:
    """Apply every rule to a well-formed header.

    Raises:
        GgufError: a value would end the process.
    """
    for rule in VOCABULARY_RULES if vocab_only else (*VOCABULARY_RULES, *MODEL_RULES):
        rule(header)


# -- the vocabulary -----------------------------------------------------------------------------


def _check_tokenizer_model(header: GgufHeader) -> None:
    """llama-vocab.cpp, ``load``: ``rwkv`` and ``test`` have no safe way from text to tokens and back."""
    model = header.text("tokenizer.ggml.model")
    if model and model not in TOKENIZER_MODELS:
        raise GgufError(
            f"its tokenizer is {model!r:.40}, which cannot be served",
            "use a model with one of these tokenizers: " + ", ".join(sorted(TOKENIZER_MODELS - {"none", "no_vocab"})),
        )


def _check_tokens(header: GgufHeader) -> None:
    """llama-vocab.cpp, ``load``: ``GGML_ASSERT(id_to_token.size() == token_to_id.size())``."""
    if header.count("tokenizer.ggml.tokens") == 0:
        raise GgufError("its vocabulary has no tokens")
    seen: set[bytes] = set()
    for index, token in enumerate(_spellings(header)):
        if token in seen:
            raise GgufError(f"its vocabulary has the token {token!r:.60} twice, the second time as {index}")
        seen.add(token)


def _spellings(header: GgufHeader) -> Iterable[bytes]:
    """The tokens as llama.cpp stores them: cut at a NUL, and empty ones with a name."""
    for index, token in enumerate(header.strings("tokenizer.ggml.tokens")):
        yield token.partition(b"\0")[0] or b"[EMPTY_%d]" % index


def _check_byte_tokens(header: GgufHeader) -> None:
    """llama-vocab.cpp, ``byte_to_token`` and ``token_to_byte``.

    A SentencePiece vocabulary must spell every byte, because a text that needs a missing one ends the process.
    """
    model = header.text("tokenizer.ggml.model")
    if model == "llama":
        tokens = set(_spellings(header))
        missing = [byte for byte in range(256) if b"<0x%02X>" % byte not in tokens and bytes([byte]) not in tokens]
        if tokens and missing:
            raise GgufError(
                f"its vocabulary cannot spell {len(missing)} of the 256 bytes, the first one 0x{missing[0]:02X}, so it "
                "is not one for the tokenizer 'llama'"
            )
    if model == "bert" and BYTE_TOKEN in header.numbers("tokenizer.ggml.token_type"):
        raise GgufError("its vocabulary has byte tokens, which the tokenizer 'bert' does not know")


def _check_special_tokens(header: GgufHeader) -> None:
    """llama-vocab.cpp, ``tokenize``: ``GGML_ASSERT(special_bos_id != LLAMA_TOKEN_NULL)`` and its like."""
    model = header.text("tokenizer.ggml.model")
    if model not in DEFAULT_SPECIAL_TOKENS:
        return
    adds = {name: header.values.get(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")}
    needed = {
        "bos": model in ("bert", "gemma4") or adds["bos"] is True or (model == "llama" and adds["bos"] is None),
        "eos": adds["eos"] is True or (model == "t5" and adds["eos"] is None),
        "seperator": model == "bert",  # as the key is spelled
    }
    n_tokens = header.count("tokenizer.ggml.tokens") or 0
    for name, default in DEFAULT_SPECIAL_TOKENS[model].items():
        token = header.values.get(f"tokenizer.ggml.{name}_token_id")
        usable = any(isinstance(number, int) and 0 <= number < n_tokens for number in (token, default))
        if needed[name] and n_tokens and not usable:
            raise GgufError(f"its tokenizer adds the token {name}, and its vocabulary has none")


def _check_normalisation(header: GgufHeader) -> None:
    """llama-vocab.cpp, ``normalize_prefix``: an index outside of the table is an exception that nobody catches."""
    if header.text("tokenizer.ggml.model") == "t5":
        check_charsmap(header.octets("tokenizer.ggml.precompiled_charsmap"))


# -- hyperparameters ----------------------------------------------------------------------------


def _check_context(header: GgufHeader) -> None:
    n_tokens = _integer(header, "context_length")
    if n_tokens is not None and not 1 <= n_tokens <= MAX_CONTEXT:
        raise GgufError(f"it claims a context of {n_tokens} tokens, not 1 to {MAX_CONTEXT}")


def _check_layers(header: GgufHeader) -> None:
    """llama-model.cpp, ``load_hparams``: ``n_layer_all`` and ``n_layer_nextn``."""
    n_layers = _integer(header, "block_count")
    if n_layers is None:
        return
    if not 1 <= n_layers <= MAX_LAYERS:
        raise GgufError(f"it claims {n_layers} layers, not 1 to {MAX_LAYERS}")
    n_predicting = _integer(header, "nextn_predict_layers") or 0
    if n_predicting > n_layers:
        raise GgufError(f"it claims {n_predicting} layers for multi-token prediction of {n_layers}")


def _check_experts(header: GgufHeader) -> None:
    """llama-model.cpp, ``load_hparams``: ``n_expert``, ``n_expert_used`` and ``n_expert_groups``."""
    count = _integer(header, "expert_count") or 0
    groups = _integer(header, "expert_group_count") or 0
    groups_used = _integer(header, "expert_group_used_count") or 0
    all_used = _numbers(header, "expert_used_count")
    used = max(all_used, default=0)
    if count <= 1 and header.text("general.architecture") in ("hunyuan-dense", "hunyuan_vl"):
        used = count = 0  # these have the keys without having experts
    consistent = (
        (count > 0 or header.text("general.architecture") not in NEED_EXPERTS)
        and used <= count <= MAX_EXPERTS
        and min(all_used, default=0) >= 0
        and bool(used) == bool(count)
        and (groups < count or groups == count == 0)
        and (groups <= 1 or (count % groups == 0 and 0 < groups_used < groups))
    )
    if not consistent:
        raise GgufError(
            f"it claims {count} experts in {groups} groups, of which {used} experts in {groups_used} groups are used"
        )


def _check_layers_with_experts(header: GgufHeader) -> None:
    """A layer that has experts and uses none of them crashes the kernel of ``GGML_OP_MUL_MAT_ID``."""
    names = {tensor.name for tensor in header.tensors}
    for layer, used in enumerate(_numbers(header, "expert_used_count")):
        if not used and f"blk.{layer}.ffn_down_exps.weight" in names:
            raise GgufError(f"its layer {layer} has experts and uses none of them")


def _check_epsilons(header: GgufHeader) -> None:
    """ggml-cpu/ops.cpp: ``GGML_ASSERT(eps >= 0.0f)`` of every norm."""
    for key in header.values:
        if key.endswith(("epsilon", ".eps")):
            for value in header.numbers(key):
                if not 0 <= value < math.inf:
                    raise GgufError(f"{key} is {value}, not a number from 0")


def _check_rope(header: GgufHeader) -> None:
    """llama-model.cpp, ``rope_scaling_type_from_string``; ggml-cpu/ops.cpp, ``ggml_compute_forward_rope``.

    With 0 or a negative number of rotated dimensions the kernel does not return.
    """
    key = f"{header.text('general.architecture')}.rope.scaling.type"
    scaling = header.text(key)
    if key in header.values and scaling not in ROPE_SCALING:
        raise GgufError(f"its RoPE scaling is {scaling!r:.40}, not one of {', '.join(sorted(ROPE_SCALING))}")
    sections = _numbers(header, "rope.dimension_sections")
    if header.text("general.architecture") in SECTIONED_ROPE and not any(section > 0 for section in sections[:3]):
        raise GgufError("its architecture rotates sections of each head, and it claims none")
    heads = next(iter(_numbers(header, "attention.head_count")), 0)
    width = _integer(header, "embedding_length")
    if header.text("general.architecture") in NO_ROPE or not isinstance(heads, int) or heads < 1 or width is None:
        return
    for suffix in ("", "_swa"):
        n_rotated = _integer(header, f"rope.dimension_count{suffix}")
        head = _integer(header, f"attention.key_length{suffix}")
        if head is None:
            head = _integer(header, "attention.key_length")
        head = width // heads if head is None else head
        if n_rotated is not None and not (2 <= n_rotated <= head and n_rotated % 2 == 0):
            raise GgufError(f"it rotates {n_rotated} dimensions of heads of {head}, not an even number of them from 2")
        if not suffix and n_rotated not in (None, head) and header.text("general.architecture") in FULL_ROPE:
            raise GgufError(f"it rotates {n_rotated} dimensions, and its architecture rotates all {head}")


def _check_kv_heads(header: GgufHeader) -> None:
    """llama-kv-cache.cpp, ``cpy_k``: some architectures compare only the first layer with its tensors."""
    heads = _numbers(header, "attention.head_count")
    kv_heads = _numbers(header, "attention.head_count_kv")
    if len(kv_heads) < 2:
        return
    widths = {_integer(header, f"attention.key_length{suffix}") for suffix in ("", "_swa")}
    widths |= {(_integer(header, "embedding_length") or 0) // n for n in heads if isinstance(n, int) and n > 0}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for layer, n in enumerate(kv_heads):
        keys = tensors.get(f"blk.{layer}.attn_k.weight")
        if n and keys is not None and keys.shape[-1] not in {n * width for width in widths if width}:
            raise GgufError(f"its layer {layer} claims {n} KV heads, which does not match {keys.name}")


def _check_window(header: GgufHeader) -> None:
    """llama-kv-cache-iswa.cpp computes the size of the cache in 32 bits; llama-model.cpp, ``is_swa_any()``."""
    window = _integer(header, "attention.sliding_window")
    if window is None:
        return
    if not 0 <= window <= MAX_WINDOW:
        raise GgufError(f"it claims a sliding window of {window} tokens, not 0 to {MAX_WINDOW}")
    key = f"{header.text('general.architecture')}.attention.sliding_window_pattern"
    exempts_all = header.values.get(key) == 1  # a single n exempts every n-th layer
    pattern = header.numbers(key)[: _integer(header, "block_count")]
    if window and (exempts_all or (header.count(key) is not None and not any(pattern))):
        raise GgufError(f"it claims a sliding window of {window} tokens, and no layer that has one")


def _check_architecture(header: GgufHeader) -> None:
    """llama-graph.cpp: a decoder asserts the output of its encoder, which nobody computes here."""
    architecture = header.text("general.architecture")
    if architecture in WITH_ENCODER or (header.text("tokenizer.ggml.model") == "t5" and architecture not in ENCODERS):
        raise GgufError(
            f"it is a model with an encoder like that of T5 ({architecture}), which cannot be served",
            "give a decoder-only model to generate text, or an encoder like BERT to embed or rank texts",
        )
    if architecture in DRAFT_HEADS:
        raise GgufError(
            f"it drafts tokens from the inner states of another model ({architecture}), which llama.h does not give out",
            "as draft_model give a small model with the same vocabulary",
        )
    if architecture in DIFFUSION:
        raise GgufError(
            f"it generates text by diffusion ({architecture}), which cannot be served", "give a decoder-only model"
        )


def _check_pooling(header: GgufHeader) -> None:
    """llama-graph.cpp, ``build_pooling``: ``GGML_ABORT("unknown pooling type")``."""
    for name in ("pooling_type", "classifier.pooling_type"):
        pooling = _integer(header, name)
        if pooling is not None and pooling not in POOLING:
            known = ", ".join(f"{number} ({kind})" for number, kind in POOLING.items())
            raise GgufError(f"its {name} is {pooling}, not one of {known}")


def _check_encoder(header: GgufHeader) -> None:
    """llama-graph.cpp and ggml-cpu/ops.cpp assert the sizes of what an encoder computes."""
    architecture = header.text("general.architecture")
    if architecture not in ENCODERS:
        return
    for name in ENCODER_KEYS:
        for value in _numbers(header, name) or (None,):
            if not isinstance(value, int) or value < 1:
                said = "has no" if value is None else f"claims {value} for"
                raise GgufError(f"it {said} {architecture}.{name}, and an encoder needs a number from 1 there")
    width = _integer(header, "embedding_length") or 0
    if any(isinstance(heads, int) and width % heads for heads in _numbers(header, "attention.head_count")):
        raise GgufError(f"its width of {width} cannot be divided among its attention heads")
    for name in ("embedding_length_out", "dense_3_feat_out"):
        if _integer(header, name) not in (None, 0, width):
            raise GgufError(
                f"its {architecture}.{name} is {_integer(header, name)}, and its embeddings have {width} numbers"
            )
    widths = {_integer(header, f"attention.{kind}_length") for kind in ("key", "value")}
    if len(widths) > 1:
        raise GgufError(f"its heads have keys and values of different widths, which an {architecture} does not have")
    pooling = POOLING.get(_integer(header, "pooling_type") or 0)
    if pooling == "rank" and not _has_head(header):
        raise GgufError(
            f"it ranks texts ({architecture}.pooling_type), and has no classification head ({' or '.join(HEADS)})",
            "convert the model again as a sequence classifier, with llama.cpp's convert_hf_to_gguf.py",
        )


def _has_head(header: GgufHeader) -> bool:
    return any(tensor.name in HEADS for tensor in header.tensors)


def _purpose(header: GgufHeader) -> Purpose:
    return purpose_of(
        header.text("general.architecture"),
        _integer(header, "pooling_type"),
        is_causal=header.values.get(f"{header.text('general.architecture')}.attention.causal") is not False,
        has_head=_has_head(header),
    )


# -- tensors ------------------------------------------------------------------------------------


def _check_tensor_types(header: GgufHeader) -> None:
    """ggml-cpu: ``binary_op`` takes vectors as F32 alone, and some types have no matrix product."""
    for tensor in header.tensors:
        if any(part in tensor.name for part in INDEX_TABLES):
            continue
        matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight") and not tensor.name.endswith(FLOAT_ONLY)
        if tensor.type in NOT_MULTIPLIED if matrix else tensor.type != "F32":
            expected = "a type for matrices" if matrix else "F32"
            raise GgufError(f"the tensor {tensor.name} has the type {tensor.type}, not {expected}")


def _integer(header: GgufHeader, name: str) -> int | None:
    """A whole number of the model's architecture; ``None`` where the file has none."""
    value = header.values.get(f"{header.text('general.architecture')}.{name}")
    return value if isinstance(value, int) else None


def _numbers(header: GgufHeader, name: str) -> tuple[int | float, ...]:
    """One number, or one for each layer; empty where the file has none."""
    return header.numbers(f"{header.text('general.architecture')}.{name}")


Rule = Callable[[GgufHeader], None]

VOCABULARY_RULES: tuple[Rule, ...] = (
    _check_tokenizer_model,
    _check_tokens,
    _check_byte_tokens,
    _check_special_tokens,
    _check_normalisation,
)
MODEL_RULES: tuple[Rule, ...] = (
    _check_architecture,
    _check_pooling,
    _check_encoder,
    _check_context,
    _check_layers,
    _check_experts,
    _check_layers_with_experts,
    _check_epsilons,
    _check_rope,
    _check_kv_heads,
    _check_window,
    _check_tensor_types,
)
