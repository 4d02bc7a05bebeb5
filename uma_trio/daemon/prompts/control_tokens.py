"""Tell the template's control tokens in a rendered chat from those that a message spells out.

A template renders all messages to one text.  In that text ``<|im_end|>`` looks the same whether the template wrote it
or a user typed it, and a typed one must not end the user's turn.  So the messages are rendered a second time, masked:
in them, the first character of each control token is replaced by a lone surrogate.  UTF-8 cannot encode lone
surrogates, so no message contains one, and to a template they are ordinary letters.  One character replaces one
character, so trimming, splitting, slicing and measuring work as before.  In the result, a control token that begins
with a mask character came from a message.

Pure, except for the ``render`` function passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, Final

from uma_trio.engine_link.messages import PromptPart
from uma_trio.errors import UmaError

MASK_CHARS: Final = range(0xD800, 0xDFBF)
PICTURE_CHARS: Final = range(0xDFBF, 0xDFFF)
"""Each stands for a picture of the chat.  Like a mask, none is in a client's text, so nobody can spell a picture."""
FINAL_CUT: Final = "\udfff"
"""Marks where the text of a message ends that an answer is to continue.  Like a mask, it is in no client's text."""
_MASK_CHAR: Final = re.compile("[\ud800-\udfff]")

STRUCTURE: Final = frozenset(
    {
        *("type", "function", "id", "name", "description", "parameters", "arguments"),
        *(
            "properties",
            "required",
            "items",
            "enum",
            "additionalProperties",
            "anyOf",
            "oneOf",
            "allOf",
            "$ref",
            "$defs",
        ),
    }
)
"""Keys of tools and calls that templates look for."""

Messages = Sequence[Mapping[str, Any]]


class ControlTokens:
    """The control tokens of a vocabulary, by their texts.

    Args:
        texts: texts of the tokens that a tokenizer finds only with ``parse_special``.
        user_defined: texts of control tokens that a tokenizer finds in every text.  To become text they have to be
            split.  The assistant's messages may contain them: the model generated them, and clients saw them.

    Raises:
        ValueError: the texts begin with more different characters than there are mask characters (1983).
    """

    def __init__(self, texts: Iterable[str] = (), user_defined: Iterable[str] = ()) -> None:
        self._special = frozenset(texts) - {""}
        self._user_defined = frozenset(user_defined) - {""}
        self._texts = self._special | self._user_defined
        firsts = sorted({text[0] for text in self._texts})
        if len(firsts) > len(MASK_CHARS):
            raise ValueError(
                f"control tokens begin with {len(firsts)} characters; at most {len(MASK_CHARS)} are supported"
            )
        heads: dict[str, set[int]] = {}
        for text in self._texts:
            heads.setdefault(text[:2], set()).add(len(text))
        # By two characters, because a regular expression tries its alternatives in turn: 6,000 of them (Gemma has as
        # many control tokens) take 0.9 s for a hostile message of 100 kB, and this takes 0.03 s.
        self._lengths = {head: sorted(lengths, reverse=True) for head, lengths in heads.items()}
        """First two characters -> lengths of the texts that begin with them, longest first."""
        self._first = re.compile("[" + "".join(map(re.escape, firsts)) + "]" if firsts else "(?!)")
        self._masks = {first: chr(mask) for first, mask in zip(firsts, MASK_CHARS, strict=False)}

    def parts(self, messages: Messages, render: Callable[[Messages], str]) -> tuple[PromptPart, ...]:
        """Render a chat and split it into parts: text from messages that spells control tokens, and the rest.

        Messages without the first character of any control token are rendered once.  Otherwise a second rendering
        masks every such character of the user's and the system's messages.  This also catches a control token that
        only forms when the template deletes something or joins two messages.  A template that looks for such
        characters would render a different text.  In that case a third rendering masks only control tokens that are
        spelled out whole.

        Args:
            messages: without lone surrogates.
            render: messages to text.  Must return the same text for the same messages.

        Returns:
            The parts; joined, their texts are ``render(messages)``.  A single part if no message spells a control
            token.  No part is empty, except a single one.

        Raises:
            UmaError: ``render`` raises it for the messages as they are, or with whole control tokens masked.
        """
        text = render(messages)
        if not any(self._first.search(value) for message in messages for value in texts_of(_free(message))):
            return (PromptPart(text),)
        try:
            rendered = render([self._masked(message, every_first_char=True) for message in messages])
        except UmaError:  # the template needs what was masked
            rendered = None
        if rendered is None or self.unmask(rendered) != text:
            rendered = self._render_whole_tokens_masked(messages, render)
        return self.split(rendered)

    def _render_whole_tokens_masked(self, messages: Messages, render: Callable[[Messages], str]) -> str:
        try:
            return render([self._masked(message, every_first_char=False) for message in messages])
        except UmaError as error:
            raise type(error)(self.unmask(str(error)), field=error.field) from None

    def _masked(self, message: Mapping[str, Any], *, every_first_char: bool) -> dict[str, Any]:
        """Mask a message, except its role, from which a template may build a control token.

        Args:
            every_first_char: mask first characters whatever follows.  The assistant's messages are excepted, because
                templates look for ``</think>`` there.
        """
        if message["role"] == "assistant":
            texts: Set[str] | None = self._special
        else:
            texts = None if every_first_char else self._texts
        return {
            **message,
            **{key: _mapped(value, lambda text: self.mask(text, texts)) for key, value in _free(message).items()},
        }

    def mask(self, text: str, texts: Set[str] | None = None) -> str:
        """Replace the first character of each of ``texts`` in ``text``.

        Args:
            texts: some of the control tokens.  ``None`` replaces the first characters of all, whatever follows.
        """
        if texts is None:
            for first, mask in self._masks.items():
                text = text.replace(first, mask)
            return text

        def replacement(match: re.Match[str]) -> str:
            return self._masks[match[0]] if self._match_end(text, match.start(), texts) else match[0]

        return self._first.sub(replacement, text)

    def unmask(self, text: str) -> str:
        """Undo ``mask``."""
        for first, mask in self._masks.items():
            text = text.replace(mask, first)
        return text

    def split(self, rendered: str) -> tuple[PromptPart, ...]:
        """Unmask a rendered text and split off its masked control tokens, as parts without ``parse_special``."""
        text = self.unmask(rendered)
        parts: list[PromptPart] = []
        done = 0
        for start, end in self._masked_ranges(rendered, text):
            if done < start:
                parts.append(PromptPart(text[done:start]))
            masks = (mask.start() for mask in _MASK_CHAR.finditer(rendered, start, end))
            cuts = [at + 1 for at in masks if self._match_end(text, at, self._user_defined)]
            edges = [start, *(cut for cut in cuts if cut < end), end]
            parts += [PromptPart(text[one:other], parse_special=False) for one, other in pairwise(edges)]
            done = end
        if done < len(text) or not parts:
            parts.append(PromptPart(text[done:]))
        return tuple(parts)

    def _masked_ranges(self, rendered: str, text: str) -> Iterator[tuple[int, int]]:
        """Ranges of ``text`` with masked control tokens, ascending.  Adjacent ones are joined."""
        begun, done = -1, -1
        for mask in _MASK_CHAR.finditer(rendered):
            start = mask.start()
            end = self._match_end(text, start, self._texts) if start >= done else None
            if end is None:
                continue
            if start > done:
                if begun >= 0:
                    yield begun, done
                begun = start
            done = self._first_unmasked(rendered, text, start + 1, end)
        if begun >= 0:
            yield begun, done

    def _first_unmasked(self, rendered: str, text: str, start: int, end: int) -> int:
        """Where the template's own control token begins between ``start`` and ``end``; ``end`` if there is none."""
        for first in self._first.finditer(rendered, start, end):
            if self._match_end(text, first.start(), self._texts):
                return first.start()
        return end

    def _match_end(self, text: str, start: int, texts: Set[str]) -> int | None:
        """The end of the longest of ``texts`` at ``start``; ``None`` if there is none."""
        for length in self._lengths.get(text[start : start + 2], ()):
            if text[start : start + length] in texts:
                return start + length
        return start + 1 if text[start] in texts else None


def texts_of(value: Any) -> Iterator[str]:
    """All texts in ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts_of(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts_of(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with all texts in it changed, keys that are not ``STRUCTURE`` included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key if key in STRUCTURE else change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in value]
    return value


def _free(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a client can fill freely in a message: all except the role, one of a few words."""
    return {key: value for key, value in message.items() if key != "role"}
