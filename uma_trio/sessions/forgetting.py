"""Which messages of a chat go, when it has filled the context.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.protocol.messages import ChatMessage


def without_oldest(
    before: Sequence[ChatMessage], new: Sequence[ChatMessage], *, n_tokens: int, n_keep: int, n_drop: int
) -> tuple[ChatMessage, ...]:
    """``before`` without the oldest messages that make up ``n_drop`` tokens, or as many as can go.

    A message's tokens are told by its share of the text.  Those that begin in the first ``n_keep`` stay, and so does a
    system message at the beginning.  What follows the gap has the role of what began it: templates insist that user
    and assistant take turns.

    Args:
        new: what follows ``before``; at least one, and all of it stays.
        n_tokens: of both together, as they are rendered.
    """
    per_token = sum(map(_size, (*before, *new))) / n_tokens
    first = 1 if before and before[0].role == "system" else 0
    passed = sum(map(_size, before[:first]))
    while first < len(before) and passed < n_keep * per_token:
        passed += _size(before[first])
        first += 1
    end, dropped = first, 0
    for n in range(first, len(before)):
        dropped += _size(before[n])
        following = before[n + 1] if n + 1 < len(before) else new[0]
        if following.role == before[first].role:
            end = n + 1
            if dropped >= n_drop * per_token:
                break
    return (*before[:first], *before[end:])


def _size(message: ChatMessage) -> int:
    return 1 + len(message.content.encode())
