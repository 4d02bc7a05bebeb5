"""Bytes of tokens in, whole characters out, up to a stop string."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence

import attrs


@attrs.frozen
class _StopStates:
    """An automaton that reads text and knows how much of a stop string it ends with.

    State ``s`` stands for the longest end of the text read that begins some stop string; 0 is none.
    One step a character, however many stop strings there are and however they overlap.

    Source: Aho, Corasick, "Efficient string matching" (1975).
    """

    next_state: tuple[dict[str, int], ...]
    """The ways from each state that make its beginning longer."""
    shorter: tuple[int, ...]
    """The state of the next shorter end of the text that also begins a stop string."""
    length: tuple[int, ...]
    """Characters in the beginning that the state stands for."""
    found: tuple[str | None, ...]
    """The longest stop string that the text ends with in this state."""

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next_state[state]:
            state = self.shorter[state]
        return self.next_state[state].get(character, 0)


@functools.lru_cache(maxsize=64)
def _compiled(stop: tuple[str, ...]) -> _StopStates:
    next_state: list[dict[str, int]] = [{}]
    length = [0]
    found: list[str | None] = [None]
    for word in stop:
        state = 0
        for character in word:
            if character not in next_state[state]:
                next_state[state][character] = len(next_state)
                next_state.append({})
                length.append(length[state] + 1)
                found.append(None)
            state = next_state[state][character]
        found[state] = word

    shorter = [0] * len(next_state)
    level = list(next_state[0].values())  # by length: what is shorter is known before it is needed
    while level:
        deeper = []
        for parent in level:
            for character, state in next_state[parent].items():
                fallback = shorter[parent]
                while fallback and character not in next_state[fallback]:
                    fallback = shorter[fallback]
                shorter[state] = next_state[fallback].get(character, 0)
                found[state] = found[state] or found[shorter[state]]
                deeper.append(state)
        level = deeper
    return _StopStates(tuple(next_state), tuple(shorter), tuple(length), tuple(found))


class TextAssembler:
    """Joins token pieces to text that a client may see.

    A token can end in the middle of a character, or in the middle of what becomes a stop string.
    Both are held back until they are decided; never more than one character and the longest stop
    string less one.

        assembler = TextAssembler(stop=["\\n\\n"])
        for piece in pieces:
            emit(assembler.feed(piece))
            if assembler.matched is not None:
                break
        emit(assembler.finish())

    All that was let out, joined, is ``b"".join(pieces).decode("utf-8", "replace")`` cut off where the
    stop string begins that was complete first (of those complete at the same character, the longest).
    How the bytes were split into pieces makes no difference.

    Raises:
        ValueError: an empty stop string.
    """

    matched: str | None
    """The stop string that was found; it, and all after it, is never let out."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self.matched = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._states = _compiled(tuple(stop)) if stop else None
        self._state = 0
        self._held = ""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of one token; return what can be let out now, perhaps nothing."""
        if self.matched is not None:
            return ""
        return self._until_stop(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, at the end of the output.  Incomplete bytes become U+FFFD."""
        if self.matched is not None:
            return ""
        text = self._until_stop(self._decoder.decode(b"", final=True))
        held, self._held, self._state = self._held, "", 0
        return text + held

    def _until_stop(self, new: str) -> str:
        states = self._states
        if states is None:
            return new
        text = self._held + new
        state = self._state
        for end, character in enumerate(new, start=len(self._held) + 1):
            state = states.step(state, character)
            if (matched := states.found[state]) is not None:
                self.matched = matched
                self._held = ""
                return text[: end - len(matched)]
        self._state = state
        decided = len(text) - states.length[state]
        self._held = text[decided:]
        return text[:decided]
