"""Text of an answer: from the bytes of tokens to whole characters, up to a stop string."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from uma_trio.daemon.text.tool_calls import CallDelta
from uma_trio.protocol.chat import ToolCall


class Split(NamedTuple):
    """What is new of an output: reasoning, text of the answer, and calls, in this order."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[CallDelta] = ()

    def __add__(self, other: Split) -> Split:  # type: ignore[override]
        return Split(self.reasoning + other.reasoning, self.text + other.text, [*self.calls, *other.calls])


@attrs.frozen
class _StopStates:
    """An automaton over characters that finds stop strings.

    A state stands for the longest suffix of the text so far that is a prefix of some stop string; 0 is the empty
    suffix.  A character costs one step, however many stop strings there are and however they overlap.

    Source: Aho, Corasick, "Efficient string matching" (1975).
    """

    next_state: tuple[dict[str, int], ...]
    """For each state, the characters that extend its prefix."""
    shorter: tuple[int, ...]
    """For each state, the state of the next shorter suffix that is also a prefix of a stop string."""
    length: tuple[int, ...]
    """For each state, the length of its prefix in characters."""
    longest_stop: tuple[str | None, ...]
    """For each state, the longest stop string that the text ends with."""

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next_state[state]:
            state = self.shorter[state]
        return self.next_state[state].get(character, 0)


@functools.lru_cache(maxsize=64)
def _compiled(stop: tuple[str, ...]) -> _StopStates:
    next_state: list[dict[str, int]] = [{}]
    length = [0]
    longest_stop: list[str | None] = [None]
    for word in stop:
        state = 0
        for character in word:
            if character not in next_state[state]:
                next_state[state][character] = len(next_state)
                next_state.append({})
                length.append(length[state] + 1)
                longest_stop.append(None)
            state = next_state[state][character]
        longest_stop[state] = word

    shorter = [0] * len(next_state)
    level = list(next_state[0].values())  # breadth first: the states of shorter prefixes are complete
    while level:
        deeper = []
        for parent in level:
            for character, state in next_state[parent].items():
                fallback = shorter[parent]
                while fallback and character not in next_state[fallback]:
                    fallback = shorter[fallback]
                shorter[state] = next_state[fallback].get(character, 0)
                longest_stop[state] = longest_stop[state] or longest_stop[shorter[state]]
                deeper.append(state)
        level = deeper
    return _StopStates(tuple(next_state), tuple(shorter), tuple(length), tuple(longest_stop))


class StringSearch:
    """Looks for strings in a text that comes in parts.

    Text that may be the beginning of one of the strings is held back: at most the longest string less one character.
    The string that is complete first counts.  If several are complete at the same character, the longest one counts.

    Raises:
        ValueError: a string is empty.
    """

    matched: str | None
    """The string that was found."""
    rest: str
    """The text after it, of the part that completed it."""

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ValueError("a stop string must not be empty")
        self._states = _compiled(tuple(strings)) if strings else None
        self.restart()

    def restart(self) -> None:
        """Forget the text so far, and look for the strings again."""
        self.matched = None
        self.rest = ""
        self._state = 0
        self._held = ""

    @property
    def holds_text(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def feed(self, new: str) -> str:
        """Append ``new``, and return the text that is not, and does not begin, one of the strings."""
        states = self._states
        if states is None:
            return new
        text = self._held + new
        state = self._state
        for end, character in enumerate(new, start=len(self._held) + 1):
            state = states.step(state, character)
            if (matched := states.longest_stop[state]) is not None:
                self.matched = matched
                self._held = ""
                self.rest = text[end:]
                return text[: end - len(matched)]
        self._state = state
        decided = len(text) - states.length[state]
        self._held = text[decided:]
        return text[:decided]

    def finish(self) -> str:
        """Return the text that was held back: nothing follows that could complete a string."""
        held, self._held, self._state = self._held, "", 0
        return held


class TextAssembler:
    """Turns the bytes of tokens into text that a client may see.

    A token can end in the middle of a character, or in the middle of a possible stop string.  The assembler
    holds such text back until it is decided: at most one character, and the longest stop string less one character.

        assembler = TextAssembler(stop=["\\n\\n"])
        for token, token_bytes in ...:
            emit(assembler.feed(token, token_bytes))
            if assembler.matched is not None:
                break
        emit(assembler.finish())

    The emitted text is the UTF-8 decoding of all bytes, with U+FFFD for invalid ones, cut where the stop string begins
    that is complete first.  If several are complete at the same character, the longest one counts.  The boundaries of
    tokens make no difference.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = StringSearch(stop)
        self.may_end = bool(stop)
        """Whether some text would end the answer.  A tick asks it for each token."""
        self.calls: list[ToolCall] = []
        """The complete calls."""
        self.in_calls = False
        """Whether the output so far ends in a region of calls."""
        self.n_reasoning_tokens = 0
        """Tokens of reasoning and its markers."""

    @property
    def matched(self) -> str | None:
        """The stop string that was found.  Neither it nor any later text is emitted."""
        return self._stop.matched

    @property
    def has_ended(self) -> bool:
        """Whether nothing that follows is part of the answer."""
        return self._stop.matched is not None

    @property
    def in_reasoning(self) -> bool:
        """Whether the output so far ends in reasoning."""
        return False

    def feed(self, token: int, token_bytes: bytes) -> Split:
        """Append one token, and return what can be emitted now."""
        if self._stop.matched is not None:
            return Split()
        return Split(text=self._stop.feed(self._decoder.decode(token_bytes)))

    def finish(self) -> Split:
        """Return what was held back, at the end of the output.  Incomplete bytes become U+FFFD."""
        if self.matched is not None:
            return Split()
        text = self._stop.feed(self._decoder.decode(b"", final=True))
        return Split(text=text if self.matched is not None else text + self._stop.finish())

    def output(self, shown: str) -> str:
        """The output as it was generated, up to a stop string; ``shown`` is its text as a client has got it."""
        return shown
