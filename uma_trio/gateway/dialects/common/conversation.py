"""Clients that send the whole conversation each time: which session it is, and what of it is noise.

For all dialects.  Such a client does not know of sessions, so nothing here is ever an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from uma_trio.protocol.types import ONE_LINE

SESSION_HEADERS: Final = ("x-session-id", "x-claude-code-session-id", "x-smg-routing-key")
"""Headers that name a conversation; the last one is what the router smg passes on.  The first one counts."""

MAX_KEY_CHARS: Final = 200
"""A longer name of a conversation is replaced by its hash, as is one with control characters."""

BILLING_HEADER: Final = re.compile(r"\s*x-anthropic-billing-header:(?:[ \t]*\w+=[^;\n]*;?)*\s*")
"""The line that Claude Code puts before its system prompt.  It changes with every request."""


def conversation_fields(
    messages: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    *,
    session_id: str | None = None,
    cache_key: str | None = None,
) -> dict[str, Any]:
    """Fields of the socket protocol for a whole conversation: ``messages``, and the session if the client names one.

    A header and a ``cache_key`` name the client's own session, and a client has several conversations in one: the chat,
    its title, its sub-agents.  They differ in their system messages, so a hash of these is a part of the session's name.

    Args:
        messages: as in the socket protocol, with ``content`` as text.
        session_id: names exactly this session.
        cache_key: such as ``prompt_cache_key`` of OpenAI's API.  The headers count before it.
    """
    cleaned = list(without_noise(messages))
    key = session_of(headers, session_id=session_id, cache_key=cache_key)
    if key is None:
        return {"messages": cleaned}
    if session_id is None:
        system = "\n".join(message.get("content") or "" for message in cleaned if is_system(message))
        name = key if len(key) <= MAX_KEY_CHARS and re.match(ONE_LINE, key) else _hash(key, 32)
        session_id = f"{name}:{_hash(system, 8)}"
    return {"messages": cleaned, "session_id": session_id, "history": "replace"}


def session_of(headers: Mapping[str, str], *, session_id: str | None, cache_key: str | None) -> str | None:
    """What the client calls its session; ``None`` if it names none.  Arguments are those of ``conversation_fields``."""
    if session_id is not None:
        return session_id
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), cache_key) or None


def without_noise(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """``messages`` without what changes from request to request and says nothing to the model.

    At the front of a prompt it would make the cached prefix useless.
    """
    cleaned = []
    for message in messages:
        content = message.get("content")
        if is_system(message) and isinstance(content, str) and (header := BILLING_HEADER.match(content)):
            content = content[header.end() :]
            if not content:
                continue
            message = {**message, "content": content}
        cleaned.append(message)
    return cleaned


def continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is a text of the assistant, which the answer continues."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and not last.get("tool_calls")


NO_REASONING: Final = "none"
"""The effort of a model that does not reason."""


def reasoning_kwargs(effort: str | None, *, enabled: bool | None = None) -> dict[str, Any]:
    """Variables for the chat template that say how the model reasons.  They have an effect if the template knows them.

    Args:
        effort: such as ``low``, or ``NO_REASONING``.
        enabled: ``None`` leaves it to the template.
    """
    if effort == NO_REASONING:
        effort, enabled = None, False
    given = {"reasoning_effort": effort, "enable_thinking": enabled}
    return {name: value for name, value in given.items() if value is not None}


def is_system(message: Mapping[str, Any]) -> bool:
    """Whether a message instructs the model."""
    return message["role"] in ("system", "developer")


def _hash(text: str, n_digits: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:n_digits]
