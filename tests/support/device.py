"""Simulated devices, and a simulated server that runs the scheduler on one in closed loop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import attrs

from uma_trio.config import Scheduling
from uma_trio.daemon.engines.calibrate import CURVE_ROWS, MAX_CURVE_DECODES, PROMPT_CURVE_ROWS
from uma_trio.daemon.policy.cost import CostModel, Work
from uma_trio.daemon.policy.plan import Plan, plan
from uma_trio.daemon.policy.row_curve import PrefillCurves, RowCurve
from uma_trio.daemon.policy.tick import PolicyState, Tick
from uma_trio.daemon.policy.view import Priority, SequenceView


@attrs.define
class Device:
    """Takes ``a + b * prefill_tokens + c * decode_rows + d * context_tokens + e * prefill_attention`` milliseconds for
    a tick, and ``step`` more if the tick has prefill."""

    a: float
    b: float
    c: float
    d: float = 0.0
    e: float = 0.0
    step: float = 0.0
    noise: float = 0.0
    """Relative standard deviation of a tick's time."""
    tile_rows: int = 0
    tile_ms: float = 0.0
    """Ticks with prefill take so much longer for each started tile of so many rows, decodes included."""
    rng: random.Random = attrs.field(factory=lambda: random.Random(1))

    def ms(self, work: Work) -> float:
        """Milliseconds of one tick, with noise."""
        exact = self.exact_ms(work)
        return exact * max(0.1, 1 + self.rng.gauss(0, self.noise)) if self.noise else exact

    def exact_ms(self, work: Work) -> float:
        """Milliseconds of one tick, without noise."""
        linear = self.a + self.b * work.prefill_tokens + self.c * work.decode_rows + self.d * work.context_tokens
        if self.tile_rows and work.prefill_tokens:
            linear += self.tile_ms * -(-(work.prefill_tokens + work.decode_rows) // self.tile_rows)
        linear += self.e * work.prefill_tokens * (work.mean_prefill_context + work.prefill_tokens / 2)
        return linear + (self.step if work.prefill_tokens else 0.0)


CPU = Device(3.0, 1.05, 3.0, 0.002, e=0.0005)
GPU = Device(4.0, 0.087, 0.3, 0.0003, e=2e-5, step=9.0)
QUICK = Device(1.0, 0.02, 0.05, 0.0001, step=2.0)
FLAT = Device(5.0, 0.1, 0.5)
SLOW = Device(20.0, 3.0, 5.0, 0.003, e=0.001, step=5.0)
STAIRS = Device(5.0, 0.002, 0.02, 0.00001, e=1e-6, tile_rows=64, tile_ms=5.0)
"""A GPU whose kernels compute 64 rows in the time of one."""
TOO_SLOW = Device(160.0, 5.0, 50.0, 0.01)
"""One decode takes longer than the target of any stream."""

CALIBRATION = (
    Work(64, 0, 0), Work(32, 0, 0), Work(0, 1, 16), Work(0, 4, 150), Work(32, 3, 150), Work(128, 0, 17),
    Work(0, 2, 80), Work(0, 1, 64), Work(64, 3, 200), Work(256, 0, 0, 66.0), Work(256, 0, 0, 322.0), Work(0, 2, 720),
)  # fmt: skip
"""About what the engine's calibration runs."""


def calibrated(device: Device) -> CostModel:
    """The cost model after calibration on ``device``, before the first client."""
    cost = CostModel().with_curves(measured_curves(device))
    for work in CALIBRATION:
        cost = cost.observed(work, device.ms(work))
    return cost


def measured_curves(device: Device) -> PrefillCurves:
    """The curves that the engine's calibration measures, with unified KV."""

    def curve(n_decodes: int, row_counts: Sequence[int]) -> RowCurve:
        works = {rows: Work(rows - n_decodes, n_decodes, 0) for rows in row_counts if n_decodes < rows <= 512}
        return RowCurve(tuple(works), tuple(map(device.exact_ms, works.values())))

    return PrefillCurves(curve(0, PROMPT_CURVE_ROWS), curve(MAX_CURVE_DECODES, CURVE_ROWS), MAX_CURVE_DECODES)


@attrs.define
class SimulatedSequence:
    """One sequence of the simulated server."""

    seq_id: int
    n_pending: float
    target_ms: float
    n_to_generate: float = math.inf
    n_context: int = 0
    due_s: float = math.inf
    priority: Priority = Priority.NORMAL
    principal: str = ""
    is_decoding: bool = False
    last_token_s: float = 0.0
    waited: int = 0
    """Ticks since the sequence last advanced."""
    n_prefilled: int = 0
    gaps_ms: list[float] = attrs.field(factory=list)
    """Inter-token latencies."""

    def view(self) -> SequenceView:
        return SequenceView(
            self.seq_id,
            self.n_pending,  # type: ignore[arg-type]  # infinity is a prompt without end
            self.n_context,
            self.due_s,
            self.priority,
            self.principal,
        )


@attrs.define
class SimulatedServer:
    """Plans and runs ticks on a simulated device, whose time moves the clock."""

    device: Device
    settings: Scheduling = attrs.field(factory=Scheduling)
    max_tokens: int = 512
    cost: CostModel = attrs.field(default=attrs.Factory(lambda self: calibrated(self.device), takes_self=True))
    host_gap_ms: float = 0.3
    """Time between two ticks."""
    now_s: float = 0.0
    state: PolicyState = attrs.field(factory=PolicyState)
    running: dict[int, SimulatedSequence] = attrs.field(factory=dict)
    ticks_ms: list[float] = attrs.field(factory=list)
    on_plan: Callable[[Plan], None] = lambda chosen: None

    def prefill(
        self,
        seq_id: int,
        n_pending: float,
        *,
        n_to_generate: float = math.inf,
        target_ms: float | None = None,
        priority: Priority = Priority.NORMAL,
        principal: str = "",
    ) -> SimulatedSequence:
        """Admit a prompt of ``n_pending`` tokens."""
        target = self.settings.target_itl_ms if target_ms is None else target_ms
        self.running[seq_id] = SimulatedSequence(
            seq_id, n_pending, target, n_to_generate, priority=priority, principal=principal
        )
        return self.running[seq_id]

    def decode(
        self,
        seq_id: int,
        *,
        n_context: int = 100,
        target_ms: float | None = None,
        priority: Priority = Priority.NORMAL,
        principal: str = "",
    ) -> SimulatedSequence:
        """Add an endless stream that is decoding already."""
        sequence = self.prefill(seq_id, 1, target_ms=target_ms, priority=priority, principal=principal)
        sequence.is_decoding, sequence.n_context, sequence.last_token_s = True, n_context, self.now_s
        sequence.due_s = self.now_s + sequence.target_ms / 1e3
        return sequence

    def tick(self) -> Plan:
        """Plan and run one tick."""
        chosen = plan(
            Tick(
                [sequence.view() for sequence in self.running.values() if sequence.is_decoding],
                [sequence.view() for sequence in self.running.values() if not sequence.is_decoding],
                self.state,
                now_s=self.now_s,
                cost=self.cost,
                max_tokens=self.max_tokens,
                settings=self.settings,
            )
        )
        self.on_plan(chosen)
        self.state = chosen.state
        tick_ms = self.device.ms(chosen.work)
        self.ticks_ms.append(tick_ms)
        self.now_s += (tick_ms + self.host_gap_ms) / 1e3
        self.cost = self.cost.observed(chosen.work, tick_ms)
        for sequence in self.running.values():
            sequence.waited += 1
        for view in chosen.decodes:
            sequence = self.running[view.seq_id]
            sequence.waited = 0
            sequence.gaps_ms.append(1e3 * (self.now_s - sequence.last_token_s))
            sequence.n_context += 1
            self._generated(sequence)
        for chunk in chosen.chunks:
            sequence = self.running[chunk.seq_id]
            sequence.waited = 0
            sequence.n_prefilled += chunk.n_tokens
            sequence.n_pending -= chunk.n_tokens
            sequence.n_context += chunk.n_tokens
            if chunk.is_last:
                sequence.is_decoding, sequence.n_pending = True, 1
                self._generated(sequence)
        return chosen

    def _generated(self, sequence: SimulatedSequence) -> None:
        sequence.last_token_s = self.now_s
        sequence.due_s = self.now_s + sequence.target_ms / 1e3
        sequence.n_to_generate -= 1
        if sequence.n_to_generate <= 0:
            del self.running[sequence.seq_id]
