"""From one plan to the next: what the policy is told besides the slots, and what a plan leaves for the one after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import trio

from uma_trio.config import Scheduling
from uma_trio.engine.records import ModelFacts
from uma_trio.runner.job import Slot
from uma_trio.runner.pace import Pace
from uma_trio.scheduling.fairness import Service
from uma_trio.scheduling.policy import Plan, PolicyState, plan
from uma_trio.scheduling.view import SequenceView


class Planner:
    """Plans the ticks of one runner."""

    def __init__(self, facts: ModelFacts, scheduling: Scheduling, pace: Pace) -> None:
        self._facts = facts
        self._scheduling = scheduling
        self._pace = pace
        self._state = PolicyState()

    @property
    def service(self) -> Service:
        """What tenants were given, and whose turn is next."""
        return self._state.service

    def plan(self, streams: Sequence[Slot], prompts: Sequence[Slot] = (), copy_ms: float = 0.0) -> Plan:
        """A tick of these; nothing is remembered of it until it is ``accepted``.

        Args:
            streams: in the order of their sequences.
            copy_ms: what else the step does first.
        """
        return plan(
            [slot.view() for slot in streams],
            [slot.view() for slot in prompts],
            self._state,
            now_s=trio.current_time() + copy_ms / 1e3,
            cost=self._pace.cost,
            max_tokens=self._facts.n_batch,
            limits=self._scheduling,
            mixes_prefill=self._facts.unified,
            pads_attention=self._facts.pads,
        )

    def accepted(self, chosen: Plan) -> None:
        """``chosen``, made from what is remembered now, is the next tick."""
        self._state = chosen.state

    def decoded(self, streams: Sequence[SequenceView]) -> None:
        """The next tick, planned a while ago, is of ``streams`` alone."""
        self._state = self._state.after_decode(streams)

    def arrived(self, tenant: int, waiting: Collection[int]) -> None:
        """A request of ``tenant`` has: if none of its own waited, it must not have saved up service meanwhile.

        Args:
            waiting: tenants of the requests that have no first token yet.
        """
        if tenant not in waiting:
            service = self._state.service.arrived(str(tenant), [str(other) for other in waiting])
            self._state = attrs.evolve(self._state, service=service)

    def left(self, tenant: int) -> None:
        """``tenant`` has nothing to do any more."""
        self._state = self._state.without(str(tenant))
