"""What serving costs in each layout that a context could have, measured before the context is made.

A small context in each layout, one after another, so that there are never two: as many sequences as would decode at a
time, each behind some hundred tokens.  What attention costs grows with the cells in use and not with those that there
are, so the small context tells of the large one, and takes a hundredth of its time to make.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np
import structlog

import llama_abi
from uma_trio.engine.layout import Choice, Layout, Measured, choose

log = structlog.get_logger("uma_trio.engine")

ROWS: Final = 8
"""Most streams that decode together in a trial."""
CHUNK: Final = 48
"""Prompt tokens of a mixed tick.  The scheduler cuts chunks in sixteens, and where streams wait they are small; with 64
llama.cpp's CPU flash attention takes another kernel, nine times as quick as with 63, and would look as if it always were."""
AT_ONCE: Final = 64
"""Prompt tokens of a call before that."""
FILLED: Final = 320
"""Tokens that each sequence holds before."""
CELLS: Final = 512
"""Of each sequence; what is measured fits behind ``FILLED``, and llama.cpp looks at 256 cells at a time."""
ROUNDS: Final = 2
"""Of each tick, after one that only warms up; the quicker one counts, since nothing makes a tick quicker than it is."""
HOPELESS: Final = 1.25
"""Times the cheapest so far: what costs more is not measured any further."""
CALLS: Final = FILLED // AT_ONCE + 1 + 2 * ROUNDS
"""Of each layout, at least."""

Feeds = Sequence[tuple[int, int]]
"""(sequence, tokens) of one call."""


class _NoTime(Exception):
    """The trial would take longer than it may."""


def try_layouts(
    model: llama_abi.Model,
    layouts: Sequence[Layout],
    options: Callable[[Layout], llama_abi.ContextOptions],
    *,
    budget_s: float,
) -> Choice:
    """Measure ``layouts``, the rule's first, and choose.

    Blocks for ``budget_s`` at most, and until the call ends that is under way then (on a CPU it is cut short); before that
    for two of one token, with which mapped weights come into memory.

    Args:
        options: a layout's context as it would serve.
    """
    rule = layouts[0]
    shares = [options(each).n_ctx // options(each).n_seq_max for each in layouts]
    if min(*shares, model.n_ctx_train) < CELLS:
        return Choice(layout=rule, why="by rule")
    measured: list[Measured] = []
    with _Deadline(len(layouts)) as deadline:
        try:
            for layout in layouts:
                found = _measured(model, layout, options(layout), deadline, budget_s, measured)
                if found is not None:
                    measured.append(found)
                elif layout is rule:
                    return Choice(layout=rule, why="by rule")
                deadline.layouts -= 1
                if layout is rule:
                    deadline.need(deadline.layouts * deadline.spent_s() / 2)  # each, if it is soon seen to be dear
        except _NoTime:
            return Choice(layout=rule, why="no time", measured=measured)
    return Choice(layout=choose(measured), why="measured", measured=measured)


def _measured(
    model: llama_abi.Model,
    layout: Layout,
    options: llama_abi.ContextOptions,
    deadline: _Deadline,
    budget_s: float,
    others: Sequence[Measured],
) -> Measured | None:
    """``None`` where there is not the memory for it, or the device cannot do it."""
    try:
        trial = _Trial(model, options, deadline)
        try:
            if not deadline.running:
                least_ms = trial.touch()
                deadline.start(budget_s)
                deadline.need(1e-3 * least_ms * CALLS * deadline.layouts)
            cheapest = min((each.cost_ms for each in others), default=float("inf"))
            return trial.measure(layout, HOPELESS * cheapest)
        finally:
            trial.close()
    except llama_abi.LlamaError as error:
        log.debug("a layout cannot be had", layout=layout.name, reason=str(error))
        return None


class _Deadline:
    """How long it may still take.  Cuts the call short that is under way at the end, where the device can."""

    def __init__(self, layouts: int) -> None:
        self.flag = llama_abi.AbortFlag()
        self.layouts = layouts
        """Not yet measured, that under way among them."""
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
        """From now on."""
        self._began_s, self._budget_s = time.perf_counter(), budget_s
        self._timer = threading.Timer(budget_s, self.flag.set)
        self._timer.daemon = True
        self._timer.start()

    def spent_s(self) -> float:
        return time.perf_counter() - self._began_s

    def need(self, s: float) -> None:
        """
        Raises:
            _NoTime: so much is not left.
        """
        if self.flag.is_set() or self.spent_s() + s > self._budget_s:
            raise _NoTime


class _Trial:
    """A small context, and what its sequences hold."""

    def __init__(self, model: llama_abi.Model, options: llama_abi.ContextOptions, deadline: _Deadline) -> None:
        self._rows = min(options.n_seq_max, ROWS)
        self._unified = options.kv_unified
        self._context = llama_abi.Context(model, attrs.evolve(options, n_ctx=self._rows * CELLS, n_seq_max=self._rows))
        self._context.set_abort_flag(deadline.flag)
        self._deadline = deadline
        self._n_vocab = model.vocab.n_tokens
        self._batch = llama_abi.Batch(self._context.n_batch)
        self._held = [0] * self._rows

    def touch(self) -> float:
        """Have all weights read once; then the milliseconds of one token, the least that any call takes."""
        self._ms([(0, 1)])
        return self._ms([(0, 1)])

    def measure(self, layout: Layout, hopeless_ms: float) -> Measured:
        """
        Raises:
            _NoTime: it takes longer than it may.
            llama_abi.LlamaError: the backend failed.
        """
        self._fill()
        rows = [(seq, 1) for seq in range(self._rows)]
        reading = self._rows - 1  # the last of the streams reads a prompt instead
        chunk = [(reading, min(CHUNK, self._context.n_batch - reading))]
        mixed = [rows[:reading] + chunk] if self._unified else [rows[:reading], chunk]
        self._ms(rows)
        decode_ms = min(self._ms(rows) for _ in range(ROUNDS))
        found = Measured(layout=layout, decode_ms=decode_ms, mixed_ms=None)
        for _ in range(ROUNDS):
            if found.cost_ms > hopeless_ms:
                break
            ms = sum(self._ms(feeds) for feeds in mixed if feeds)
            found = attrs.evolve(found, mixed_ms=min(ms, found.mixed_ms or ms))
        return found

    def close(self) -> None:
        self._context.close()

    def _fill(self) -> None:
        """``FILLED`` tokens in each sequence, computed once and copied.

        In a shared pool a copy would be the same cells once more, and all streams would read what one does: there a saved
        state is loaded, which takes cells of its own.
        """
        at_once = min(AT_ONCE, self._context.n_batch)
        while (left := FILLED - self._held[0]) > 0:
            n = min(at_once, left)
            ms = self._ms([(0, n)])
            if left < FILLED - at_once:  # the first one also warms up
                self._deadline.need(1e-3 * ms * (left - n + FILLED * (self._deadline.layouts - 1)) / n)
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

    def _ms(self, feeds: Feeds) -> float:
        """One call of ``feeds``, and what it took."""
        self._batch.clear()
        for seq, n in feeds:
            pos = self._held[seq]
            self._batch.add(np.arange(pos, pos + n, dtype=np.int32) % self._n_vocab, pos=pos, seq=seq, logits="last")
            self._held[seq] = pos + n
        began = time.perf_counter()
        code = self._context.decode(self._batch)
        self._context.synchronize()
        ended = time.perf_counter()
        self._deadline.need(0)
        if code != llama_abi.OK:
            raise llama_abi.LlamaError(f"a trial's decode gave {code}")
        return 1e3 * (ended - began)
