"""Whose the control tokens of a rendered chat are: the template's, or only spelled out in a message.

A template makes one text of all messages, and in that text ``<|im_end|>`` looks the same whether the template
wrote it or a user typed it.  So the messages are rendered once more in disguise: first characters of control
tokens are replaced in them, one for one, by lone surrogates.  No text from outside has these, for UTF-8 cannot
say them, and to a template they are letters that mean nothing; one for one, so that trimming, splitting, slicing
and measuring go on as before.  In the result a control token is whose its first character is.

Pure, but for the rendering that is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Final

from uma_trio.engine.messages import PromptPart
from uma_trio.errors import UmaError

STAND_INS: Final = range(0xD800, 0xE000)
_STAND_IN: Final = re.compile("[\ud800-\udfff]")

Messages = Sequence[Mapping[str, str]]


class ControlTokens:
    """The control tokens of a vocabulary, by their texts.

    Args:
        texts: of those that are found in a text only where ``parse_special`` says so.
        markers: of others like them that are found in every text, so what is to be text has to be cut apart.  The
            assistant's messages may have them: the model has said them, and they were shown.

    Raises:
        ValueError: they begin with more different characters than there are stand-ins; no real vocabulary's do.
    """

    def __init__(self, texts: Iterable[str] = (), markers: Iterable[str] = ()) -> None:
        self._quiet = frozenset(texts) - {""}
        self._markers = frozenset(markers) - {""}
        self._texts = self._quiet | self._markers
        firsts = sorted({text[0] for text in self._texts})
        if len(firsts) > len(STAND_INS):
            raise ValueError(f"control tokens begin with {len(firsts)} characters; {len(STAND_INS)} can be told apart")
        heads: dict[str, set[int]] = {}
        for text in self._texts:
            heads.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(lengths, reverse=True) for head, lengths in heads.items()}
        """Of the texts that begin with these two characters, the longest first."""
        self._first = re.compile("[" + "".join(map(re.escape, firsts)) + "]" if firsts else "(?!)")
        self._hidden = {first: chr(stand_in) for first, stand_in in zip(firsts, STAND_INS, strict=False)}

    def parts(self, messages: Messages, render: Callable[[Messages], str]) -> tuple[PromptPart, ...]:
        """A rendered chat, cut where a message spells a control token: that is text, and the rest is parsed.

        Messages in which nothing begins like a control token are rendered once.  The others are rendered a
        second time, where every such beginning is disguised that a user or the system wrote: that also catches
        a control token which comes about only when the template deletes something, or puts two contents
        side by side.  A template that looks for such characters would now say something else, and then one more
        time, where no more is disguised than control tokens that are spelled out whole.

        Args:
            messages: without lone surrogates.
            render: messages to text; the same messages, the same text.

        Returns:
            One part where no message has a say in any control token; its text is ``render(messages)``.
            None is empty but a single one.

        Raises:
            UmaError: whatever ``render`` raises of the messages as they are, or with whole control tokens disguised.
        """
        text = render(messages)
        if not any(self._first.search(said) for message in messages for _, said in _said(message)):
            return (PromptPart(text),)
        try:
            rendered = render([self._disguised(message, wary=True) for message in messages])
        except UmaError:  # it needs what was disguised
            rendered = None
        if rendered is None or self.shown(rendered) != text:
            rendered = self._narrowly(messages, render)
        return self.cut(rendered)

    def _narrowly(self, messages: Messages, render: Callable[[Messages], str]) -> str:
        """Rendered with only those control tokens disguised that are spelled out whole in one string."""
        try:
            return render([self._disguised(message, wary=False) for message in messages])
        except UmaError as error:
            raise type(error)(self.shown(str(error))) from None

    def _disguised(self, message: Mapping[str, str], *, wary: bool) -> dict[str, str]:
        """``message`` with stand-ins; its role stays, for a template may make a control token of it.

        Args:
            wary: in place of all first characters, where it is not the assistant's: templates look for ``</think>``
                in that.
        """
        assistant = message["role"] == "assistant"
        texts = self._quiet if assistant else None if wary else self._texts
        return {**message, **{key: self.hidden(said, texts) for key, said in _said(message)}}

    def hidden(self, text: str, texts: Set[str] | None = None) -> str:
        """``text`` with a stand-in for the first character of each of ``texts`` in it.

        Args:
            texts: some of the control tokens'.  ``None``: for each character with which one begins, whatever follows.
        """
        if texts is None:
            for first, stand_in in self._hidden.items():
                text = text.replace(first, stand_in)
            return text

        def where_spelled(found: re.Match[str]) -> str:
            return self._hidden[found[0]] if self._end(text, found.start(), texts) else found[0]

        return self._first.sub(where_spelled, text)

    def shown(self, text: str) -> str:
        """``text`` without stand-ins: undoes ``hidden``."""
        for first, stand_in in self._hidden.items():
            text = text.replace(stand_in, first)
        return text

    def cut(self, rendered: str) -> tuple[PromptPart, ...]:
        """What was rendered in disguise, as text and in parts: control tokens that begin with a stand-in apart."""
        text = self.shown(rendered)
        parts: list[PromptPart] = []
        done = 0
        for start, end in self._spelled(rendered, text):
            if done < start:
                parts.append(PromptPart(text[done:start]))
            inside = (found.start() for found in _STAND_IN.finditer(rendered, start, end))
            cuts = [at + 1 for at in inside if self._end(text, at, self._markers)]
            edges = [start, *(cut for cut in cuts if cut < end), end]
            parts += [PromptPart(text[one:other], parse_special=False) for one, other in pairwise(edges)]
            done = end
        if done < len(text) or not parts:
            parts.append(PromptPart(text[done:]))
        return tuple(parts)

    def _spelled(self, rendered: str, text: str) -> Iterator[tuple[int, int]]:
        """The ranges of ``text`` that are control tokens of messages, in order; those next to each other as one."""
        begun, done = -1, -1
        for found in _STAND_IN.finditer(rendered):
            start = found.start()
            end = self._end(text, start, self._texts) if start >= done else None
            if end is None:
                continue
            if start > done:
                if begun >= 0:
                    yield begun, done
                begun = start
            done = self._own(rendered, text, start + 1, end)
        if begun >= 0:
            yield begun, done

    def _own(self, rendered: str, text: str, start: int, end: int) -> int:
        """Where between ``start`` and ``end`` a control token of the template's own begins; else ``end``."""
        for found in self._first.finditer(rendered, start, end):
            if self._end(text, found.start(), self._texts):
                return found.start()
        return end

    def _end(self, text: str, start: int, texts: Set[str]) -> int | None:
        """Where the longest of ``texts`` ends that begins at ``start``; ``None`` where none does."""
        for length in self._lengths.get(text[start : start + 2], ()):
            if text[start : start + length] in texts:
                return start + length
        return start + 1 if text[start] in texts else None


def _said(message: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """What a message has from outside: all of it but its role, which is one of three words."""
    return ((key, value) for key, value in message.items() if key != "role")
