"""What later requests can find: the prefixes that sequences and saved states hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.offload_index import OffloadIndex, SavedState
from uma_trio.engine_link.tokens import TokenIds


@attrs.frozen(eq=False)
class HeldPrefix:
    """The first tokens of a sequence or of a saved state."""

    holder: object
    """The allocation or the state: the same object as long as it holds something."""
    principal: str
    adapters: str
    """``AdapterSet.key``."""
    tokens: TokenIds
    """``[n]``; never changed, only replaced."""
    length: int
    """Tokens of these that are there."""
    is_saved: bool
    """In a file, and not in the KV cache."""


class HeldPrefixes:
    """Notices when the prefixes change.

    Args:
        allocations: all that there are at the moment, of the pool.
        index: of the saved states.
        step: smaller changes of a length do not count.
    """

    def __init__(self, allocations: dict[int, Allocation], index: OffloadIndex, step: int) -> None:
        self._allocations = allocations
        self._index = index
        self._step = step
        self._n_changes = -1
        self._saved: list[HeldPrefix] = []
        self._seen: list[Any] = []
        self._current: list[HeldPrefix] = []

    def changed(self) -> list[HeldPrefix] | None:
        """All prefixes that others may share, if they have changed since the last call, otherwise ``None``.

        Costs microseconds while nothing has changed.
        """
        step = self._step
        held = [
            (allocation, allocation.tokens, min(allocation.n_tokens, len(allocation.tokens)) // step)
            for allocation in self._allocations.values()
            if not allocation.private
        ]
        seen = [(id(holder), id(tokens), n) for holder, tokens, n in held if n]
        if seen == self._seen and self._n_changes == self._index.changes:
            return None
        if self._n_changes != self._index.changes:
            self._n_changes = self._index.changes
            self._saved = _saved(self._index.states)
        # the list keeps all holders and tokens, so that no new one has the id of an old one
        self._seen = seen
        self._current = [
            HeldPrefix(holder, holder.principal, holder.adapters.key, tokens, n * step, is_saved=False)
            for holder, tokens, n in held
            if n
        ]
        self._current += self._saved
        return self._current


def _saved(states: Iterable[SavedState]) -> list[HeldPrefix]:
    return [
        HeldPrefix(state, state.principal, state.adapters, state.tokens, len(state.tokens), is_saved=True)
        for state in states
    ]
