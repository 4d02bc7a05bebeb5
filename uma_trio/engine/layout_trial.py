"""Measure tick times in each candidate layout, before the real context is created.

Creates one small context after another, with as many sequences as would decode together, each of a few hundred tokens.
The cost of attention depends on the cells in use, not on the cells allocated, so a small context predicts the large one
and is created in a hundredth of the time.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np

import llama_abi
from uma_trio.engine.layout import Layout, LayoutChoice, MeasuredLayout, choose

log = logging.getLogger("uma_trio.engine")

ROWS: Final = 8
"""Maximum of streams that decode together in a trial."""
CHUNK: Final = 48
"""Prefill tokens of a mixed tick.  Below 64, as the scheduler's chunks mostly are while streams wait.  From 64 tokens
on, llama.cpp's CPU flash attention takes a kernel that is nine times as fast."""
FILL_CHUNK: Final = 64
"""Tokens per call while the first sequence is filled."""
FILLED: Final = 320
"""Tokens that each sequence holds when measuring begins."""
CELLS: Final = 512
"""Cells per sequence.  What is measured fits after ``FILLED``.  A multiple of 256, as llama.cpp attends to cells."""
ROUNDS: Final = 2
"""Measured ticks of each kind, after a warm-up.  The fastest counts, because noise only ever slows a tick down."""
HOPELESS: Final = 1.25
"""A layout that costs more than this multiple of the best so far is not measured further."""
MIN_CALLS: Final = FILLED // FILL_CHUNK + 1 + 2 * ROUNDS
"""Minimum of calls to measure one layout."""

Rows = Sequence[tuple[int, int]]
"""(sequence id, number of tokens) for one ``llama_decode`` call."""


class _NoTime(Exception):
    """The trial would exceed its budget."""


def try_layouts(
    model: llama_abi.Model,
    layouts: Sequence[Layout],
    options: Callable[[Layout], llama_abi.ContextOptions],
    *,
    budget_s: float,
    compiles: bool = False,
) -> LayoutChoice:
    """Measure ``layouts``, the default first, and choose one.

    Blocks for at most ``budget_s``, plus the rest of a running call (on a CPU the call is aborted).  Before the budget
    starts, decodes two single tokens, so that memory-mapped weights are in memory.

    If another layout than the default is the fastest, measures the default once more.

    Args:
        options: returns the context options with which a layout would serve.
        compiles: the device compiles a kernel when it is first used.  Each layout is computed once before the budget starts,
            however long that takes: a first use says nothing of the layout.
    """
    default = layouts[0]
    shares = [options(layout).n_ctx // options(layout).n_seq_max for layout in layouts]
    if min(*shares, model.n_ctx_train) < CELLS:
        return LayoutChoice(layout=default, why="default")
    for layout in layouts if compiles else ():
        with _Deadline(1) as unbounded:
            _compute(model, layout, options(layout), unbounded, functools.partial(_Trial.measure, layout=layout))
    measured: list[MeasuredLayout] = []
    with _Deadline(len(layouts)) as deadline:
        try:
            for layout in layouts:
                trial = _measured(model, layout, options(layout), deadline, budget_s, measured)
                if trial is not None:
                    measured.append(trial)
                elif layout is default:
                    return LayoutChoice(layout=default, why="default")
                deadline.layouts_left -= 1
                if layout is default:
                    deadline.need(deadline.layouts_left * deadline.spent_s() / 2)  # others may be ruled out early
            if choose(measured) is not default:
                # a slow moment met the default alone, perhaps, and later starts would keep what follows from it
                deadline.layouts_left = 1
                again = _measured(model, default, options(default), deadline, budget_s, ())
                measured[0] = min(measured[0], again or measured[0], key=lambda trial: trial.cost_ms)
        except _NoTime:
            return LayoutChoice(layout=default, why="no time", measured=measured)
    return LayoutChoice(layout=choose(measured), why="measured", measured=measured)


def _measured(
    model: llama_abi.Model,
    layout: Layout,
    options: llama_abi.ContextOptions,
    deadline: _Deadline,
    budget_s: float,
    others: Sequence[MeasuredLayout],
) -> MeasuredLayout | None:
    """Measure one layout.  ``None`` if there is not enough memory, or the device does not support it."""

    def measure(trial: _Trial) -> MeasuredLayout:
        if not deadline.running:
            least_ms = trial.warm_up()
            deadline.start(budget_s)
            deadline.need(1e-3 * least_ms * MIN_CALLS * deadline.layouts_left)
        cheapest = min((other.cost_ms for other in others), default=float("inf"))
        return trial.measure(layout, HOPELESS * cheapest)

    return _compute(model, layout, options, deadline, measure)


def _compute(
    model: llama_abi.Model,
    layout: Layout,
    options: llama_abi.ContextOptions,
    deadline: _Deadline,
    measure: Callable[[_Trial], MeasuredLayout],
) -> MeasuredLayout | None:
    """What ``measure`` finds with a small context; ``None`` as ``_measured``."""
    try:
        trial = _Trial(model, options, deadline)
        try:
            return measure(trial)
        finally:
            trial.close()
    except llama_abi.LlamaError as error:
        log.debug("this layout cannot be used", extra={"fields": {"layout": layout.name, "reason": str(error)}})
        return None


class _Deadline:
    """The time budget.  At its end, aborts the running call if the device supports that."""

    def __init__(self, layouts: int) -> None:
        self.flag = llama_abi.AbortFlag()
        self.layouts_left = layouts
        """Layouts not yet measured, the current one included."""
        self._began_s = 0.0
        self._budget_s = float("inf")
        self._timer: threading.Timer | None = None

    def __enter__(self) -> _Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    @property
    def running(self) -> bool:
        return self._timer is not None

    def start(self, budget_s: float) -> None:
        """Start the budget."""
        self._began_s, self._budget_s = time.perf_counter(), budget_s
        self._timer = threading.Timer(budget_s, self.flag.set)
        self._timer.daemon = True
        self._timer.start()

    def spent_s(self) -> float:
        return time.perf_counter() - self._began_s

    def need(self, s: float) -> None:
        """Check that ``s`` more seconds are left.

        Raises:
            _NoTime: they are not.
        """
        if self.flag.is_set() or self.spent_s() + s > self._budget_s:
            raise _NoTime


class _Trial:
    """A small context and the number of tokens in each of its sequences."""

    def __init__(self, model: llama_abi.Model, options: llama_abi.ContextOptions, deadline: _Deadline) -> None:
        self._rows = min(options.n_seq_max, ROWS)
        self._unified = options.kv_unified
        self._context = llama_abi.Context(model, attrs.evolve(options, n_ctx=self._rows * CELLS, n_seq_max=self._rows))
        self._context.set_abort_flag(deadline.flag)
        self._deadline = deadline
        self._n_vocab = model.vocab.n_tokens
        self._batch = llama_abi.Batch(self._context.n_batch)
        self._held = [0] * self._rows

    def warm_up(self) -> float:
        """Read all weights once, then return the milliseconds for one token, the minimum of any call."""
        self._ms([(0, 1)])
        return self._ms([(0, 1)])

    def measure(self, layout: Layout, hopeless_ms: float = math.inf) -> MeasuredLayout:
        """Measure decode ticks, then mixed ticks, unless the layout already costs more than ``hopeless_ms``.

        Raises:
            _NoTime: the budget is exceeded.
            llama_abi.LlamaError: the backend failed.
        """
        self._fill()
        rows = [(seq, 1) for seq in range(self._rows)]
        last = self._rows - 1  # this sequence prefills instead
        chunk = [(last, min(CHUNK, self._context.n_batch - last))]
        mixed = [rows[:last] + chunk] if self._unified else [rows[:last], chunk]
        self._ms(rows)
        decode_ms = min(self._ms(rows) for _ in range(ROUNDS))
        measured = MeasuredLayout(layout=layout, decode_ms=decode_ms, mixed_ms=None)
        for _ in range(ROUNDS):
            if measured.cost_ms > hopeless_ms:
                break
            ms = sum(self._ms(call) for call in mixed if call)
            measured = attrs.evolve(measured, mixed_ms=min(ms, measured.mixed_ms or ms))
        return measured

    def close(self) -> None:
        self._context.close()

    def _fill(self) -> None:
        """Put ``FILLED`` tokens into each sequence: computed for the first one, copied to the others.

        In unified KV a copied sequence shares its cells with the original, and attention would read them once for all.
        There the others load a saved state, which takes cells of its own.
        """
        chunk = min(FILL_CHUNK, self._context.n_batch)
        while (left := FILLED - self._held[0]) > 0:
            n = min(chunk, left)
            ms = self._ms([(0, n)])
            if left < FILLED - chunk:  # the first call also warms up
                self._deadline.need(1e-3 * ms * (left - n + FILLED * (self._deadline.layouts_left - 1)) / n)
        if self._unified:
            state = bytearray(self._context.state_size(0))
            self._context.save_state_into(0, state)
        for seq in range(1, self._rows):
            self._deadline.need(0)
            if self._unified:
                self._context.load_state_from(seq, state)
            else:
                self._context.seq_copy(0, seq)
            self._held[seq] = self._held[0]

    def _ms(self, rows: Rows) -> float:
        """Decode one batch and return how long it took, in ms."""
        self._batch.clear()
        for seq, n in rows:
            pos = self._held[seq]
            self._batch.add(np.arange(pos, pos + n, dtype=np.int32) % self._n_vocab, pos=pos, seq=seq, logits="last")
            self._held[seq] = pos + n
        began = time.perf_counter()
        code = self._context.decode(self._batch)
        self._context.synchronize()
        ended = time.perf_counter()
        self._deadline.need(0)
        if code != llama_abi.OK:
            raise llama_abi.LlamaError(f"llama_decode returned {code} in a layout trial")
        return 1e3 * (ended - began)
