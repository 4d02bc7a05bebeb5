"""Choose the messages that a chat drops when it has filled the context.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.protocol.chat import ChatMessage


def drop_oldest(
    history: Sequence[ChatMessage], new: Sequence[ChatMessage], *, n_tokens: int, n_keep: int, n_drop: int
) -> tuple[ChatMessage, ...]:
    """Return ``history`` without its oldest messages: enough to make up ``n_drop`` tokens, or as many as can go.

    The size of a message in tokens is estimated from its share of the text.  Messages that begin within the first
    ``n_keep`` tokens stay, and so does a system message at the beginning.  The message after the gap has the role of
    the first dropped one, because templates insist that user and assistant take turns.

    Args:
        new: the messages of the request, at least one.  They follow ``history``, and all of them stay.
        n_tokens: tokens of ``history`` and ``new`` together, as rendered.
    """
    size_per_token = sum(map(_size, (*history, *new))) / n_tokens
    first = 1 if history and history[0].role == "system" else 0
    kept = sum(map(_size, history[:first]))
    while first < len(history) and kept < n_keep * size_per_token:
        kept += _size(history[first])
        first += 1
    end, dropped = first, 0
    for n in range(first, len(history)):
        dropped += _size(history[n])
        following = history[n + 1] if n + 1 < len(history) else new[0]
        if following.role == history[first].role:
            end = n + 1
            if dropped >= n_drop * size_per_token:
                break
    return (*history[:first], *history[end:])


def _size(message: ChatMessage) -> int:
    """UTF-8 bytes, and one more so that an empty message has a size."""
    return 1 + len(message.text.encode()) + len(str(message.tool_calls or ""))
