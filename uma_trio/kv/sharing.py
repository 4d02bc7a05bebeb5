"""Where a prompt begins: whose tokens it goes on from, at once or when they have been read.

A request whose prompt begins like a sequence's tokens does not compute them again: it goes on where an idle sequence
ends or branches off, gets a copy of a busy one's beginning, or, where that one is still being read, waits for it.  Of
all that only the owner, a tenant, can see anything: how fast an answer comes would tell others what was asked.

Prefixes are found by comparing the prompt with each sequence, of which a context has 256 at most: 2 us for one
of 2,000 tokens, and no tree to be kept up with each token and each eviction.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from uma_trio.kv.edits import Copy
from uma_trio.kv.entry import Entry
from uma_trio.kv.pool import Pool
from uma_trio.kv.prefix import WORTH_SHARING, common
from uma_trio.kv.rewinding import Rewinding


class Match(NamedTuple):
    """What there is of a prompt."""

    source: Entry | None
    shared: int
    """Tokens that can be had from ``source``, now or later; a few are not worth it, then ``source`` is ``None``."""
    meets: int
    """Tokens that it has in common with some sequence, be they of use or not."""


class Sharing:
    """Finds for each prompt what sequences of ``pool`` have of it, and gets it there."""

    def __init__(self, pool: Pool, rewinding: Rewinding) -> None:
        self._pool = pool
        self._rewinding = rewinding
        self.followers: dict[Entry, None] = {}
        """Those that wait for a leader, in the order in which they came."""
        # a copy between streams moves the whole of a sequence's share: some tokens are computed sooner
        self._worth_copying = WORTH_SHARING if pool.unified else max(WORTH_SHARING, pool.cells_per_sequence // 64)

    def longest(self, entry: Entry, *, stalled: Collection[int] = (), besides: Collection[Entry] = ()) -> Match:
        """The sequence of which most tokens are of use for ``entry``'s prompt.

        Args:
            stalled: ids of sequences; nobody waits for these, and what they hold is of use.
            besides: these are of none.
        """
        if entry.private:
            return Match(None, 0, 0)
        rewinding = self._rewinding
        prompt = entry.tokens[:-1]
        found: Entry | None = None
        meets = 0
        best = (WORTH_SHARING, -1, False, 0)
        for other in self._pool.entries.values():
            if other.tenant != entry.tenant or other.private or other is entry or other in besides:
                continue
            if len(prompt) < best[0] or len(other.tokens) < best[0] or other.waits_for(entry):
                continue
            shared = common(prompt, other.tokens)
            meets = max(meets, shared)
            if other.idle:
                shared = rewinding.within(other, shared)
            else:
                waits = other.rank <= entry.rank and other.seq_id not in stalled
                shared = rewinding.reach(other, shared, waits=waits)
            # of equals one that need not be waited for, is free for the taking, and has little behind what is shared
            quality = (shared, min(shared, other.used), other.idle, -other.used)
            if quality > best:
                found, best = other, quality
        return Match(found, 0 if found is None else best[0], meets)

    def may_take_over(self, source: Entry, shared: int) -> bool:
        """Whether what ``source`` holds behind the shared beginning may be lost."""
        return source.used - shared <= shared and not self.loses(source, shared)

    def loses(self, source: Entry, shared: int) -> bool:
        """Whether more than a few tokens behind the shared beginning are nowhere else."""
        return source.used - shared >= WORTH_SHARING and source.unsaved

    def take_over(self, source: Entry, shared: int, entry: Entry) -> None:
        """``entry`` goes on with the sequence of ``source``, which is idle."""
        self._pool.hand_over(source, entry)
        self._rewinding.cut(entry, shared)
        self._rewinding.mark(entry)

    def branch(self, entry: Entry, source: Entry, shared: int) -> None:
        """``entry``, which holds nothing, gets what it shares with ``source``, now or later."""
        if shared < self._worth_copying:
            return
        if source.used < shared or self._is_crowded:
            entry.leader, entry.until = source, shared
            self.followers[entry] = None
            self._rewinding.promise(source, shared)
        else:
            self._rewinding.copy(source, entry, shared)

    def leave(self, entry: Entry) -> None:
        """``entry`` waits for nobody any more."""
        entry.leader = None
        self.followers.pop(entry, None)

    def followed(self, stalled: Collection[int]) -> list[tuple[int, int]]:
        """Those that need to wait for another sequence no longer: (sequence, tokens that it holds).

        Args:
            stalled: ids of sequences that do not advance; nobody waits for them.
        """
        left: dict[Entry, None] = {}
        """Their leaders are gone, or will not come to hold what was waited for."""
        ready = []
        for entry in list(self.followers):
            leader = entry.leader
            assert leader is not None
            if not self._pool.has(leader) or not self._comes_to(leader, entry, stalled):
                left[entry] = None
            elif leader.used >= entry.until and not self._is_crowded:
                self._rewinding.copy(leader, entry, entry.until)
                self.leave(entry)
                ready.append((entry.seq_id, entry.used))
        while left:  # the first goes on with what its leader had, and the others follow it
            entry = next(iter(left))
            source, shared, _ = self.longest(entry, stalled=stalled, besides=left)
            del left[entry]
            self.leave(entry)
            if source is not None:
                self.branch(entry, source, shared)
            if entry.leader is None:
                ready.append((entry.seq_id, entry.used))
        return ready

    def _comes_to(self, leader: Entry, entry: Entry, stalled: Collection[int]) -> bool:
        """Whether ``leader`` has what ``entry`` waits for, or will have it."""
        if leader.used >= entry.until:
            return self._rewinding.within(leader, entry.until) == entry.until
        return not leader.idle and leader.rank <= entry.rank and leader.seq_id not in stalled

    @property
    def _is_crowded(self) -> bool:
        """A copy between streams takes its time: one a step, or everybody would wait for all of them."""
        return not self._pool.unified and any(isinstance(edit, Copy) for edit in self._pool.edits)

    def check_integrity(self) -> None:
        """Who has a leader waits, or AssertionError."""
        assert set(self.followers) == {entry for entry in self._pool.entries.values() if entry.leader is not None}
