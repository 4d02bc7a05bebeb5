"""How large the parts of a model are, from the header of its file."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from uma_trio import config
from uma_trio.models.gguf_header import GgufHeader

RECURRENT_PARTS: Final = ("ssm_", "shortconv.", "time_mix_")
"""Beginnings of the names of tensors that only recurrent layers have."""
STATE_VALUE_BYTES: Final = 4
"""Recurrent states are F32."""
REPACKED: Final = frozenset({"Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"})
"""Types that ggml may rearrange for the CPU.  Then an output that is the token embeddings as well is a copy of them."""

BYTES_PER_VALUE: Final = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Bytes of a value in the KV cache.  ggml's quantized blocks have 32 values and a 16-bit scale."""


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a model file that decide how much memory the model needs."""

    layers: tuple[int, ...]
    """Bytes of weights, by layer."""
    input_bytes: int
    """Bytes of weights that stay on the CPU: token embeddings."""
    output_bytes: int
    """Bytes of weights of the output, which llama.cpp counts as a layer of its own."""
    output_cpu_bytes: int
    """The same on the CPU, where the token embeddings may serve as the output without a copy."""
    keys: tuple[int, ...]
    """Values of the K cache per token, by layer; 0 for a layer without attention."""
    values: tuple[int, ...]
    """Values of the V cache per token, by layer."""
    head_widths: tuple[int, ...] = ()
    """Widths of the heads of K and V, which a quantized KV cache divides into blocks."""
    states: tuple[int, ...] = ()
    """Bytes of the recurrent state of a sequence, by layer; empty without recurrent layers."""
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_head: int
    widest: int
    """The most values that a layer computes for a token at once."""
    tensors: dict[str, int] = {}
    """Bytes of each tensor, by name."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on a CPU."""
        return self.input_bytes + sum(self.layers) + self.output_cpu_bytes

    @property
    def n_layers(self) -> int:
        """Layers, with the output as a layer of its own, as llama.cpp counts."""
        return len(self.layers) + 1

    def kv_bytes_per_token(self, settings: config.Model) -> float:
        """Over all layers, in the types of ``settings``."""
        return float(sum(self._kv_bytes(settings, layer) for layer in range(len(self.layers))))

    def _kv_bytes(self, settings: config.Model, layer: int) -> float:
        of_k, of_v = BYTES_PER_VALUE[settings.type_k], BYTES_PER_VALUE[settings.type_v]
        return self.keys[layer] * of_k + self.values[layer] * of_v

    def cache_bytes(self, settings: config.Model, layer: int, n_cells: int) -> int:
        """KV cache and recurrent states of one layer."""
        state = self.states[layer] * settings.parallel if self.states else 0
        return math.ceil(self._kv_bytes(settings, layer) * n_cells) + state


def sizes_of(header: GgufHeader, *, generates: bool = True) -> ModelSizes:
    """The sizes of a model.

    Args:
        header: that has passed ``check_values``, with the tensors of all parts.
        generates: otherwise the model has no output and keeps no KV cache.
    """
    facts = _Facts(header)
    n_layers = facts.one("block_count")
    layers, input_bytes, output_bytes = [0] * n_layers, 0, 0
    parts: list[set[str]] = [set() for _ in range(n_layers)]
    widest, embeddings, is_tied, is_repacked = 1, 0, True, False
    n_used = max(facts.many("expert_used_count"), default=1) or 1
    for tensor in header.tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if tensor.name.startswith("blk.") and block.isdecimal() and int(block) < n_layers:
            layers[int(block)] += tensor.n_bytes
            parts[int(block)].add(rest)
            if len(tensor.shape) > 1:
                widest = max(widest, tensor.shape[1] * (n_used if len(tensor.shape) > 2 else 1))
        elif tensor.name.startswith("output"):
            output_bytes += tensor.n_bytes
            is_tied &= tensor.name != "output.weight"
        else:
            input_bytes += tensor.n_bytes
            if tensor.name == "token_embd.weight":
                embeddings, is_repacked = tensor.n_bytes, tensor.type in REPACKED
    recurrent = [any(part.startswith(RECURRENT_PARTS) for part in of_layer) for of_layer in parts]
    attends = [
        not is_recurrent or "attn_k.weight" in of_layer for is_recurrent, of_layer in zip(recurrent, parts, strict=True)
    ]
    keys, values, widths = facts.kv_values(n_layers)
    state = facts.state_values() * STATE_VALUE_BYTES
    tied = embeddings if is_tied and generates else 0
    if not generates:
        keys, values = [0] * n_layers, [0] * n_layers
    return ModelSizes(
        layers=tuple(layers),
        input_bytes=input_bytes,
        output_bytes=output_bytes + tied,
        output_cpu_bytes=output_bytes + (tied if is_repacked else 0),
        keys=tuple(n if has else 0 for n, has in zip(keys, attends, strict=True)),
        values=tuple(n if has else 0 for n, has in zip(values, attends, strict=True)),
        head_widths=widths,
        states=tuple(state if is_recurrent else 0 for is_recurrent in recurrent) if any(recurrent) else (),
        n_ctx_train=facts.one("context_length"),
        n_vocab=header.count("tokenizer.ggml.tokens") or facts.one("vocab_size"),
        n_embd=facts.one("embedding_length"),
        n_head=max(facts.many("attention.head_count"), default=1),
        widest=widest,
        tensors={tensor.name: tensor.n_bytes for tensor in header.tensors},
    )


class _Facts:
    """Numbers of the model's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._architecture = header.text("general.architecture")

    def one(self, name: str) -> int:
        """A whole number; 0 where the file has none."""
        value = self._header.values.get(f"{self._architecture}.{name}")
        return max(0, value) if isinstance(value, int) else 0

    def many(self, name: str) -> list[int]:
        """One whole number, or one for each layer; empty where the file has none."""
        numbers = self._header.numbers(f"{self._architecture}.{name}")
        return [max(0, value) for value in numbers if isinstance(value, int)]

    def by_layer(self, name: str, n_layers: int, default: int) -> list[int]:
        """A number for each layer."""
        numbers = self.many(name) or [default]
        return [numbers[min(layer, len(numbers) - 1)] for layer in range(n_layers)]

    def kv_values(self, n_layers: int) -> tuple[list[int], list[int], tuple[int, ...]]:
        """Values of keys and of values per token, by layer; and the widths of heads."""
        heads = self.by_layer("attention.head_count", n_layers, 1)
        kv_heads = self.by_layer("attention.head_count_kv", n_layers, heads[0] if heads else 1)
        width = self.one("embedding_length") // max(1, max(heads, default=1))
        windowed = self.many("attention.sliding_window_pattern")
        by_kind: list[list[int]] = []
        widths: set[int] = set()
        for kind in ("key", "value"):
            usual = self.one(f"attention.{kind}_length") or width
            with_window = self.one(f"attention.{kind}_length_swa") or usual
            of_layers = [
                with_window if len(windowed) > layer and windowed[layer] else usual for layer in range(n_layers)
            ]
            widths |= {of for of, n in zip(of_layers, kv_heads, strict=True) if n}
            by_kind.append([n * of for n, of in zip(kv_heads, of_layers, strict=True)])
        keys, values = by_kind
        if self.one("attention.key_length_mla"):  # the cache holds one latent vector, of which the values are a part
            values = [0] * n_layers
        return keys, values, tuple(sorted(widths))

    def state_values(self) -> int:
        """Values of the recurrent state of a sequence in one layer.

        Source: llama-hparams.cpp, ``n_embd_r`` and ``n_embd_s``.
        """
        width = self.one("embedding_length")
        if head := self.one("wkv.head_size"):
            return width * (head + (self.one("token_shift_count") or 2))
        if convolution := self.one("shortconv.l_cache"):
            return width * (convolution - 1)
        inner, state = self.one("ssm.inner_size"), self.one("ssm.state_size")
        if head := self.one("kda.head_dim"):
            heads = max(self.many("attention.head_count"), default=1)
            return heads * head * (head + 3 * max(1, self.one("ssm.conv_kernel") - 1))
        before = max(0, self.one("ssm.conv_kernel") - 1)
        return before * (inner + 2 * self.one("ssm.group_count") * state) + state * inner
