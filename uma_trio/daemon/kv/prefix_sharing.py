"""Prefix reuse between requests of one principal.

A request does not compute tokens that another sequence already holds.  It continues an idle sequence in place, copies
a prefix of an idle or busy one, or waits for a sequence that is still computing the shared prefix.  Only sequences of
the same principal count, because the response time would reveal the prompts of others, and only those with the same
adapters, because keys and values depend on them.

A prompt is compared with every sequence.  A context has at most 256 sequences and a comparison of 2,000 tokens takes
2 us, so there is no tree to update with each token and each eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.pool import Pool
from uma_trio.daemon.kv.truncation import Truncation
from uma_trio.engine_link.kv_ops import CopyPrefix
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds, common_prefix
from uma_trio.protocol.usage import Obstacle


class Match(NamedTuple):
    """The best source for the prefix of a prompt."""

    source: Allocation | None
    """``None`` if no sequence has enough of the prompt."""
    n_shared: int
    """Tokens that the request can get from ``source``, now or later."""
    n_in_common: int
    """Longest common prefix with any sequence, including tokens that cannot be reused."""
    nearest: TokenIds | None
    """The tokens of the sequence with this prefix; of several, the one that became idle last."""
    obstacle: Obstacle | None = None
    """If the request does not get these tokens: why."""


class PrefixSharing:
    """Finds shared prefixes among the sequences of ``pool``, and copies them.

    Args:
        worth_copying: whether copying so many tokens between separate sequences, which moves all cells of one, is faster
            than computing them; ``None``: nobody knows.
    """

    def __init__(self, pool: Pool, truncation: Truncation, worth_copying: Callable[[int], bool] | None = None) -> None:
        self._pool = pool
        self._truncation = truncation
        self.followers: dict[Allocation, None] = {}
        """Allocations that wait for their leader, by arrival."""
        self._worth_copying = worth_copying

    def find(
        self, allocation: Allocation, *, stalled: Collection[int] = (), excluded: Collection[Allocation] = ()
    ) -> Match:
        """Find the sequence that saves ``allocation`` most of its prefill.

        Args:
            stalled: ids of sequences that do not advance; only the tokens that they hold count.
            excluded: allocations to ignore.
        """
        if allocation.private:
            return Match(None, 0, 0, None)
        truncation = self._truncation
        prompt = allocation.tokens[:-1]  # the last token is always computed, for its logits
        source: Allocation | None = None
        nearest, n_in_common = None, 0
        best = (MIN_SHARED_TOKENS, -1, False, 0)
        for other in self._pool.allocations.values():
            if not other.may_share(allocation) or other.private or other is allocation or other in excluded:
                continue
            if len(prompt) < best[0] or len(other.tokens) < best[0] or other.waits_for(allocation):
                continue
            shared = common_prefix(prompt, other.tokens)
            if nearest is None or (shared, other.idle_since) > (n_in_common, nearest.idle_since):
                nearest, n_in_common = other, shared
            if other.is_idle:
                shared = truncation.longest_within(other, shared)
            else:
                may_wait = other.rank <= allocation.rank and other.seq_id not in stalled
                shared = truncation.shareable(other, shared, may_wait=may_wait)
            # among equals prefer tokens that are there, an idle sequence, and one with few tokens after the prefix
            quality = (shared, min(shared, other.n_tokens), other.is_idle, -other.n_tokens)
            if quality > best:
                source, best = other, quality
        n_shared = 0 if source is None else best[0]
        if nearest is None:
            return Match(source, n_shared, n_in_common, None)
        obstacle: Obstacle = "computing"
        if not self._is_worth_copying(n_in_common):
            obstacle = "short"
        elif n_shared < n_in_common and (nearest.is_idle or not truncation.can_truncate):
            obstacle = "checkpoint"
        return Match(source, n_shared, n_in_common, nearest.tokens, obstacle)

    def may_take_over(self, source: Allocation, n_shared: int) -> bool:
        """Whether the tokens of ``source`` after the shared prefix may be removed."""
        return source.n_tokens - n_shared <= n_shared and not self.would_lose_unsaved(source, n_shared)

    def would_lose_unsaved(self, source: Allocation, n_shared: int) -> bool:
        """Whether ``source`` has many tokens after the shared prefix and must be saved first."""
        return source.n_tokens - n_shared >= MIN_SHARED_TOKENS and source.needs_save

    def take_over(self, source: Allocation, n_shared: int, allocation: Allocation) -> None:
        """Let ``allocation`` continue the sequence of ``source``, which is idle, after the shared prefix."""
        self._truncation.truncate(source, n_shared)
        self._pool.hand_over(source, allocation)
        self._truncation.save_checkpoint(allocation)

    def branch(self, allocation: Allocation, source: Allocation, n_shared: int) -> None:
        """Copy the shared prefix to ``allocation``, which holds no tokens, now or when ``source`` has computed it."""
        if not self._is_worth_copying(n_shared):
            return
        if source.n_tokens < n_shared or self._copy_is_pending:
            allocation.leader, allocation.n_awaited = source, n_shared
            self.followers[allocation] = None
            self._truncation.add_pause(source, n_shared)
        else:
            self._truncation.copy_prefix(source, allocation, n_shared)

    def _is_worth_copying(self, n_tokens: int) -> bool:
        if n_tokens < MIN_SHARED_TOKENS or self._pool.memory.unified:
            return n_tokens >= MIN_SHARED_TOKENS
        if self._worth_copying is None:
            return n_tokens >= self._pool.memory.cells_per_sequence // 64
        return self._worth_copying(n_tokens)

    def stop_waiting(self, allocation: Allocation) -> None:
        """``allocation`` no longer waits for a leader."""
        allocation.leader = None
        self.followers.pop(allocation, None)

    def followed(self, stalled: Collection[int]) -> list[Allocation]:
        """Copy prefixes that are complete, and return the allocations that no longer wait.

        Args:
            stalled: ids of sequences that do not advance; nobody waits for them.
        """
        leaderless: dict[Allocation, None] = {}
        ready = []
        for allocation in list(self.followers):
            leader = allocation.leader
            assert leader is not None
            if not self._pool.has(leader) or not self._will_provide(leader, allocation, stalled):
                leaderless[allocation] = None
            elif leader.n_tokens >= allocation.n_awaited and not self._copy_is_pending:
                self._truncation.copy_prefix(leader, allocation, allocation.n_awaited)
                self.stop_waiting(allocation)
                ready.append(allocation)
        while leaderless:  # the first one takes what its leader has computed, and the others may follow it
            allocation = next(iter(leaderless))
            source, n_shared, *_ = self.find(allocation, stalled=stalled, excluded=leaderless)
            del leaderless[allocation]
            self.stop_waiting(allocation)
            if source is not None:
                self.branch(allocation, source, n_shared)
            if allocation.leader is None:
                ready.append(allocation)
        return ready

    def _will_provide(self, leader: Allocation, allocation: Allocation, stalled: Collection[int]) -> bool:
        """Whether ``leader`` holds the prefix that ``allocation`` waits for, or will."""
        if len(leader.tokens) < allocation.n_awaited:  # a part of it was removed
            return False
        if leader.n_tokens >= allocation.n_awaited:
            return self._truncation.longest_within(leader, allocation.n_awaited) == allocation.n_awaited
        return not leader.is_idle and leader.rank <= allocation.rank and leader.seq_id not in stalled

    @property
    def _copy_is_pending(self) -> bool:
        """The next step already has a copy between separate caches.  A second one would delay all its streams."""
        return not self._pool.memory.unified and any(isinstance(op, CopyPrefix) for op in self._pool.ops)

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the allocations with a leader wait."""
        everyone = self._pool.allocations.values()
        assert set(self.followers) == {allocation for allocation in everyone if allocation.leader is not None}
