"""One sequence of the KV cache and its reserved cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from uma_trio.daemon.kv.checkpoints import Checkpoints
from uma_trio.engine_link.adapters import NO_ADAPTERS, AdapterSet
from uma_trio.engine_link.tokens import TokenIds


@attrs.define(eq=False)
class SharedPrefix:
    """The first tokens of several forks, whose cells they share.  It ends when only one of them is left."""

    length: int
    """Tokens, those of ``parent`` included."""
    parent: SharedPrefix | None
    """The shorter prefix that more forks share."""
    holders: dict[Allocation, None]
    """The forks, the oldest first."""

    @property
    def n_cells(self) -> int:
        """Cells, without those of ``parent``."""
        return self.length - (0 if self.parent is None else self.parent.length)

    def path(self) -> Iterator[SharedPrefix]:
        """This prefix, then the shorter ones."""
        node: SharedPrefix | None = self
        while node is not None:
            yield node
            node = node.parent


@attrs.define(eq=False)
class CellRun:
    """KV cells of consecutive tokens.  In a unified cache, copies of a sequence share them."""

    start: int = 0
    """Position of the first token."""
    shared_end: int = 0
    """Copies have the cells up to this position, or had them."""


@attrs.define(eq=False)
class Allocation:
    """One sequence id with its reserved cells.

    An allocation is busy while its request runs, and idle while the cache keeps the tokens for later requests.  It is
    the handle that callers pass to ``KvCache``.
    """

    tokens: TokenIds
    """The prompt while busy, with the first text of a controller; all tokens that the cache holds while idle."""
    reserved: int
    """Cells for the prompt and all tokens that may be generated, including cells that forks share."""
    principal: str = ""
    """Owner; only the owner's requests share the tokens."""
    adapters: AdapterSet = NO_ADAPTERS
    """What the tokens are computed with; only requests with the same adapters share them."""
    rank: int = 0
    """Scheduling class, 0 first.  A request never waits for an allocation of a higher rank."""
    private: bool = False
    """Never shared, and not kept after the request."""
    durable: bool = False
    """Must be saved before its cells are reused."""
    truncation_floor: int = 0
    """Shortest length to which the tokens can be truncated, other than 0, if the memory can be truncated at all."""
    is_idle: bool = False
    idle_since: float = 0.0
    """Time at which the request ended, on the caller's clock."""
    save_settled: bool = False
    """The tokens have been saved, or saving was given up."""
    cells_wanted: bool = False
    """A request waits for these cells."""
    n_reused: int = 0
    """Tokens at its beginning that were asked for again lately; see ``IdleLimit``.  While busy, it may exceed ``n_tokens``."""
    n_uncut: int = 0
    """Tokens that it held when it became idle."""
    used_at: int = 0
    """``IdleLimit.n_rows`` when a request last used its tokens."""
    is_forgotten: bool = False
    """Nothing may be kept of it, not even a state that is being saved right now."""
    awaits_state: bool = False
    """Waits for a saved state to be loaded."""
    leader: Allocation | None = None
    """Waits for this allocation to compute the shared prefix."""
    n_awaited: int = 0
    """Length of the prefix that it waits for."""
    checkpoints: Checkpoints = ()
    """Lengths to which it can be truncated, in memories that need checkpoints."""
    pauses: tuple[int, ...] = ()
    """Prompt lengths at which prefill pauses to save a checkpoint; ascending."""
    shared: SharedPrefix | None = None
    """The longest prefix that it shares with a fork."""
    seq_id: int = -1
    _n_tokens: int = attrs.field(default=0, init=False)
    _copied: tuple[tuple[CellRun, int], ...] = attrs.field(default=(), init=False)
    """Runs of cells that other sequences may have too, each with the position up to which this sequence follows it."""
    _run: CellRun = attrs.field(factory=CellRun, init=False)
    """The cells of all tokens after these."""

    def may_share(self, other: Allocation) -> bool:
        """Whether requests of the one may use the tokens of the other."""
        return self.principal == other.principal and self.adapters == other.adapters

    @property
    def n_tokens(self) -> int:
        """Tokens that the KV cache holds for this sequence."""
        return self._n_tokens

    def resize(self, n_tokens: int) -> None:
        """Set ``n_tokens``.

        Raises:
            AssertionError: ``n_tokens`` is negative or exceeds the reserved cells.
        """
        if not 0 <= n_tokens <= self.reserved:
            raise AssertionError(f"sequence {self.seq_id} cannot hold {n_tokens} of {self.reserved} reserved cells")
        self._n_tokens = n_tokens
        if n_tokens < max(self._run.start, self._run.shared_end):  # what follows is computed into other cells
            self._copied = _cut(self.runs(), n_tokens)
            self._run = CellRun(n_tokens)

    def copy_cells(self, source: Allocation, length: int) -> None:
        """Hold the first ``length`` tokens of ``source``, in the same cells where the cache is unified."""
        source._run.shared_end = max(source._run.shared_end, length)
        self.resize(0)
        self._copied, self._run = _cut(source.runs(), length), CellRun(length)
        self.resize(length)

    def take_cells(self, source: Allocation) -> None:
        """Hold what ``source`` holds, which no longer has it."""
        self._copied, self._run = source._copied, source._run
        self.resize(source.n_tokens)

    def runs(self) -> tuple[tuple[CellRun, int], ...]:
        """The runs whose cells hold its tokens, each with the position where this sequence leaves it."""
        return (*self._copied, (self._run, self._n_tokens))

    @property
    def shares_cells(self) -> bool:
        """Whether others may hold some of its cells, too."""
        return bool(self._copied or self._run.shared_end)

    @property
    def n_shared(self) -> int:
        """Cells that it shares with forks."""
        return 0 if self.shared is None else self.shared.length

    @property
    def own_cells(self) -> int:
        """Cells that it reserves for itself alone."""
        return self.reserved - self.n_shared

    @property
    def needs_save(self) -> bool:
        """It must be saved before its cells can be reused."""
        return self.durable and not self.save_settled

    def waits_for(self, other: Allocation) -> bool:
        """Whether ``other`` is this allocation, its leader, its leader's leader, and so on."""
        current: Allocation | None = self
        while current is not None:
            if current is other:
                return True
            current = current.leader
        return False


def _cut(runs: Iterable[tuple[CellRun, int]], length: int) -> tuple[tuple[CellRun, int], ...]:
    """What ``runs`` have of the first ``length`` tokens."""
    return tuple([(run, min(end, length)) for run, end in runs if run.start < length])


def cells_by_run(allocations: Iterable[Allocation]) -> dict[CellRun, int]:
    """The runs of cells that hold tokens of ``allocations`` in a unified cache, and the number of cells of each."""
    n_cells = dict[CellRun, int]()
    for allocation in allocations:
        if allocation.shares_cells:
            for run, end in allocation.runs():
                n_cells[run] = max(end - run.start, n_cells.get(run, 0))
        else:
            n_cells[allocation._run] = allocation._n_tokens
    return n_cells


def count_cells(allocations: Iterable[Allocation]) -> int:
    """Cells of a unified cache that hold tokens of ``allocations``; shared ones count once."""
    return sum(cells_by_run(allocations).values())
