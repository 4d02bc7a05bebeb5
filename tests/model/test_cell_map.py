"""The used cells of a unified cache, as the bookkeeping follows them, against llama.cpp's own.

llama.cpp logs the end of the used cells for each batch if ``LLAMA_KV_CACHE_DEBUG`` is set.
"""

from __future__ import annotations

import random
import re
from typing import Any

import attrs
import numpy as np
import pytest

from llama_abi.logs import LogRouter
from tests.support.engine_contract import greedy
from tests.support.profile import amount, thorough
from uma_trio import config
from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import IdleLimit
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.engine_link.messages import Step, StepInput
from uma_trio.models.packaged import EMBEDDED

N_CELLS, N_SEQUENCES = 2048, 8
N_STEPS = amount(quick=120, thorough=400)
USED = re.compile(r"find_slot: stream\[0\], n = +(\d+), used = +(\d+)")


@attrs.define(eq=False)
class Request:
    """A running request."""

    allocation: Allocation
    n_prompt: int
    story: np.ndarray
    """Prompt and answer."""
    held: int
    """Tokens that are computed, those of the step in flight included."""
    waits: bool


class Load:
    """Random requests to a cache and to the engine."""

    def __init__(self, engine: Any, chance: random.Random) -> None:
        self.engine, self.chance = engine, chance
        limit = IdleLimit(N_CELLS, min_cells=100, keep_rows=2000)
        self.cache = KvCache(
            KvMemory(n_sequences=N_SEQUENCES, n_cells=N_CELLS, cells_per_sequence=N_CELLS), idle_limit=limit
        )
        self.requests: list[Request] = []
        self.stories: list[np.ndarray] = []
        self.in_flight: dict[Request, int] = {}
        """Lengths after the step in flight, which the cache does not count yet."""

    def arrive(self) -> None:
        chance = self.chance
        old = chance.choice(self.stories) if self.stories and chance.random() < 0.5 else np.zeros(0, dtype=np.int32)
        new = [chance.randrange(100, 400) for _ in range(chance.choice([5, 60, 300]))]
        prompt = np.asarray([*old[: chance.randrange(len(old) + 1)], *new], dtype=np.int32)
        answer = [chance.randrange(100, 400) for _ in range(chance.choice([1, 10, 40]))]
        story = np.asarray([*prompt, *answer], dtype=np.int32)
        if len(story) > N_CELLS // 2:
            return
        placement = self.cache.allocate(Allocation(prompt, len(story), private=chance.random() < 0.1))
        if placement is not None:
            self.stories.append(story)
            found = placement.allocation
            self.requests.append(Request(found, len(prompt), story, placement.n_cached, placement.waits))

    def complete(self) -> None:
        for request, held in self.in_flight.items():
            self.cache.advance(request.allocation, held)
        self.in_flight.clear()

    def end(self, request: Request) -> None:
        if request in self.in_flight:
            self.cache.advance(request.allocation, self.in_flight.pop(request))
        self.requests.remove(request)
        kept = None if self.chance.random() < 0.2 else request.story[: request.held]
        self.cache.release(request.allocation, kept)

    def chunks(self) -> dict[Request, int]:
        """The rows of the next step, by request: decodes first."""
        by_seq_id = sorted(self.requests, key=lambda request: request.allocation.seq_id)
        ready = [request for request in by_seq_id if not request.waits and request.held < len(request.story)]
        decodes = [request for request in ready if request.held >= request.n_prompt]
        rows = dict.fromkeys(decodes, 1)
        prefills = [request for request in ready if request.held < request.n_prompt]
        if prefills:
            first = self.chance.choice(prefills)
            rows[first] = min(self.chance.choice([8, 64, 128]), first.n_prompt - first.held)
        return rows

    def step(self, used: list[tuple[int, int]], *, ahead: bool) -> tuple[int, int] | None:
        """Compute a step; returns the end of the used cells as predicted, and as llama.cpp has it.

        Args:
            ahead: it is planned while the step before is in flight.
        """
        ahead = ahead and bool(self.in_flight)
        if not ahead:
            self.complete()
        ready = self.cache.followed()
        for request in self.requests:
            if request.allocation in ready:
                request.waits, request.held = False, request.allocation.n_tokens
        rows = self.chunks()
        n_in_flight = None
        if ahead:
            n_in_flight = sum(held - request.allocation.n_tokens for request, held in self.in_flight.items())
        self.cache.cells_scanned(n_in_flight)
        ops = self.cache.take_ops(in_flight=ahead)
        predicted = self.cache.cells_scanned(n_in_flight)
        inputs = [
            StepInput(request.allocation.seq_id, request.held, request.story[request.held : request.held + n].tolist())
            for request, n in rows.items()
        ]
        if inputs:
            inputs[0].samples = [greedy()]
        used.clear()
        self.engine.step(Step(list(ops), [inputs] if inputs else []))
        self.complete()
        for request, n in rows.items():
            request.held += n
            self.in_flight[request] = request.held
        self.cache.check_integrity()
        return (predicted, used[0][0]) if used else None


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(end of the used cells, their number) before each batch since it was cleared."""
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "1")
    found: list[tuple[int, int]] = []
    feed = LogRouter.feed

    def read(router: LogRouter, level: int, text: str) -> None:
        if match := USED.search(text):
            found.append((int(match[1]), int(match[2])))
        else:
            feed(router, level, text)

    monkeypatch.setattr(LogRouter, "feed", read)
    return found


@pytest.mark.parametrize(("run_ahead", "most"), [thorough(0.0, 0.005), thorough(1.0, 0.05), (0.5, 0.2)])
def test_the_end_of_the_used_cells_is_that_of_llama(
    library: None, used: list[tuple[int, int]], run_ahead: float, most: float
) -> None:
    """The sum of all errors is a small part of the holes, which is what counting the used cells would miss.

    Args:
        run_ahead: how many of the steps are planned while one is in flight.  The bookkeeping then learns of the rows of
            two steps at once, or of removed tokens before rows that are older, and cannot tell which cells these got.
        most: sum of the errors relative to the sum of the holes.
    """
    from uma_trio.engine.llama import LlamaEngine

    chance = random.Random(7)
    options = config.Model(ctx=N_CELLS, parallel=N_SEQUENCES, batch_tokens=256, threads=1, kv_unified="on")
    engine = LlamaEngine(EMBEDDED, options)
    errors, holes = [], []
    try:
        load = Load(engine, chance)
        for _ in range(N_STEPS):
            if chance.random() < 0.3:
                load.arrive()
            for request in list(load.requests):
                if request.held == len(request.story) or chance.random() < 0.01:
                    load.end(request)
            found = load.step(used, ahead=chance.random() < run_ahead)
            if found is not None:
                predicted, real = found
                errors.append(abs(predicted - real))
                holes.append(real - used[0][1])
    finally:
        engine.close()
    assert sum(map(bool, holes)) > N_STEPS / 2
    assert sum(errors) <= most * sum(holes)
