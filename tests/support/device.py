"""Devices that take simulated milliseconds, and a house that is served by one: the policy in closed loop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import attrs

from uma_trio.config import Scheduling
from uma_trio.scheduling.cost import CostModel, Work
from uma_trio.scheduling.policy import Memory, Plan, Slot, plan


@attrs.define
class Device:
    """Takes ``a + b * prompt + c * decodes + d * context + e * (what prompts read)`` ms, and ``step`` more with
    any prompt token."""

    a: float
    b: float
    c: float
    d: float = 0.0
    e: float = 0.0
    step: float = 0.0
    noise: float = 0.0
    """Standard deviation of a tick's time, as a share of it."""
    chance: random.Random = attrs.field(factory=lambda: random.Random(1))

    def ms(self, work: Work) -> float:
        """One tick."""
        exact = self.exact_ms(work)
        return exact * max(0.1, 1 + self.chance.gauss(0, self.noise)) if self.noise else exact

    def exact_ms(self, work: Work) -> float:
        linear = self.a + self.b * work.prompt_tokens + self.c * work.decodes + self.d * work.context_tokens
        linear += self.e * work.prompt_tokens * (work.prompt_context + work.prompt_tokens / 2)
        return linear + (self.step if work.prompt_tokens else 0.0)


CPU = Device(3.0, 1.05, 3.0, 0.002, e=0.0005)
GPU = Device(4.0, 0.087, 0.3, 0.0003, e=2e-5, step=9.0)
QUICK = Device(1.0, 0.02, 0.05, 0.0001, step=2.0)
FLAT = Device(5.0, 0.1, 0.5)
SLOW = Device(20.0, 3.0, 5.0, 0.003, e=0.001, step=5.0)
TOO_SLOW = Device(160.0, 5.0, 50.0, 0.01)
"""One decode takes longer than any stream's target."""

SHAPES = (
    Work(64, 0, 0), Work(32, 0, 0), Work(0, 1, 16), Work(0, 4, 150), Work(32, 3, 150), Work(128, 0, 17),
    Work(0, 2, 80), Work(0, 1, 64), Work(64, 3, 200), Work(256, 0, 0, 66.0), Work(256, 0, 0, 322.0), Work(0, 2, 720),
)  # fmt: skip
"""What the engine's calibration runs, about."""


def calibrated(device: Device) -> CostModel:
    """What is known of ``device`` when the first client comes."""
    cost = CostModel()
    for work in SHAPES:
        cost = cost.observed(work, device.ms(work))
    return cost


@attrs.define
class Held:
    """One sequence of the house."""

    slot: Slot
    target_ms: float
    to_generate: float = math.inf
    decoding: bool = False
    last_token_s: float = 0.0
    waited: int = 0
    """Ticks since it last advanced."""
    fed: int = 0
    gaps_ms: list[float] = attrs.field(factory=list)


@attrs.define
class House:
    """Ticks on a clock that the device moves."""

    device: Device
    limits: Scheduling = attrs.field(factory=Scheduling)
    capacity: int = 512
    cost: CostModel = attrs.field(default=attrs.Factory(lambda self: calibrated(self.device), takes_self=True))
    gap_ms: float = 0.3
    """Between two ticks."""
    now_s: float = 0.0
    memory: Memory = attrs.field(factory=Memory)
    held: dict[int, Held] = attrs.field(factory=dict)
    ticks_ms: list[float] = attrs.field(factory=list)
    watch: Callable[[Plan], None] = lambda chosen: None

    def read(
        self, seq_id: int, pending: float, *, n: float = math.inf, target_ms: float | None = None, **slot: int
    ) -> Held:
        """A prompt is admitted."""
        target = self.limits.target_tbt_ms if target_ms is None else target_ms
        self.held[seq_id] = Held(Slot(seq_id, pending, **slot), target, n)  # type: ignore[arg-type]
        return self.held[seq_id]

    def decode(self, seq_id: int, *, context: int = 100, **more: float) -> Held:
        """A stream that decodes already."""
        held = self.read(seq_id, 1, **more)  # type: ignore[arg-type]
        held.decoding, held.slot.context, held.last_token_s = True, context, self.now_s
        held.slot.due_s = self.now_s + held.target_ms / 1e3
        return held

    def tick(self) -> Plan:
        streams = [held.slot for held in self.held.values() if held.decoding]
        prompts = [held.slot for held in self.held.values() if not held.decoding]
        chosen = plan(
            streams, prompts, self.memory, now_s=self.now_s, cost=self.cost, capacity=self.capacity, limits=self.limits
        )
        self.watch(chosen)
        self.memory = chosen.memory
        took_ms = self.device.ms(chosen.work)
        self.ticks_ms.append(took_ms)
        self.now_s += (took_ms + self.gap_ms) / 1e3
        self.cost = self.cost.observed(chosen.work, took_ms)
        for held in self.held.values():
            held.waited += 1
        for slot in chosen.streams:
            self._token(self.held[slot.seq_id])
        for share in chosen.shares:
            held = self.held[share.seq_id]
            held.waited, held.fed = 0, held.fed + share.n_tokens
            held.slot.pending -= share.n_tokens
            held.slot.context += share.n_tokens
            if share.ends:
                held.decoding, held.slot.pending, held.last_token_s = True, 1, self.now_s
                self._due(held)
        return chosen

    def _token(self, held: Held) -> None:
        held.waited = 0
        held.gaps_ms.append(1e3 * (self.now_s - held.last_token_s))
        held.last_token_s = self.now_s
        held.slot.context += 1
        self._due(held)

    def _due(self, held: Held) -> None:
        held.slot.due_s = self.now_s + held.target_ms / 1e3
        held.to_generate -= 1
        if held.to_generate <= 0:
            del self.held[held.slot.seq_id]
