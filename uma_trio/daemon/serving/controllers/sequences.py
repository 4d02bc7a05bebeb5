"""The sequences with controllers, by the runtime's ids."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import trio

from uma_trio.daemon.serving.controllers.state import Control, ControlledRequest, Phase
from uma_trio.daemon.serving.sequence import Sequence, State


class ControlledSequences:
    """All controlled sequences that have not ended."""

    def __init__(self) -> None:
        self.live: dict[int, Sequence] = {}
        """By their ids, the oldest first."""
        self._answers: dict[ControlledRequest, list[Sequence]] = {}
        """All answers of the requests that have live ones, ended ones included."""
        self._last_id = 0

    def __len__(self) -> int:
        return len(self.live)

    def __iter__(self) -> Iterator[Sequence]:
        """The live ones, the oldest first; they may end meanwhile."""
        return iter([*self.live.values()])

    def get(self, id: int) -> Sequence | None:
        """The sequence of this id, unless it has ended."""
        return self.live.get(id)

    def in_phase(self, *phases: Phase) -> list[Sequence]:
        """The live sequences in one of ``phases``, the oldest first."""
        return [each for each in self.live.values() if control_of(each).phase in phases]

    def by_request(self) -> Iterator[tuple[ControlledRequest, list[Sequence]]]:
        """Each request with its live sequences."""
        for request, answers in [*self._answers.items()]:
            yield request, [each for each in answers if each.state is not State.FINISHED]

    def new_id(self) -> int:
        """An id that was never used."""
        self._last_id += 1
        return self._last_id

    def begin(self, sequence: Sequence, request: ControlledRequest) -> list[Sequence]:
        """Add the first sequence of ``request``; returns its sequences, a list that grows with each fork."""
        control = Control(request=request, id=self.new_id())
        sequence.index, sequence.control = 0, control
        self.live[control.id] = sequence
        self._answers[request] = [sequence]
        return self._answers[request]

    def fork(self, parent: Sequence, n: int) -> list[Sequence]:
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

    def n_answers(self, sequence: Sequence) -> int:
        """Answers of the request of ``sequence``, ended ones included."""
        return len(self._answers[control_of(sequence).request])

    def remove(self, sequence: Sequence) -> None:
        """``sequence`` has ended."""
        control = control_of(sequence)
        del self.live[control.id]
        if all(other.state is State.FINISHED for other in self._answers[control.request]):
            del self._answers[control.request]


def control_of(sequence: Sequence) -> Control:
    """The state of a controlled sequence."""
    assert isinstance(sequence.control, Control)
    return sequence.control


def is_prefilled(sequence: Sequence) -> bool:
    """Whether all of its tokens but the last one are in the KV cache."""
    return sequence.allocation is not None and sequence.n_known - sequence.n_computed == 1


def reading(sequences: abc.Sequence[Sequence]) -> list[Sequence]:
    """The sequences whose outbox has room."""
    return [each for each in sequences if each.sink.has_room]
