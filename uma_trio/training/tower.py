"""The projector of the embedded model in torch: a small CLIP and two matrices, as llama.cpp computes LLaVA's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from uma_trio.training.shape import TowerShape

EPS = 1e-5


class _Block(nn.Module):
    """Attention and feed-forward.  Attributes are named like the GGUF tensors ``v.blk.N.*``."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        width = shape.width
        self.n_head = shape.n_head
        self.ln1, self.ln2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attn_q, self.attn_k = nn.Linear(width, width), nn.Linear(width, width)
        self.attn_v, self.attn_out = nn.Linear(width, width), nn.Linear(width, width)
        self.ffn_up, self.ffn_down = nn.Linear(width, shape.n_ff), nn.Linear(shape.n_ff, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln1(x)
        q, k, v = (project(normed).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for project in (self.attn_q, self.attn_k, self.attn_v))  # fmt: skip
        x = x + self.attn_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.ffn_down(F.gelu(self.ffn_up(self.ln2(x)), approximate="tanh"))
        return result


class _Encoder(nn.Module):
    """Attributes are named like the GGUF tensors ``v.*``."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.patch_embd = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch, bias=False)
        self.position_embd = nn.Embedding(shape.n_rows, shape.width)
        self.blk = nn.ModuleList(_Block(shape) for _ in range(shape.n_layer))
        self.post_ln = nn.LayerNorm(shape.width, EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embd(pixels).flatten(2).transpose(1, 2) + self.position_embd.weight
        for block in self.blk:
            x = block(x)
        result: Tensor = self.post_ln(x)
        return result


class Tower(nn.Module):
    """``forward`` makes rows for a model of width ``n_embd`` from pixels between -1 and 1, ``[n, 3, side, side]``."""

    def __init__(self, shape: TowerShape, n_embd: int) -> None:
        super().__init__()
        self.v = _Encoder(shape)
        self.mm = nn.Sequential(nn.Linear(shape.width, n_embd), nn.GELU("tanh"), nn.Linear(n_embd, n_embd))
        nn.init.normal_(self.v.position_embd.weight, std=0.2)
        nn.init.normal_(self.mm[2].weight, std=1 / math.sqrt(n_embd) / math.sqrt(n_embd))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[n, n_rows, n_embd]``, and what they are made of, ``[n, n_rows, width]``."""
        seen = self.v(pixels)
        return self.mm(seen), seen


class Labels(nn.Module):
    """Says number, colour and shape from what the encoder has found: only training needs it."""

    def __init__(self, shape: TowerShape, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(shape.width, size) for size in sizes)

    def loss(self, seen: Tensor, labels: Tensor) -> Tensor:
        """Mean over pictures.  ``labels`` are ``[n, heads]``; -100 is none."""
        pooled = seen.mean(1)
        return sum(
            (F.cross_entropy(head(pooled), labels[:, n]) for n, head in enumerate(self.heads)),
            torch.zeros((), device=seen.device),
        )
