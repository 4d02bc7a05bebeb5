"""What is kept outside of the KV cache: which saved state holds which tokens.

Pure bookkeeping: the states themselves are elsewhere, under the names that stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from uma_trio.kv.checkpoints import APART
from uma_trio.kv.prefix import WORTH_SHARING, Tokens, common


@attrs.frozen(eq=False)
class Saved:
    """The state of a sequence that held ``tokens``."""

    name: str
    tenant: int
    """Whose; nobody else gets it."""
    tokens: Tokens
    n_bytes: int
    """Of the state, with its checkpoints."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """Tokens and bytes of each, by length; they follow the state, in this order."""

    def within(self, length: int) -> int:
        """To how many tokens, ``length`` at most, it can be cut where that takes a checkpoint; or all of it."""
        if length >= len(self.tokens):
            return len(self.tokens)
        return max([n for n, _ in self.checkpoints if n <= length], default=0)


class Shelf:
    """Saved states by name.

    Args:
        rewinds: of a loaded state the last tokens can be removed, so one that is longer than what is asked for is of
            use as well.
    """

    def __init__(self, *, rewinds: bool) -> None:
        self._rewinds = rewinds
        self._states: dict[str, Saved] = {}
        self._beginnings: dict[tuple[int, bytes], dict[str, Saved]] = {}
        """By tenant and first tokens: who shares fewer shares none."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    @property
    def n_bytes(self) -> int:
        """Of all states."""
        return sum(state.n_bytes for state in self._states.values())

    def add(self, state: Saved) -> list[str]:
        """Keep ``state``.

        Returns:
            Names of those that it makes needless, which are here no longer: what they hold, it holds as well, or all
            but a few tokens of it.
        """
        needless = [
            other.name
            for other in self._alike(state.tenant, state.tokens)
            if other.name != state.name
            and len(other.tokens) <= len(state.tokens)
            and (self._rewinds or len(other.tokens) - state.within(len(other.tokens)) < APART)
            and common(other.tokens, state.tokens) == len(other.tokens)
        ]
        for name in needless:
            self.discard(name)
        self.add_all([state])
        return needless

    def add_all(self, states: Iterable[Saved]) -> None:
        """Keep what was kept before."""
        for state in states:
            self._states[state.name] = state
            self._beginnings.setdefault(_beginning(state.tenant, state.tokens), {})[state.name] = state

    def discard(self, name: str) -> bool:
        """Forget it; whether it was here."""
        state = self._states.pop(name, None)
        if state is None:
            return False
        key = _beginning(state.tenant, state.tokens)
        del self._beginnings[key][name]
        if not self._beginnings[key]:
            del self._beginnings[key]
        return True

    def keep(self, there: Callable[[str], bool]) -> None:
        """Forget those that are not ``there``: they went to make room for others."""
        for name in [name for name in self._states if not there(name)]:
            self.discard(name)

    def longest(self, prompt: Tokens, *, tenant: int, most: int) -> tuple[Saved | None, int]:
        """The state that holds most of ``prompt``'s beginning, and how many tokens of it.

        Args:
            most: tokens that a state may have to fit where it is wanted.
        """
        found: Saved | None = None
        best = (0, 0)
        for state in self._alike(tenant, prompt):
            if len(state.tokens) > most or len(prompt) < best[0]:
                continue
            shared = common(prompt, state.tokens)
            if not self._rewinds:
                shared = state.within(shared)
            if shared >= WORTH_SHARING and (shared, -len(state.tokens)) > best:  # of equals the smallest
                found, best = state, (shared, -len(state.tokens))
        return found, best[0]

    def orphans(self, needed: Callable[[Saved], bool]) -> list[str]:
        """Names of states that nobody needs."""
        return [state.name for state in self._states.values() if not needed(state)]

    def within(self, tokens: Tokens, *, tenant: int, needed: Callable[[Tokens], bool]) -> list[str]:
        """Names of states of which all tokens are the first of ``tokens``, and that nobody else needs."""
        return [
            state.name
            for state in self._alike(tenant, tokens)
            if common(state.tokens, tokens) == len(state.tokens) and not needed(state.tokens)
        ]

    def _alike(self, tenant: int, tokens: Tokens) -> Iterable[Saved]:
        return self._beginnings.get(_beginning(tenant, tokens), {}).values()


def _beginning(tenant: int, tokens: Tokens) -> tuple[int, bytes]:
    return tenant, tokens[:WORTH_SHARING].tobytes()
