"""Collects the events of a request with a controller: the text of each answer, and which answer forked from which."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from uma_trio.protocol.controllers import Backtrack, ControllerOutput, Fork, StorageWrite
from uma_trio.protocol.events import Eos, Failure, Token
from uma_trio.protocol.messages import Event


@attrs.define(kw_only=True)
class ControlledAnswer:
    """One answer of a request with a controller, as far as it has come."""

    index: int
    parent: int | None = None
    """The answer that this one forked from; ``None`` for the first."""
    forked_at: int = 0
    """Length of the parent's text at the fork, with which ``text`` begins."""
    text: str = ""
    logs: str = ""
    storage: list[StorageWrite] = attrs.field(factory=list)
    """Variables that its controller has written, in order."""
    sampled_tokens: int = 0
    """Tokens that the model has chosen, after the fork."""
    inserted_tokens: int = 0
    """Tokens that the controller has chosen, after the fork."""
    eos: Eos | None = None
    failure: Failure | None = None
    """Why it failed, if it did."""

    @property
    def is_done(self) -> bool:
        """Whether no event of it follows."""
        return self.eos is not None or self.failure is not None

    def __str__(self) -> str:
        return self.text


@attrs.define(kw_only=True)
class Segment:
    """A piece of text that some answers have in common, and what follows it."""

    text: str
    answer: ControlledAnswer | None = None
    """The answer that ends here; ``None`` if the text goes on in ``children``."""
    children: list[Segment] = attrs.field(factory=list)


class AnswerTree:
    """All answers of a request with a controller, by index."""

    def __init__(self) -> None:
        self.answers: dict[int, ControlledAnswer] = {}

    def __iter__(self) -> Iterator[ControlledAnswer]:
        return iter([self.answers[index] for index in sorted(self.answers)])

    def __getitem__(self, index: int) -> ControlledAnswer:
        return self.answers[index]

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def is_done(self) -> bool:
        """Whether all announced answers have ended."""
        return bool(self.answers) and all(answer.is_done for answer in self.answers.values())

    def segments(self) -> Segment:
        """The texts as a tree.  The first answer has index 0, and all others are forks of it or of its forks."""
        forks: dict[int, list[ControlledAnswer]] = {}
        for answer in self:
            if answer.parent is not None:
                forks.setdefault(answer.parent, []).append(answer)
        return _segment(self.answers.get(0, ControlledAnswer(index=0)), 0, forks.pop(0, []), forks)

    def add(self, event: Event) -> ControlledAnswer | None:
        """Take note of an event; returns the answer that it changed, ``None`` if it belongs to none."""
        index = getattr(event, "index", None)
        if index is None and isinstance(event, Token | Eos):
            index = 0
        if index is None:
            return None
        if index not in self.answers:
            self.answers[index] = ControlledAnswer(index=index)
        answer = self.answers[index]
        match event:
            case Fork():
                parent = self.answers.get(event.parent)
                text = "" if parent is None else parent.text
                answer.parent, answer.text, answer.forked_at = event.parent, text, len(text)
            case Token():
                answer.text += event.text
                if event.inserted:
                    answer.inserted_tokens += 1
                else:
                    answer.sampled_tokens += 1
            case Backtrack():
                answer.text = answer.text[: max(0, len(answer.text) - len(event.text))]
            case ControllerOutput():
                answer.logs += event.logs or ""
                answer.storage += event.storage or []
            case Eos():
                answer.eos = event
                if event.text is not None:
                    answer.text = event.text
                if event.usage.sampled_tokens is not None:
                    answer.sampled_tokens = event.usage.sampled_tokens
                if event.usage.inserted_tokens is not None:
                    answer.inserted_tokens = event.usage.inserted_tokens
            case Failure():
                answer.failure = event
        return answer


def _segment(
    answer: ControlledAnswer,
    begin: int,
    own_forks: list[ControlledAnswer],
    forks: dict[int, list[ControlledAnswer]],
) -> Segment:
    """What follows position ``begin`` of an answer.

    Args:
        own_forks: those of this answer that come after ``begin``.
        forks: those of other answers, by parent.
    """
    if not own_forks:
        return Segment(text=answer.text[begin:], answer=answer)
    places = {fork.index: max(begin, _common_length(answer, fork)) for fork in own_forks}
    place = min(places.values())
    here = [fork for fork in own_forks if places[fork.index] == place]
    later = [fork for fork in own_forks if places[fork.index] > place]
    children = [_segment(fork, place, forks.get(fork.index, []), forks) for fork in here]
    return Segment(text=answer.text[begin:place], children=[_segment(answer, place, later, forks), *children])


def _common_length(answer: ControlledAnswer, fork: ControlledAnswer) -> int:
    """How much of the text at the fork both still have: either may have removed some of it."""
    length = min(fork.forked_at, len(answer.text), len(fork.text))
    while answer.text[:length] != fork.text[:length]:
        length -= 1
    return length
