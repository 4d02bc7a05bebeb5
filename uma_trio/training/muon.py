"""Muon: momentum with orthogonalized updates, for the matrices inside the blocks.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), for the iteration and
its coefficients; Liu et al., "Muon is Scalable for LLM Training" (2025), for the factor that scales an update to the
size of AdamW's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Move the singular values of each matrix towards one (Newton-Schulz).  Shape ``[n, rows, columns]``."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """The optimizer.  Updates all matrices of one shape together."""

    def __init__(self, matrices: Iterable[Tensor], *, momentum: float = 0.95, decay: float = 0.1) -> None:
        self._momentum, self._decay = momentum, decay
        groups: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self._groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in groups.items()
        ]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrices, velocity in self._groups:
            gradient = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            velocity.lerp_(gradient, 1 - self._momentum)
            update = orthogonal(gradient.lerp(velocity, self._momentum)).to(velocity.dtype)
            size = 0.2 * max(velocity.shape[-2:]) ** 0.5
            torch._foreach_mul_(matrices, 1 - rate * self._decay)
            torch._foreach_add_(matrices, list(update.unbind()), alpha=-rate * size)
