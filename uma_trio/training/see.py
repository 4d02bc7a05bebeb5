"""``python -m uma_trio.training.see``: train a projector with which the embedded model sees, and write its GGUF."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

import gguf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from uma_trio.training.bpe import Tokenizer
from uma_trio.training.chat import BOS, CONTROLS, END, PAD, START
from uma_trio.training.drawings import MOST, PAINTS, SHAPES, Pixels, Scene, draw, some_scene
from uma_trio.training.export import read_merges, write_projector
from uma_trio.training.muon import Muon
from uma_trio.training.network import Network
from uma_trio.training.sample import Turn, in_passing
from uma_trio.training.shape import SHIPPED, TowerShape
from uma_trio.training.skills.shapes import about_picture
from uma_trio.training.tower import Labels, Tower

HELP = """
Train a projector for the embedded model, whose own weights stay as they are: it learns to describe pictures of shapes.

    python -m uma_trio.training.see --out build/mmproj.gguf

Needs torch, and some minutes on a GPU.
"""
EMBEDDED: Final = Path(__file__).parents[1] / "models" / "embedded" / "embedded.gguf"
FIRST_SHARE: Final = 0.8
"""The share of questions that come after their picture.  The others come before it."""
WARMUP: Final = 50
MATRIX_RATE: Final = 0.01
OTHER_RATE: Final = 2e-3


@cache
def held_out() -> frozenset[tuple[int, str, str]]:
    """Combinations that no picture of the training has."""
    every = [(number, colour, shape) for number in range(1, MOST + 1) for colour in PAINTS for shape in SHAPES]
    return frozenset(Random(1).sample(every, 8))


def _drawn(seed: int, n: int, side: int, is_exam: bool) -> tuple[Pixels, list[Scene]]:
    rng = np.random.default_rng(seed)
    scenes: list[Scene] = []
    while len(scenes) < n:
        scene = some_scene(rng)
        if is_exam or (scene.number, scene.colour, scene.shape) not in held_out():
            scenes.append(scene)
    return np.stack([draw(scene, rng, side) for scene in scenes]), scenes


class Pool:
    """Pictures with what is in them.  Processes draw them, which begin before this one uses a GPU."""

    def __init__(self, n: int, seed: int, shape: TowerShape, *, is_exam: bool = False) -> None:
        part = 256
        n_parts = -(-n // part)
        with ProcessPoolExecutor(os.cpu_count()) as workers:
            jobs = [workers.submit(_drawn, 10_000 * seed + i, part, shape.side, is_exam) for i in range(n_parts)]
            parts = [job.result() for job in jobs]
        self.pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts]))
        self.scenes = [scene for _, scenes in parts for scene in scenes]
        labels = [
            (s.number, [*PAINTS].index(s.colour), SHAPES.index(s.shape)) if s.number else (0, -100, -100)
            for s in self.scenes
        ]
        self.labels = torch.tensor(labels)

    def move(self, device: str) -> None:
        self.pixels, self.labels = self.pixels.to(device), self.labels.to(device)

    def batch(self, at: Tensor) -> Tensor:
        return self.pixels[at].permute(0, 3, 1, 2).float() / 127.5 - 1


class Chats:
    """Questions about pictures as tokens."""

    def __init__(self, n_rows: int) -> None:
        self._tokenizer = Tokenizer(CONTROLS, tuple(read_merges(EMBEDDED)))
        self._encode = cache(self._tokenizer.encode)
        self._n_rows = n_rows

    def tokens(self, turn: Turn, *, picture_first: bool) -> tuple[list[int], int, int]:
        """Ids with padding in place of the picture, where that begins, and where the answer begins."""
        control, text = self._tokenizer.control, self._encode
        rows = [control(PAD)] * self._n_rows
        ids = [control(BOS), control(START)]
        ids += text("user\n") if picture_first else text(f"user\n{turn.question}")
        at = len(ids)
        ids += rows + (text(turn.question) if picture_first else [])
        ids += [control(END), *text("\n"), control(START), *text("assistant\n")]
        answer = len(ids)
        return [*ids, *text(turn.answer), control(END)], at, answer

    def batch(self, turns: Sequence[tuple[Turn, bool]], device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids ``[n, length]``, columns of the rows ``[n, n_rows]``, and which ids are to be learned."""
        encoded = [self.tokens(turn, picture_first=first) for turn, first in turns]
        length = max([len(ids) for ids, _, _ in encoded])
        ids = np.full((len(encoded), length), self._tokenizer.control(PAD), np.int64)
        said = np.zeros((len(encoded), length), bool)
        for n, (turn_ids, _, answer) in enumerate(encoded):
            ids[n, : len(turn_ids)] = turn_ids
            said[n, answer : len(turn_ids)] = True
        columns = np.array([at for _, at, _ in encoded])[:, None] + np.arange(self._n_rows)
        on_device = [torch.from_numpy(array).to(device) for array in (ids, columns, said)]
        return on_device[0], on_device[1], on_device[2]


def _model(device: str) -> Network:
    """The embedded model, which does not learn."""
    network = Network(SHIPPED)
    weights = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(EMBEDDED).tensors
    }
    network.load_state_dict(weights)
    network.requires_grad_(False).to(device)
    return network


class Trainer:
    def __init__(self, shape: TowerShape, device: str) -> None:
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        self.shape, self.device = shape, device
        self.model = _model(device)
        self.tower = Tower(shape, SHIPPED.n_embd).to(device)
        self.labels = Labels(shape, (MOST + 1, len(PAINTS), len(SHAPES))).to(device)
        self.chats = Chats(shape.n_rows)
        self.rng = Random(1)

    def learn(self, pool: Pool, steps: int, batch: int, *, speaks: bool, seconds: float) -> None:
        """Train for so many steps, or for a time: to tell number, colour and shape, and if ``speaks`` to make the model
        answer."""
        inside = [
            parameter
            for name, parameter in self.tower.named_parameters()
            if parameter.ndim == 2 and "position" not in name
        ]
        known = {id(parameter) for parameter in inside}
        others = [
            parameter
            for parameter in (*self.tower.parameters(), *self.labels.parameters())
            if id(parameter) not in known
        ]
        if not speaks:
            inside = [
                parameter
                for name, parameter in self.tower.v.named_parameters()
                if parameter.ndim == 2 and "position" not in name
            ]
        muon, adam = (
            Muon(inside, decay=0.0),
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        )
        start, losses = time.monotonic(), []
        for at in range(steps):
            done = max(at / steps, (time.monotonic() - start) / seconds)
            if done >= 1:
                break
            share = min(1.0, (at + 1) / WARMUP) * (1 - done)
            chosen = torch.from_numpy(np.array(self.rng.choices(range(len(pool.scenes)), k=batch))).to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                rows, seen = self.tower(pool.batch(chosen))
                loss = self.labels.loss(seen.float(), pool.labels[chosen])
                if speaks:
                    scenes = [pool.scenes[i] for i in chosen.tolist()]
                    loss = 0.2 * loss + self._said(rows, self._turns(scenes))[0]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
            adam.param_groups[0]["lr"] = OTHER_RATE * share
            adam.step()
            muon.step(MATRIX_RATE * share)
            self.tower.zero_grad(set_to_none=True)
            self.labels.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            if at % 100 == 99 or at in (0, 9, 29):
                mean = torch.stack(losses[-50:]).mean().item()
                print(f"step {at + 1}  loss {mean:.4f}  {time.monotonic() - start:.0f} s", flush=True)

    def exam(self, pool: Pool) -> dict[str, float]:
        """Share of questions whose answer is right to the last token, of all and of combinations never seen."""
        right: list[bool] = []
        rng = Random(2)
        with torch.no_grad():
            for at in range(0, len(pool.scenes), 64):
                scenes = pool.scenes[at : at + 64]
                rows, _ = self.tower(pool.batch(torch.arange(at, at + len(scenes), device=self.device)))
                turns = [(about_picture(rng, scene), True) for scene in scenes]
                right += self._said(rows, turns)[1].tolist()
        new = [(s.number, s.colour, s.shape) in held_out() for s in pool.scenes]
        return {
            "right": float(np.mean(right)),
            "new": float(np.mean([r for r, is_new in zip(right, new, strict=True) if is_new])),
        }

    def _turns(self, scenes: Sequence[Scene]) -> list[tuple[Turn, bool]]:
        turns = []
        for scene in scenes:
            turn = about_picture(self.rng, scene)
            turn = Turn(in_passing(self.rng, turn.question), turn.answer)
            turns.append((turn, self.rng.random() < FIRST_SHARE))
        return turns

    def _said(self, rows: Tensor, turns: Sequence[tuple[Turn, bool]]) -> tuple[Tensor, Tensor]:
        """The loss of the answers, and which of them are right."""
        ids, columns, said = self.chats.batch(turns, self.device)
        x = self.model.token_embd(ids)
        x = x.scatter(1, columns[..., None].expand(-1, -1, x.shape[-1]), rows.to(x.dtype))
        hidden = self.model.over(x)[:, :-1]
        learned = said[:, 1:]
        logits = self.model.logits(hidden[learned]).float()
        targets = ids[:, 1:][learned]
        loss = F.cross_entropy(logits, targets)
        wrong = torch.zeros(learned.shape, dtype=torch.bool, device=self.device)
        wrong[learned] = logits.argmax(-1) != targets
        return loss, ~wrong.any(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m uma_trio.training.see", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("build/mmproj.gguf"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pictures", type=int, default=131_072, help="pictures to learn from (131072)")
    parser.add_argument("--looks", type=int, default=4000, help="steps that learn to tell shapes (4000)")
    parser.add_argument("--steps", type=int, default=10_000, help="steps that learn to answer (10000)")
    parser.add_argument(
        "--batch", type=int, default=256, help="questions of a step, and half of its pictures to tell (256)"
    )
    parser.add_argument("--seconds", type=float, default=300, help="time limit of both together (300)")
    options = parser.parse_args()
    shape = TowerShape()
    start = time.monotonic()
    pool, exam = Pool(options.pictures, 1, shape), Pool(1024, 2, shape, is_exam=True)
    for part in (pool, exam):
        part.move(options.device)
    print(f"{len(pool.scenes)} pictures, {time.monotonic() - start:.0f} s", flush=True)
    trainer = Trainer(shape, options.device)
    trainer.learn(pool, options.looks, 2 * options.batch, speaks=False, seconds=options.seconds / 4)
    trainer.learn(pool, options.steps, options.batch, speaks=True, seconds=options.seconds * 3 / 4)
    weights = {name: weight.detach().cpu().numpy() for name, weight in trainer.tower.state_dict().items()}
    write_projector(options.out, weights, shape, SHIPPED.n_embd)
    print(f"{options.out}: {options.out.stat().st_size / 2**10:.0f} KiB, {time.monotonic() - start:.0f} s", flush=True)
    print(trainer.exam(exam))


if __name__ == "__main__":
    main()
