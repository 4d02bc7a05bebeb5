"""Index of the KV states that are saved outside the cache: which state holds which tokens.

The index knows names and tokens; the states themselves are files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import attrs

from uma_trio.daemon.kv.checkpoints import MIN_SPACING
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds, common_prefix


@attrs.frozen(eq=False)
class SavedState:
    """The saved state of a sequence."""

    name: str
    principal: str
    """Owner; only the owner's requests load the state."""
    tokens: TokenIds
    """Tokens in the state."""
    n_bytes: int
    """Size of the state and its checkpoints."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """(tokens, bytes) of each checkpoint, by ascending length; they follow the state in this order."""
    adapters: str = ""
    """``AdapterSet.key`` of the adapters that the tokens were computed with."""

    def longest_within(self, length: int) -> int:
        """Largest length up to ``length`` that the whole state or one of its checkpoints has; 0 if none fits."""
        if length >= len(self.tokens):
            return len(self.tokens)
        return max([n for n, _ in self.checkpoints if n <= length], default=0)


class OffloadIndex:
    """Saved states by name and by prefix.

    Args:
        can_truncate: the last tokens of a loaded state can be removed, so longer states than needed are useful too.
    """

    def __init__(self, *, can_truncate: bool) -> None:
        self._can_truncate = can_truncate
        self._states: dict[str, SavedState] = {}
        self._by_prefix: dict[tuple[str, bytes], dict[str, SavedState]] = {}
        """By principal and first tokens; states that differ there share too little to matter.  States of the same
        tokens may have other adapters."""
        self.changes = 0
        """Increases with each state that comes or goes."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    @property
    def states(self) -> Collection[SavedState]:
        """All states."""
        return self._states.values()

    @property
    def n_bytes(self) -> int:
        """Total size of all states."""
        return sum(state.n_bytes for state in self._states.values())

    def add(self, state: SavedState) -> list[str]:
        """Add ``state`` and discard the states that it makes redundant.

        A state is redundant if ``state`` begins with its tokens and can be truncated to nearly that length.

        Returns:
            Names of the discarded states.
        """
        redundant = [
            other.name
            for other in self._candidates(state.principal, state.tokens)
            if other.name != state.name
            and other.adapters == state.adapters
            and len(other.tokens) <= len(state.tokens)
            and (self._can_truncate or len(other.tokens) - state.longest_within(len(other.tokens)) < MIN_SPACING)
            and common_prefix(other.tokens, state.tokens) == len(other.tokens)
        ]
        for name in redundant:
            self.discard(name)
        self.add_all([state])
        return redundant

    def add_all(self, states: Iterable[SavedState]) -> None:
        """Add ``states`` and discard nothing."""
        for state in states:
            self.changes += 1
            self._states[state.name] = state
            self._by_prefix.setdefault(_prefix_key(state.principal, state.tokens), {})[state.name] = state

    def discard(self, name: str) -> bool:
        """Remove a state from the index; returns whether it was there."""
        state = self._states.pop(name, None)
        if state is None:
            return False
        self.changes += 1
        key = _prefix_key(state.principal, state.tokens)
        del self._by_prefix[key][name]
        if not self._by_prefix[key]:
            del self._by_prefix[key]
        return True

    def retain(self, exists: Callable[[str], bool]) -> None:
        """Discard all states for which ``exists(name)`` is false, such as files that made room for newer ones."""
        for name in [name for name in self._states if not exists(name)]:
            self.discard(name)

    def find(
        self, prompt: TokenIds, *, principal: str, max_tokens: int, adapters: str = ""
    ) -> tuple[SavedState | None, int]:
        """Find the state with the longest usable prefix of ``prompt``.

        Args:
            adapters: ``AdapterSet.key``; states with other adapters are ignored.
            max_tokens: ignore larger states, which would not fit.

        Returns:
            The state or ``None``, and the number of prompt tokens that it provides.
        """
        longest: SavedState | None = None
        best = (0, 0)
        for state in self._candidates(principal, prompt):
            if state.adapters != adapters or len(state.tokens) > max_tokens or len(prompt) < best[0]:
                continue
            shared = common_prefix(prompt, state.tokens)
            if not self._can_truncate:
                shared = state.longest_within(shared)
            if shared >= MIN_SHARED_TOKENS and (shared, -len(state.tokens)) > best:  # the smallest among equals
                longest, best = state, (shared, -len(state.tokens))
        return longest, best[0]

    def unneeded(self, needed: Callable[[SavedState], bool]) -> list[str]:
        """Names of all states for which ``needed(state)`` is false."""
        return [state.name for state in self._states.values() if not needed(state)]

    def prefixes_of(self, tokens: TokenIds, *, principal: str, needed: Callable[[TokenIds], bool]) -> list[str]:
        """Names of the states whose tokens are a prefix of ``tokens``, except those that are needed.

        Args:
            needed: whether something else still needs a state with these tokens.
        """
        return [
            state.name
            for state in self._candidates(principal, tokens)
            if common_prefix(state.tokens, tokens) == len(state.tokens) and not needed(state.tokens)
        ]

    def _candidates(self, principal: str, tokens: TokenIds) -> Iterable[SavedState]:
        return self._by_prefix.get(_prefix_key(principal, tokens), {}).values()


def _prefix_key(principal: str, tokens: TokenIds) -> tuple[str, bytes]:
    return principal, tokens[:MIN_SHARED_TOKENS].tobytes()
