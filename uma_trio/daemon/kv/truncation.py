"""How far a sequence can be truncated, and where prefill saves checkpoints for that.

A recurrent memory cannot be truncated; it can only be restored from a checkpoint.  A request that continues a sequence
saves a checkpoint where the previous turn ended, before it computes its first token.  Prefill pauses for all others:

- where a waiting request will diverge from this prompt,
- where this prompt diverges from an earlier one,
- at some lengths inside a long new stretch,
- shortly before the end of the prompt.

No checkpoint is inside a picture, because a picture cannot be cut: all its rows may have one position.  Such a
checkpoint moves in front of the picture.
"""

from __future__ import annotations

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.checkpoints import MIN_SPACING, TOKENS_AFTER_LAST, latest, least_useful, speculative_lengths
from uma_trio.daemon.kv.pool import Pool
from uma_trio.engine_link.kv_ops import MAX_CHECKPOINTS, CopyPrefix, SaveCheckpoint, Truncate
from uma_trio.engine_link.media import before_picture


class Truncation:
    """Truncates and copies the sequences of ``pool``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.can_truncate = pool.memory.can_truncate
        self.state_can_truncate = self.can_truncate and pool.memory.state_can_truncate

    def longest_within(self, allocation: Allocation, length: int) -> int:
        """Largest length up to ``length`` to which ``allocation`` can be truncated.

        Returns ``length`` itself if ``allocation`` holds no more than that.
        """
        length = before_picture(allocation.tokens, length)
        if length >= allocation.n_tokens or (self.can_truncate and length >= allocation.truncation_floor):
            return length
        return self._checkpoint_within(allocation, length)

    def _checkpoint_within(self, allocation: Allocation, length: int) -> int:
        """Length of the longest checkpoint with at most ``length`` tokens; 0 without one."""
        checkpoint = latest(allocation.checkpoints, length)
        return 0 if checkpoint is None else checkpoint.length

    def truncate(self, allocation: Allocation, length: int) -> None:
        """Remove all tokens after ``length``, which is a result of ``longest_within``."""
        if length < allocation.n_tokens:
            checkpoint = latest(allocation.checkpoints, length)
            restored = checkpoint.id if checkpoint is not None and checkpoint.length == length else None
            self._pool.ops.append(Truncate(allocation.seq_id, length, restored))
            allocation.resize(length)
            after = [checkpoint for checkpoint in allocation.checkpoints if checkpoint.length > length]
            self._pool.drop_checkpoints(allocation, after)

    def copy_prefix(self, source: Allocation, target: Allocation, length: int) -> None:
        """Copy the first ``length`` tokens of ``source`` and its checkpoints up to there to ``target``, which is empty.

        ``source`` holds at least ``length`` tokens.
        """
        checkpoint = latest(source.checkpoints, length)
        restored = None
        if checkpoint is not None and checkpoint.length == length:
            # a step that is still running may append to the source before the engine copies it
            may_have_grown = not source.is_idle and not self._pool.is_pending(checkpoint)
            restored = checkpoint.id if length < source.n_tokens or may_have_grown else None
        self._pool.ops.append(CopyPrefix(source.seq_id, target.seq_id, length, restored))
        target.copy_cells(source, length)
        target.truncation_floor = source.truncation_floor
        target.checkpoints = tuple([checkpoint for checkpoint in source.checkpoints if checkpoint.length <= length])
        self._pool.checkpoint_ids.share(target.checkpoints)

    def state_loaded(self, allocation: Allocation, length: int) -> None:
        """Record that a saved state of ``length`` tokens is in the sequence of ``allocation``."""
        allocation.resize(length)
        allocation.truncation_floor = 0 if self.state_can_truncate else length

    # -- checkpoints ----------------------------------------------------------------------------

    def plan_pauses(self, allocation: Allocation, n_reused: int, n_in_common: int) -> None:
        """Choose the lengths at which prefill of ``allocation`` pauses to save a checkpoint.

        Args:
            n_reused: prompt tokens that need not be computed.
            n_in_common: prompt tokens in common with the most similar sequence.  A third request may share them too.
        """
        limit, end = self._pool.checkpoint_ids.max_checkpoints, len(allocation.tokens) - TOKENS_AFTER_LAST
        if not limit or allocation.private:
            return
        n_in_common = min(n_in_common, end)
        # a session continues at its end, so checkpoints inside it would only make its file larger
        inside = [] if allocation.durable else speculative_lengths(max(n_reused, n_in_common), end)
        if len(self._pool.checkpoint_ids) + len(inside) >= limit:
            inside = []  # a speculative checkpoint must not displace an existing one
        allocation.pauses, last = (), n_reused
        for length in (before_picture(allocation.tokens, wanted) for wanted in (n_in_common, *inside, end)):
            if length - last >= MIN_SPACING:
                allocation.pauses, last = (*allocation.pauses, length), length

    def next_pause(self, allocation: Allocation) -> int:
        """Next prompt length at which prefill pauses; 0 if there is none."""
        return next((length for length in allocation.pauses if length > allocation.n_tokens), 0)

    def shareable(self, allocation: Allocation, length: int, *, may_wait: bool) -> int:
        """How many of the first ``length`` tokens of ``allocation``, which is busy, another request can get.

        Args:
            may_wait: count tokens that ``allocation`` has yet to compute, and checkpoints that it can still save.
        """
        if self.can_truncate:
            return self.longest_within(allocation, length if may_wait else min(length, allocation.n_tokens))
        length = before_picture(allocation.tokens, length)
        available = self._checkpoint_within(allocation, length)
        if not may_wait or allocation.n_tokens > length or not self._pool.checkpoint_ids.max_checkpoints:
            return available
        planned = (allocation.n_awaited if allocation.leader is not None else 0, *allocation.pauses)
        available = max([available, *(pause for pause in planned if allocation.n_tokens < pause <= length)])
        can_add = length - available >= MIN_SPACING and len(allocation.pauses) < MAX_CHECKPOINTS
        return length if can_add else available

    def add_pause(self, allocation: Allocation, length: int) -> None:
        """Make prefill of ``allocation`` pause at ``length``, a result of ``shareable``: a request waits for that.

        A step that is already running may pass ``length``.  The waiting request then finds another prefix.
        """
        if not self.can_truncate and length > allocation.n_tokens and length not in allocation.pauses:
            others = [pause for pause in allocation.pauses if not 0 < pause - length < MIN_SPACING]
            allocation.pauses = tuple(sorted([*others, length]))

    def save_checkpoint(self, allocation: Allocation) -> None:
        """Save a checkpoint of what ``allocation`` holds, unless it is too close to the previous one.

        The engine saves it at the start of its next step, so that step must not have been submitted yet.
        """
        last = allocation.checkpoints[-1].length if allocation.checkpoints else 0
        if allocation.n_tokens - last < MIN_SPACING:
            return
        if len(allocation.checkpoints) >= MAX_CHECKPOINTS:
            self._pool.drop_checkpoints(allocation, [least_useful(allocation.checkpoints)])
        checkpoint = self._pool.new_checkpoint(allocation, allocation.n_tokens)
        if checkpoint is not None:
            allocation.checkpoints = (*allocation.checkpoints, checkpoint)
            self._pool.ops.append(SaveCheckpoint(allocation.seq_id, checkpoint.id))
