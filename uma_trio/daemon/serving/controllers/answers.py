"""The answers with controllers, by the runtime's ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.controllers.state import Control, ControlledRequest, Phase


class ControlledAnswers:
    """All controlled answers that have not ended."""

    def __init__(self) -> None:
        self.live: dict[int, Answer] = {}
        """By their ids, the oldest first."""
        self._answers: dict[ControlledRequest, list[Answer]] = {}
        """All answers of the requests that have live ones, ended ones included."""
        self._last_id = 0

    def __iter__(self) -> Iterator[Answer]:
        """The live ones, the oldest first; they may end meanwhile."""
        return iter([*self.live.values()])

    def in_phase(self, *phases: Phase) -> list[Answer]:
        """The live answers in one of ``phases``, the oldest first."""
        return [answer for answer in self.live.values() if control_of(answer).phase in phases]

    def by_request(self) -> Iterator[tuple[ControlledRequest, list[Answer]]]:
        """Each request with its live answers."""
        for request, answers in [*self._answers.items()]:
            yield request, [answer for answer in answers if control_of(answer).id in self.live]

    def new_id(self) -> int:
        """An id that was never used."""
        self._last_id += 1
        return self._last_id

    def begin(self, answer: Answer, request: ControlledRequest) -> list[Answer]:
        """Add the first answer of ``request``; returns its answers, a list that grows with each fork."""
        control = Control(request=request, id=self.new_id())
        answer.index, answer.control = 0, control
        self.live[control.id] = answer
        self._answers[request] = [answer]
        return self._answers[request]

    def fork(self, parent: Answer, n: int) -> list[Answer]:
        """Add ``n`` copies of ``parent``, which have no place in the KV cache yet."""
        control = control_of(parent)
        answers = self._answers[control.request]
        forks = []
        for _ in range(n):
            own = Control(request=control.request, id=self.new_id(), clone_of=control.id)
            fork = parent.fork(len(answers), own, trio.current_time())
            self.live[own.id] = fork
            answers.append(fork)
            forks.append(fork)
        return forks

    def n_answers(self, answer: Answer) -> int:
        """Answers of the request of ``answer``, ended ones included."""
        return len(self._answers[control_of(answer).request])

    def remove(self, answer: Answer) -> None:
        """``answer`` has ended."""
        control = control_of(answer)
        del self.live[control.id]
        if all(control_of(other).id not in self.live for other in self._answers[control.request]):
            del self._answers[control.request]


def control_of(answer: Answer) -> Control:
    """The state of a controlled answer."""
    assert isinstance(answer.control, Control)
    return answer.control


def is_prefilled(answer: Answer) -> bool:
    """Whether all of its tokens but the last one are in the KV cache."""
    return answer.allocation is not None and answer.n_known - answer.n_computed == 1


def reading(answers: Sequence[Answer]) -> list[Answer]:
    """The answers whose outbox has room."""
    return [answer for answer in answers if answer.sink.has_room]
