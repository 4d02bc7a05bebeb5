"""The training loop: batches in, weights out."""

from __future__ import annotations

import os
import time

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from uma_trio.training.bpe import Tokenizer
from uma_trio.training.muon import Muon
from uma_trio.training.network import Network
from uma_trio.training.packing import batches, planned
from uma_trio.training.shape import Shape

Weights = dict[str, npt.NDArray[np.float16]]


@attrs.frozen(kw_only=True)
class Recipe:
    """Everything except the corpus that determines the weights."""

    steps: int = 12_000
    tokens_per_step: int = 131_072
    matrix_rate: float = 5e-3
    """Muon's learning rate, for the matrices inside the blocks."""
    other_rate: float = 3e-3
    """AdamW's learning rate, for embedding and norms."""
    warmup: int = 100
    seed: int = 1
    seconds: float | None = None
    """Time limit.  A machine that cannot do all steps in this time does fewer."""

    def rate_at(self, step: int, seconds: float) -> float:
        """Factor of the learning rates after so much work: rises for ``warmup`` steps, then falls linearly to zero.

        It is zero after the last step, or when the time is over, whichever is first.
        """
        done = max(step / self.steps, seconds / self.seconds if self.seconds else 0.0)
        return min(1.0, (step + 1) / self.warmup) * max(0.0, 1 - done)


OF_DRAFT = Recipe(steps=10_000, tokens_per_step=65_536, seconds=190)
"""Recipe of the draft model: smaller batches and less time, since an error of this model costs no quality."""


@attrs.frozen
class Trained:
    weights: Weights
    steps: int
    seconds: float
    final_loss: float
    device: str


def train(tokenizer: Tokenizer, shape: Shape, recipe: Recipe, *, device: str) -> Trained:
    """Train from scratch, in bf16 on a GPU and fp32 on a CPU.  Blocks for minutes to weeks.

    The batches depend only on the recipe, and their number on its time limit.  The weights also depend on the device's arithmetic: two runs on one machine
    agree closely, runs on different machines less so.
    """
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    network = Network(shape)
    network.settle()
    network.to(device)
    if device == "cuda":
        for block in network.blk:
            block.compile(dynamic=False)
    inside = [weight for weight in network.blk.parameters() if weight.ndim == 2]
    others = [weight for name, weight in network.named_parameters() if weight.ndim == 1 or not name.startswith("blk.")]
    muon = Muon(inside)
    adam = torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0)
    workers = max(1, (os.cpu_count() or 2) - 2)
    losses: list[torch.Tensor] = []
    start = time.monotonic()
    for at, batch in enumerate(
        batches(planned(recipe.steps, recipe.tokens_per_step, shape.context), tokenizer, workers)
    ):
        share = recipe.rate_at(at, time.monotonic() - start)
        if share == 0.0:
            break
        ids = torch.from_numpy(batch.ids.astype(np.int32)).to(device)
        learned = torch.from_numpy(batch.learned).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = network(ids[:, :-1]).reshape(-1, shape.n_embd)
            logits = network.logits(hidden[learned])
        targets = ids[:, 1:].reshape(-1)[learned].long()
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / max(1, len(targets))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.param_groups[0]["lr"] = recipe.other_rate * share
        adam.step()
        muon.step(recipe.matrix_rate * share)
        network.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if at % 100 == 99 or at in (0, 9):
            mean = torch.stack(losses[-50:]).mean().item()
            print(f"step {at + 1}  loss {mean:.4f}  {time.monotonic() - start:.0f} s", flush=True)
    last = torch.stack(losses[-50:]).mean().item()
    weights = {name: weight.detach().cpu().numpy().astype(np.float16) for name, weight in network.state_dict().items()}
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return Trained(weights, len(losses), time.monotonic() - start, last, name)
