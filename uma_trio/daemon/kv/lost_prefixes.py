"""Remembers the last tokens that left the KV cache, to explain why a prompt was prefilled again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.engine_link.adapters import AdapterSet
from uma_trio.engine_link.tokens import TokenIds, common_prefix
from uma_trio.protocol.usage import LossCause, Obstacle

MAX_LOST: Final = 64
"""Sequences that are remembered."""

MAX_LOST_TOKENS: Final = 1 << 20
"""Their tokens together."""


@attrs.frozen(eq=False)
class LostPrefix:
    """The tokens of a sequence that the KV cache had, and no longer has."""

    tokens: TokenIds
    principal: str
    adapters: AdapterSet
    cause: LossCause
    claimant: str | None
    """The principal of the request that needed the place, if one did."""
    at: float


@attrs.frozen(eq=False)
class Comparison:
    """How a prompt compares with what the KV cache had when its request got its place."""

    n_common: int
    """Tokens of the longest common prefix with ``earlier``."""
    earlier: TokenIds | None = None
    """The tokens that have the longest prefix in common with the prompt, there or lost; ``None``: none begins alike."""
    lost: LostPrefix | None = None
    """Set if these tokens are lost."""
    obstacle: Obstacle | None = None
    """Why tokens that are there may have to be computed nevertheless."""


class LostPrefixes:
    """The last sequences that left the KV cache.

    Args:
        clock: the current time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lost: deque[LostPrefix] = deque()
        self._n_tokens = 0

    def __len__(self) -> int:
        return len(self._lost)

    def remember(self, allocation: Allocation, cause: LossCause, claimant: str | None = None) -> None:
        """Remember the tokens of ``allocation``, which the cache loses; the oldest ones go if there are too many."""
        tokens = allocation.tokens
        if allocation.is_forgotten or len(tokens) > MAX_LOST_TOKENS:
            return
        lost = LostPrefix(tokens.copy(), allocation.principal, allocation.adapters, cause, claimant, self._clock())
        self._lost.append(lost)
        self._n_tokens += len(tokens)
        while len(self._lost) > MAX_LOST or self._n_tokens > MAX_LOST_TOKENS:
            self._n_tokens -= len(self._lost.popleft().tokens)

    def compare(
        self, allocation: Allocation, nearest: TokenIds | None, n_common: int, obstacle: Obstacle | None
    ) -> Comparison:
        """How the prompt of ``allocation`` compares with the tokens that are there and those that are lost.

        Args:
            nearest: those of a sequence that is there, and has ``n_common`` tokens in common with the prompt.
            obstacle: why the request may not get these.
        """
        prompt, longest = allocation.tokens[:-1], None
        for lost in reversed(self._lost):
            # most begin alike and differ at once: one number shows that they have no longer prefix in common
            is_longer = n_common < min(len(prompt), len(lost.tokens)) and lost.tokens[n_common] == prompt[n_common]
            if is_longer and lost.principal == allocation.principal and lost.adapters == allocation.adapters:
                n = common_prefix(prompt, lost.tokens)
                if n > n_common:
                    longest, n_common = lost, n
        earlier = nearest if longest is None else longest.tokens
        return Comparison(n_common, earlier if n_common else None, longest, obstacle)

    def forget(self, tokens: TokenIds, principal: str) -> None:
        """Forget what belongs to ``principal`` and is a prefix of ``tokens``."""
        kept = [
            lost
            for lost in self._lost
            if lost.principal != principal or common_prefix(lost.tokens, tokens) < len(lost.tokens)
        ]
        self._lost = deque(kept)
        self._n_tokens = sum([len(lost.tokens) for lost in kept])
