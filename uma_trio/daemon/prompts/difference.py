"""Says where and how a prompt differs from an earlier one, from the tokens of both.

Pure, and as cheap as a few hundred tokens, however long the prompts are: the text around the first difference is
spelled out, and found again in the text and in the messages of the new prompt.  It reports only what it knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from uma_trio.engine_link.tokens import TokenIds
from uma_trio.protocol.usage import Change, ChangeKind

AROUND: Final = 24
"""Tokens before the difference that are spelled out."""

WINDOW: Final = 256
"""Tokens after it in which both may become alike again."""

RUN: Final = 6
"""So many equal tokens end a change."""

SHOWN: Final = 80
"""Characters of each text that are shown."""

DATE: Final = re.compile(
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}:\d{2}"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}\b"
    r"|\b\d{1,2}\.? (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
)
WORD: Final = r"[\w.,:/+-]*"
TOOL_NAME: Final = re.compile(r'"name":\s*"([^"]{1,128})"')

Spell = Callable[[Sequence[int]], str]
"""The text of tokens, control tokens spelled out."""


def difference(
    prompt: TokenIds,
    earlier: TokenIds,
    n_common: int,
    spell: Spell,
    *,
    text: str = "",
    messages: Sequence[str] = (),
    tools: Sequence[str] = (),
) -> Change:
    """The first difference of ``prompt`` to ``earlier``, which has the first ``n_common`` tokens in common with it.

    Args:
        text: of the prompt, if it is known.
        messages: their texts, in order, if it is a chat.
        tools: their names, in order.
    """
    a, b = prompt[n_common : n_common + WINDOW].tolist(), earlier[n_common : n_common + WINDOW].tolist()
    n_now, n_was = _lengths(a, b)
    before = spell(prompt[max(0, n_common - AROUND) : n_common].tolist())
    now, was, after = spell(a[:n_now]), spell(b[:n_was]), spell(a[n_now : n_now + RUN])
    head = re.search(rf"{WORD}\Z", before)
    tail = re.match(WORD, after) if n_now < len(a) else None
    first, last = head.group() if head else "", tail.group() if tail else ""
    at = _position(text, before, spell(a[:RUN]))
    index = None if at is None else _message(text, messages, at)
    kind = _kind(first + was + last, first + now + last, before, after)
    if not a:
        kind = "shorter"
    elif messages and at is not None and index is None:
        of_tools = _tools(text, at, tools, lambda: spell(earlier[: WINDOW * 64].tolist()))
        kind = of_tools or (kind if kind != "text" else "template")
    return Change(
        kind=kind,
        before=before[: len(before) - len(first)][-SHOWN:],
        was=(first + was + last)[:SHOWN],
        now=(first + now + last)[:SHOWN],
        message_index=index,
    )


def _lengths(a: Sequence[int], b: Sequence[int]) -> tuple[int, int]:
    """How many of the first tokens of ``a`` stand for how many of ``b``, before both go on alike; all if they never do."""
    positions: dict[tuple[int, ...], int] = {}
    for at in range(len(b) - RUN, -1, -1):
        positions[tuple(b[at : at + RUN])] = at
    best = (len(a), len(b))
    for at in range(len(a) - RUN + 1):
        if at >= sum(best):
            break
        other = positions.get(tuple(a[at : at + RUN]))
        if other is not None and at + other < sum(best):
            best = (at, other)
    return best


def _position(text: str, before: str, after: str) -> int | None:
    """Where in ``text`` the difference is; ``None`` if that is not certain."""
    for size in (len(before), 64, 32, 16, 8):  # tokens in front of the text, such as BOS, are not in it
        shown = before[-size:]
        at = text.find(shown + after)
        if text and at >= 0 and text.find(shown + after, at + 1) < 0:
            return at + len(shown)
    return None


def _message(text: str, messages: Sequence[str], at: int) -> int | None:
    """The message whose text contains the character ``at``."""
    end = 0
    for index, message in enumerate(messages):
        content = message.strip()
        start = text.find(content, end) if content else -1
        if start < 0:
            continue
        end = start + len(content)
        if start <= at <= end:
            return index
        if start > at:
            return None
    return None


def _kind(was: str, now: str, before: str, after: str) -> ChangeKind:
    if was == now or re.sub(r"\d+", "0", was) != re.sub(r"\d+", "0", now):
        return "text"
    line = before.rpartition("\n")[2], after.partition("\n")[0]
    is_date = all(DATE.search(line[0][-20:] + value + line[1][:20]) for value in (was, now))
    return "date" if is_date else "number"


def _tools(text: str, at: int, tools: Sequence[str], earlier: Callable[[], str]) -> ChangeKind | None:
    """The kind if the difference is in the part of the prompt that has the tools."""
    positions = [text.find(f'"{name}"') for name in tools]
    if not positions or min(positions) < 0 or at > max(positions) + len(text[max(positions) :].partition("\n")[0]):
        return None
    names = list(dict.fromkeys(TOOL_NAME.findall(earlier())))
    if sorted(names[: len(tools)]) == sorted(tools) and names[: len(tools)] != list(tools):
        return "tools_order"
    return "tools" if at >= min(positions) - SHOWN else None
