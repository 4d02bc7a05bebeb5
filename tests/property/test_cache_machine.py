"""Random requests to a ``KvCache``, checked against the plainest engine: a dict of token lists.

A request always holds the first tokens of its prompt.  Principals never share tokens, and neither do requests with
different adapters: here a principal with adapters is written ``a+x``.  Steps take time: requests
arrive and end while a step computes, and the cache counts the tokens when the step has completed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.kv_cache import (
    advance,
    backtrack,
    followed,
    next_pause,
    place,
    release,
    settle,
    share_prefix,
    truncate,
)
from tests.support.kv_subscriber import BLOCK, Rebuilt, held_by
from tests.support.profile import amount, sampled
from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.idle_limit import MAX_GHOSTS, MAX_IDLE_FRACTION, IdleLimit
from uma_trio.daemon.kv.pool import KvMemory
from uma_trio.daemon.kv_events.blocks import BlockIndex
from uma_trio.engine_link.adapters import NO_ADAPTERS, AdapterSet
from uma_trio.engine_link.kv_ops import CopyPrefix, DropCheckpoint, KvOp, SaveCheckpoint, Truncate
from uma_trio.engine_link.media import PLACEHOLDER, before_picture
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS

ADAPTERS = {"": NO_ADAPTERS, "x": AdapterSet(((0, 1.0),), "x"), "y": AdapterSet(((0, 0.5),), "y")}

KEEP_ROWS = 300


def not_in_picture(tokens: list[int], length: int) -> int:
    """``length``, or where the picture begins that would be cut there."""
    return before_picture(np.asarray(tokens, np.int32), length)


def owner(allocation: Allocation) -> str:
    """The principal with its adapters, as the rules name it."""
    key = allocation.adapters.key
    return f"{allocation.principal}+{key}" if key else allocation.principal


@attrs.define
class Request:
    name: int
    story: list[int]
    """Its prompt and the tokens that it will generate."""
    n_prompt: int
    principal: str
    rank: int
    private: bool
    cells: int
    waits: bool
    held: int
    in_flight: int = 0
    """Tokens that the running step computes, which the cache does not count yet."""


@attrs.frozen
class Cell:
    """One token in the engine, and the request that computed it."""

    token: int
    name: int
    principal: str
    private: bool


Sequences = dict[int, list[Cell]]


@attrs.define
class Plain:
    """The plainest engine."""

    most: int | None
    """Maximum number of checkpoints; ``None`` if the memory can be truncated without."""
    sequences: Sequences = attrs.field(factory=dict)
    checkpoints: Sequences = attrs.field(factory=dict)
    """Tokens of each checkpoint, by number."""

    def after(self, ops: Iterable[KvOp]) -> Plain:
        """Return a copy in which ``ops`` have run; each of them must be valid."""
        there = Plain(
            self.most, {seq_id: list(cells) for seq_id, cells in self.sequences.items()}, dict(self.checkpoints)
        )
        for op in ops:
            there.do(op)
        return there

    def do(self, op: KvOp) -> None:
        if isinstance(op, CopyPrefix):
            assert not self.sequences.get(op.target)
            assert 0 < op.length <= len(self.sequences[op.source])
            self.sequences[op.target] = list(self.sequences[op.source])
            self.cut(op.target, op.length, op.checkpoint)
        elif isinstance(op, Truncate):
            self.cut(op.seq_id, op.length, op.checkpoint)
        elif isinstance(op, SaveCheckpoint):
            assert op.checkpoint not in self.checkpoints
            assert self.most is not None
            assert len(self.checkpoints) < self.most
            self.checkpoints[op.checkpoint] = list(self.sequences[op.seq_id])
        elif isinstance(op, DropCheckpoint):
            self.checkpoints.pop(op.checkpoint, None)

    def cut(self, seq_id: int, length: int, checkpoint: int | None) -> None:
        cells = self.sequences.setdefault(seq_id, [])
        assert not_in_picture([cell.token for cell in cells], length) == length
        if checkpoint is not None:  # allowed for a whole sequence too: a running step might have appended to it
            assert self.most is not None
            assert [cell.token for cell in self.checkpoints[checkpoint]] == [cell.token for cell in cells[:length]]
        else:
            assert self.most is None or length in (0, len(cells))
        del cells[length:]


seqs = st.sets(st.integers(0, 7), max_size=2)


class CacheMachine(RuleBasedStateMachine):
    """Runs a cache and the plainest engine side by side."""

    @initialize(
        n=st.sampled_from([8, 5, 3, 2, 1]),
        cells=st.sampled_from([600, 1200, 200, 100]),
        unified=st.booleans(),
        can_truncate=st.sampled_from([True, True, False]),
        reuse=st.sampled_from([True] * 5 + [False]),
        checkpoints=st.sampled_from([64, 3, 0]),
        min_idle=st.sampled_from([None, 60, 20]),
    )
    def start(
        self, n: int, cells: int, unified: bool, can_truncate: bool, reuse: bool, checkpoints: int, min_idle: int | None
    ) -> None:
        """``min_idle`` is set if attention scans the whole cache."""
        self.whole_only = not can_truncate and not checkpoints
        self.n, self.unified, self.can_truncate, self.reuse = n, unified, can_truncate, reuse
        self.most = cells
        self.n_cells = cells if unified else n * cells
        self.limit = None
        if unified and min_idle is not None:
            self.limit = IdleLimit(self.n_cells, min_cells=min_idle, keep_rows=KEEP_ROWS)
        self.cache = KvCache(
            KvMemory(
                n_sequences=n,
                n_cells=self.n_cells,
                cells_per_sequence=cells,
                unified=unified,
                can_truncate=can_truncate,
                max_checkpoints=checkpoints,
            ),
            reuse=reuse,
            idle_limit=self.limit,
        )
        self.engine = Plain(None if can_truncate else checkpoints)
        self.requests: dict[int, Request] = {}
        self.stories: list[list[int]] = []
        """Stories of earlier requests.  Later requests share their prefixes."""
        self.names = iter(range(1 << 30))
        self.held_prefixes, self.blocks, self.subscriber = self.cache.held_prefixes(BLOCK), BlockIndex(), Rebuilt()
        self.n_invariants = 0

    # -- rules

    @rule(
        n=st.sampled_from([1, 2, 8]),
        like=st.integers(0, 5),
        same=st.sampled_from([1.0, 0.9, 0.5, 0.0]),
        n_new=st.sampled_from([20, 1, 60]),
        answer=st.sampled_from([10, 1, 40]),
        variant=st.integers(0, 1),
        principal=st.sampled_from(["a", "a", "a", "b", "a+x", "a+y"]),
        rank=st.sampled_from([1, 1, 0, 2]),
        private=st.sampled_from([False] * 7 + [True]),
        late=st.sampled_from([False, False, True]),
        durable=st.sampled_from([False, False, True]),
        picture=st.sampled_from([False, False, True]),
    )
    def arrive(
        self,
        n: int,
        like: int,
        same: float,
        n_new: int,
        answer: int,
        variant: int,
        principal: str,
        rank: int,
        private: bool,
        late: bool,
        durable: bool,
        picture: bool,
    ) -> None:
        """``n`` requests that share a prefix with an earlier one and with each other.

        Args:
            picture: the new tokens are the rows of one.
            late: only their first tokens are known when they get a sequence, as with a controller.
        """
        old = self.stories[-like - 1 :][0] if self.stories else []
        new = [PLACEHOLDER + variant] * n_new if picture else range(variant, variant + n_new)
        begin = [*old[: int(same * len(old))], *new, 0]
        for i in range(n):
            prompt = [*begin, i] if n > 1 else begin
            story = [*prompt, *range(100 + variant, 100 + variant + answer)]
            late = late and not self.whole_only
            durable = durable and self.limit is not None and self.can_truncate
            self.ask(prompt, story, principal, rank, private, late=late, durable=durable)

    def ask(
        self,
        prompt: list[int],
        story: list[int],
        principal: str,
        rank: int,
        private: bool,
        *,
        late: bool,
        durable: bool,
    ) -> None:
        cells = len(story) - 1
        array = np.asarray(prompt, dtype=np.int32)
        if cells > self.most:
            with pytest.raises(ValueError, match=str(cells)):
                place(self.cache, array, cells)
            return
        idle = {seq_id: len(held) for seq_id, held in self.idle().items()}
        best = self.longest_idle(prompt, principal) if self.can_truncate else self.furthest_idle(prompt, principal)
        before, ops = self.cache.held(), list(self.cache._pool.ops)
        options = {
            "principal": principal.partition("+")[0],
            "adapters": ADAPTERS[principal.partition("+")[2]],
            "rank": rank,
            "private": private,
            "durable": durable,
        }
        placement = place(self.cache, array[:1] if late else array, cells, **options)
        if placement is None and self.unsaved():
            self.save()
            placement = place(self.cache, array[:1] if late else array, cells, **options)
        free_cells = self.n_cells - sum(request.cells for request in self.requests.values())
        assert (placement is not None) == (cells <= free_cells and len(self.requests) < self.n)
        if placement is None:
            assert (self.cache.held(), self.cache._pool.ops) == (before, ops), "evicted without making room"
            return
        self.check_evicted(idle, self.cache._pool.ops[len(ops) :], placement.seq_id, cells, free_cells)
        if late:
            assert (placement.n_cached, placement.waits) == (0, False)
            best = best if self.unified and set(idle) <= set(self.idle()) else 0  # a short copy does not pay otherwise
            placement = share_prefix(self.cache, placement.seq_id, array)
        assert placement.n_cached < len(prompt)
        assert not (placement.waits and placement.n_cached)
        if self.whole_only:
            assert not placement.waits
            assert placement.n_cached in (0, idle.get(placement.seq_id))
        if best >= MIN_SHARED_TOKENS and not private:
            assert placement.n_cached >= best or placement.waits
        if private or not self.reuse:
            assert (placement.n_cached, placement.waits) == (0, False)
        self.stories.append(story)
        self.requests[placement.seq_id] = Request(
            next(self.names), story, len(prompt), principal, rank, private, cells, placement.waits, placement.n_cached
        )

    def unsaved(self) -> list[Allocation]:
        """Idle sequences of sessions that must be saved before they may be evicted."""
        return [allocation for allocation in self.cache.idle if allocation.needs_save]

    @rule()
    def save(self) -> None:
        for allocation in self.unsaved():
            self.cache.offload.give_up(allocation)

    def longest_idle(self, prompt: list[int], principal: str) -> int:
        """Longest prefix of ``prompt`` in an idle sequence of the same principal."""
        found = [0]
        for seq_id, held in self.idle().items():
            if owner(self.cache._pool.allocations[seq_id]) == principal:
                same = [a == b for a, b in zip(prompt[:-1], held, strict=False)]
                found.append(not_in_picture(held, ([*same, False]).index(False)))
        return max(found)

    def furthest_idle(self, prompt: list[int], principal: str) -> int:
        """The same for memories that reuse whole sequences and checkpoints only."""
        found = [0]
        for seq_id, held in self.idle().items():
            allocation = self.cache._pool.allocations[seq_id]
            if owner(allocation) == principal:
                lengths = [len(held), *(point.length for point in allocation.checkpoints)]
                found += [n for n in lengths if n < len(prompt) and prompt[:n] == held[:n]]
        return max(found)

    def check_evicted(
        self, idle: dict[int, int], new: Iterable[KvOp], seq_id: int, cells: int, free_cells: int
    ) -> None:
        """Evicts no more than needed, the longest idle first except for the source of a copy."""
        evicted = [op.seq_id for op in new if isinstance(op, Truncate) and not op.length]
        if not evicted:
            return
        taken = 0 if seq_id in evicted else idle.get(seq_id, 0)
        free_ids = self.n - len(self.requests) - len(idle)
        for n in (len(evicted) - 1, len(evicted)):
            room = free_cells - sum(idle.values()) + taken + sum(idle[other] for other in evicted[:n]) >= cells
            assert (room and (bool(taken) or free_ids + n > 0)) == (n == len(evicted))
        if self.cache.memory.unified or len(self.requests) <= 2:  # otherwise the neighbours of busy ones go first
            longer = list(idle)[: list(idle).index(evicted[-1])]
            assert len(set(longer) - set(evicted)) <= 1

    @rule(most=st.sampled_from([400, 30, 5, 1]), slow=seqs, stalled=seqs)
    def step(self, most: int, slow: set[int], stalled: set[int]) -> None:
        """Begin a step as the scheduler does, and feed up to ``most`` tokens a request."""
        stalled = stalled & set(self.requests)
        names = {request.name for seq_id, request in self.requests.items() if seq_id not in stalled | slow}
        self.begin_step(stalled, names)
        for seq_id, request in self.requests.items():
            if not request.waits and request.name in names:
                self.feed(seq_id, most)

    def begin_step(self, stalled: Collection[int], names: Collection[int]) -> None:
        """Run everything that precedes the computation of a step which feeds the requests ``names``."""
        self.complete()
        ready = dict(followed(self.cache, stalled))
        for seq_id, held in ready.items():
            request = self.requests[seq_id]
            assert request.waits
            request.waits, request.held = False, held
            assert held < request.n_prompt
        self.settle(names)
        scanned = self.cache.cells_scanned()
        held = self.engine.after(self.cache._pool.ops).sequences.values()
        assert self.distinct(held) <= scanned <= self.n_cells or not self.unified
        ops = self.cache.take_ops()
        if not self.unified:
            assert sum(isinstance(op, CopyPrefix) for op in ops) <= 1
        elif self.requests:
            self.check_limits()
        if self.whole_only:
            assert all(op == Truncate(op.seq_id) for op in ops)
        self.engine = self.engine.after(ops)
        self.check_waiting(stalled, ready, ops)

    def check_limits(self) -> None:
        """Idle sequences keep no more than they may while a request runs."""
        cached = self.cache.statistics().cached_cells
        assert cached <= MAX_IDLE_FRACTION * self.n_cells or any(each.cells_wanted for each in self.unsaved())
        if self.limit is not None:
            assert cached - sum(each.reserved for each in self.unsaved()) <= self.limit.cells
            others = [each.reserved - each.n_reused for each in self.cache.idle if not each.needs_save]
            assert min(others, default=0) >= 0
            assert sum(others) <= self.limit.min_cells
            assert all(self.limit.n_rows - each.used_at <= KEEP_ROWS for each in self.cache.idle if each.n_reused)

    def settle(self, names: Collection[int]) -> None:
        """A request that starts may move to another sequence."""
        for seq_id, request in list(self.requests.items()):
            if request.name in names and not request.waits and not request.held:
                moved = settle(self.cache, seq_id)
                assert moved == seq_id or not self.unified
                del self.requests[seq_id]
                assert moved not in self.requests
                self.requests[moved] = request

    def check_waiting(self, stalled: Collection[int], ready: Collection[int], ops: Collection[KvOp]) -> None:
        """Each waiting request has a leader that will hold the prefix, or waits for its turn to be copied."""
        for seq_id, request in self.requests.items():
            if not request.waits:
                continue
            leader = self.cache._pool.allocations[seq_id].leader
            assert leader is not None
            if not self.unified and (leader.is_idle or any(isinstance(op, CopyPrefix) for op in ops)):
                continue  # waits for its turn, or for the next call of ``followed``
            assert self.cache._pool.allocations[leader.seq_id] is leader, "waits for a request that has ended"
            other = self.requests[leader.seq_id]
            assert other.rank <= request.rank
            assert leader.seq_id not in stalled
            assert other.held < self.cache._pool.allocations[seq_id].n_awaited or leader.seq_id in ready
            met = set()
            while leader is not None:
                assert leader.seq_id not in met, "requests wait for each other"
                met.add(leader.seq_id)
                leader = leader.leader

    def feed(self, seq_id: int, most: int) -> None:
        request = self.requests[seq_id]
        n = min(most, (next_pause(self.cache, seq_id) or request.cells) - request.held)
        fed = request.story[request.held : request.held + n]
        cells = [Cell(token, request.name, request.principal, request.private) for token in fed]
        held = self.engine.sequences.setdefault(seq_id, [])
        assert len(held) == request.held
        held += cells
        request.in_flight = n

    def complete(self) -> None:
        """End the running step."""
        for seq_id in self.requests:
            self.count(seq_id)

    def count(self, seq_id: int) -> None:
        """Tell the cache what the running step computes for ``seq_id``."""
        request = self.requests[seq_id]
        if request.in_flight:
            request.held += request.in_flight
            request.in_flight = 0
            advance(self.cache, seq_id, request.held)

    @rule()
    def land(self) -> None:
        self.complete()

    @rule()
    def plan_ahead(self) -> None:
        """Plan a step while one is in flight, and drop the plan."""
        if self.unified and self.requests:
            n = sum(request.in_flight for request in self.requests.values())
            assert self.cache.cells_scanned(n) <= self.n_cells
            self.cache.put_back(self.cache.take_ops(in_flight=True))

    @rule(which=st.integers(0, 7), lost=st.sampled_from([0, 0, 0, 5]))
    def finish(self, which: int, lost: int) -> None:
        """End a request; ``lost`` tokens at its end are not kept, such as those behind a stop string."""
        able = [
            seq_id for seq_id, request in self.requests.items() if request.held + request.in_flight == request.cells
        ]
        able = able or [seq_id for seq_id, request in self.requests.items() if not request.waits]
        if able:
            seq_id = able[which % len(able)]
            self.count(seq_id)
            request = self.requests.pop(seq_id)
            n = max(0, request.held - lost)
            release(self.cache, seq_id, np.asarray(request.story[:n], dtype=np.int32))

    @rule(which=st.integers(0, 7))
    def cancel(self, which: int) -> None:
        if self.requests:
            seq_id = list(self.requests)[which % len(self.requests)]
            release(self.cache, seq_id)
            del self.requests[seq_id]

    @rule(which=st.integers(0, 7), n=st.integers(1, 8))
    def reject_drafts(self, which: int, n: int) -> None:
        able = [seq_id for seq_id, request in self.requests.items() if request.held > request.n_prompt]
        if able and self.can_truncate:
            seq_id = able[which % len(able)]
            self.count(seq_id)
            request = self.requests[seq_id]
            request.held = max(request.n_prompt, request.held - n)
            truncate(self.cache, seq_id, request.held)

    @rule(which=st.integers(0, 7), n=st.integers(1, 60))
    def go_back(self, which: int, n: int) -> None:
        """A request goes on with other tokens after some of its first ones, also inside of its prompt."""
        able = [seq_id for seq_id, request in self.requests.items() if request.held > 1 and not request.in_flight]
        if able:
            seq_id = able[which % len(able)]
            request = self.requests[seq_id]
            length = max(1, request.held - n)
            assert backtrack(self.cache, seq_id, length)
            request.held = self.cache._pool.allocations[seq_id].n_tokens
            request.n_prompt = min(request.n_prompt, length)
            request.story = [*request.story[:length], *range(500, 500 + len(request.story) - length)]

    @precondition(lambda self: self.requests)
    @rule(lost=st.booleans())
    def fail(self, lost: bool) -> None:
        """A step fails and all requests start over.  If the cache is not lost, its content is unknown."""
        self.cache.clear(lost=lost)
        for cells in self.engine.sequences.values():
            del cells[0 if lost else len(cells) // 2 :]
        if lost:
            self.engine.checkpoints.clear()
        for request in self.requests.values():
            request.held = request.in_flight = 0

    # -- invariants

    def idle(self) -> dict[int, list[int]]:
        return {seq_id: allocation.tokens.tolist() for seq_id, allocation in self.cache._pool.idle.items()}

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        kv, idle = self.cache.statistics(), self.idle()
        assert kv.sequences == len(self.requests)
        assert kv.cells_reserved == sum(request.cells for request in self.requests.values())
        assert (kv.cached_sequences, kv.cached_cells) == (len(idle), sum(map(len, idle.values())))
        if self.limit is not None:
            assert self.limit.min_cells <= self.limit.cells <= self.limit.max_cells <= MAX_IDLE_FRACTION * self.n_cells
            assert len(self.limit.ghosts) <= MAX_GHOSTS
            assert sum(len(ghost.tokens) for ghost in self.limit.ghosts) <= self.limit.max_ghost_tokens
        assert kv.cells_reserved + kv.cached_cells <= kv.cells == self.n_cells
        assert not set(idle) & set(self.requests)

    @invariant()
    def engine_and_cache_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        there = self.engine.after(self.cache._pool.ops)
        engine = {seq_id: cells for seq_id, cells in there.sequences.items() if cells}
        assert set(there.checkpoints) == {
            point.id for allocation in self.cache._pool.allocations.values() for point in allocation.checkpoints
        }
        for seq_id, allocation in self.cache._pool.allocations.items():
            for point in allocation.checkpoints:
                saved = [cell.token for cell in there.checkpoints[point.id]]
                assert saved == [cell.token for cell in engine[seq_id][: point.length]]
        counted = {seq_id: len(cells) for seq_id, cells in engine.items()}
        for seq_id, request in self.requests.items():
            if request.in_flight:
                counted[seq_id] -= request.in_flight
        assert {seq_id: n for seq_id, n in counted.items() if n} == self.cache.held()
        computed = {seq_id: cells[: counted[seq_id]] for seq_id, cells in engine.items()}
        running = [cells for seq_id, cells in computed.items() if seq_id in self.requests]
        assert self.cache.statistics().cells_used == self.distinct(running)
        assert sum(map(len, engine.values())) <= self.n_cells
        for seq_id, request in self.requests.items():
            cells = engine.get(seq_id, [])
            assert [cell.token for cell in cells] == request.story[: request.held + request.in_flight]
            assert {cell.principal for cell in cells} <= {request.principal}, "principals share"
            for cell in cells:
                assert cell.name == request.name or not (cell.private or request.private), "private requests share"
        for seq_id, idle in self.idle().items():
            assert [cell.token for cell in engine[seq_id]] == idle
            assert not any(cell.private for cell in engine[seq_id])

    @invariant()
    def events_tell_what_others_may_share(self) -> None:
        """Also where several changes come at once."""
        if not hasattr(self, "cache"):
            return
        self.n_invariants += 1
        if self.n_invariants % 3 and (changed := self.held_prefixes.changed()) is not None:
            self.subscriber.apply(msgspec.to_builtins(self.blocks.update(changed)))
            assert self.subscriber.blocks == held_by(self.cache)
            late = Rebuilt()
            late.apply(msgspec.to_builtins(self.blocks.everything()))
            assert late.blocks == self.subscriber.blocks

    def distinct(self, sequences: Iterable[list[Cell]]) -> int:
        """Cells that ``sequences`` take; with unified KV, a copied token is in the same cell."""
        cells = [id(cell) for each in sequences for cell in each]
        return len(set(cells) if self.unified else cells)

    def teardown(self) -> None:
        """No request waits for ever: without stalls all complete after a few steps, and the cache is usable again."""
        if not hasattr(self, "cache"):
            return
        for _ in range(2 * self.n + 2 if self.can_truncate else 4 * self.n + 4):  # prefill pauses
            self.begin_step((), {request.name for request in self.requests.values()})
            for seq_id, request in self.requests.items():
                if not request.waits:
                    self.feed(seq_id, request.cells)
            self.engine_and_cache_agree()
        self.complete()
        assert all(request.held == request.cells for request in self.requests.values())
        for seq_id in self.requests:
            release(self.cache, seq_id)
        self.save()
        assert place(self.cache, np.zeros(self.most, dtype=np.int32), self.most, private=True) is not None


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=amount(quick=40, thorough=1000), stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("checkpoints", sampled([None, 0, 5, 100], 4))
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_long_runs(n: int, unified: bool, checkpoints: int | None) -> None:
    """Run the rules at realistic frequencies.  ``checkpoints`` is ``None`` for memories that can be truncated."""
    live(n, unified, checkpoints, random.Random(n))


def live(n: int, unified: bool, checkpoints: int | None, chance: random.Random) -> None:
    for cells in (100, 300, 600):
        machine = CacheMachine()
        can_truncate = checkpoints is None
        machine.start(
            n,
            cells * (n if unified else 1),
            unified,
            can_truncate,
            reuse=True,
            checkpoints=checkpoints or 0,
            min_idle=chance.choice([None, 30]),
        )
        for _ in range(amount(quick=200, thorough=2000)):
            some = {chance.randrange(8) for _ in range(chance.choice([0, 0, 0, 1, 2]))}
            rules = {
                "arrive": 25,
                "step": 50,
                "finish": 20,
                "cancel": 4,
                "reject": 10,
                "back": 5,
                "save": 5,
                "ahead": 9,
                "fail": 0.3,
            }
            match chance.choices([*rules], [*rules.values()])[0]:
                case "arrive":
                    machine.arrive(
                        n=chance.choice([1, 1, 2, n]),
                        like=chance.randrange(6),
                        same=chance.choice([1.0, 0.9, 0.5, 0.0]),
                        n_new=chance.choice([1, 20, 60]),
                        answer=chance.choice([1, 10, 40]),
                        variant=chance.randrange(2),
                        principal=chance.choice(["a", "a", "a", "b", "a+x", "a+y"]),
                        rank=chance.choice([0, 1, 1, 2]),
                        private=chance.random() < 0.1,
                        late=chance.random() < 0.3,
                        durable=chance.random() < 0.3,
                        picture=chance.random() < 0.3,
                    )
                case "step":
                    machine.step(
                        chance.choice([400, 30, 5, 1]), some, {seq_id for seq_id in some if chance.random() < 0.5}
                    )
                case "finish":
                    machine.finish(chance.randrange(8), chance.choice([0, 0, 5]))
                case "cancel":
                    machine.cancel(chance.randrange(8))
                case "reject":
                    machine.reject_drafts(chance.randrange(8), chance.randint(1, 8))
                case "back":
                    machine.go_back(chance.randrange(8), chance.randint(1, 60))
                case "ahead":
                    machine.plan_ahead()
                case "save":
                    machine.save()
                case "fail":
                    machine.fail(chance.random() < 0.5)
            machine.adds_up()
            machine.engine_and_cache_agree()
            machine.events_tell_what_others_may_share()
        machine.teardown()
