"""The Llama model in torch, with weights in llama.cpp's layout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from uma_trio.training.shape import Shape


def rotary(shape: Shape, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin ``[length, head_dim / 2]`` for positions 0, 1, ..."""
    half = shape.head_dim // 2
    speeds = shape.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speeds
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each adjacent pair of ``x [batch, heads, length, head_dim]`` by the angle of its position."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled: Tensor = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return scaled.to(x.dtype)


class Block(nn.Module):
    """Attention and feed-forward.  Attributes are named like the GGUF tensors ``blk.N.*``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, narrow = shape.n_embd, shape.n_head_kv * shape.head_dim
        self.shape = shape
        self.attn_norm = Norm(wide, shape.norm_eps)
        self.attn_q = nn.Linear(wide, wide, bias=False)
        self.attn_k = nn.Linear(wide, narrow, bias=False)
        self.attn_v = nn.Linear(wide, narrow, bias=False)
        self.attn_output = nn.Linear(wide, wide, bias=False)
        self.ffn_norm = Norm(wide, shape.norm_eps)
        self.ffn_gate = nn.Linear(wide, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(wide, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, wide, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, wide = x.shape
        head, many, few = self.shape.head_dim, self.shape.n_head, self.shape.n_head_kv
        normed = self.attn_norm(x)
        q = self.attn_q(normed).view(batch, length, many, head).transpose(1, 2)
        k = self.attn_k(normed).view(batch, length, few, head).transpose(1, 2)
        v = self.attn_v(normed).view(batch, length, few, head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(many // few, 1), v.repeat_interleave(many // few, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, length, wide))
        normed = self.ffn_norm(x)
        result: Tensor = x + self.ffn_down(F.silu(self.ffn_gate(normed)) * self.ffn_up(normed))
        return result


class Network(nn.Module):
    """``forward(ids)`` returns hidden states after the last norm; ``logits`` projects them with ``token_embd``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = Norm(shape.n_embd, shape.norm_eps)
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1 / math.sqrt(self.shape.n_embd))

    def settle(self) -> None:
        """Start with every block as the identity: its output projections are zero."""
        for block in self.blk:
            assert isinstance(block, Block)
            nn.init.zeros_(block.attn_output.weight)
            nn.init.zeros_(block.ffn_down.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.token_embd(ids) * 1.0)

    def over(self, x: Tensor) -> Tensor:
        """Hidden states over embeddings ``[batch, length, n_embd]``, which need not be those of tokens."""
        cos, sin = rotary(self.shape, x.shape[1], x.device)
        for block in self.blk:
            x = block(x, cos, sin)
        normed: Tensor = self.output_norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)
