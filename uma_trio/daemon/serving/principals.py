"""What principals may have in flight, and what each of them was given so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from uma_trio.daemon.policy.fairness import Service
from uma_trio.daemon.policy.tick import PolicyState
from uma_trio.daemon.serving.answer import Answer, State
from uma_trio.daemon.serving.embedding import PendingEmbeddings
from uma_trio.errors import TooManyRequests
from uma_trio.principal import Principal


@attrs.define(eq=False)
class Principals:
    """The principals of one model.

    Args:
        answers: returns those that have not finished.
        embeddings: returns the requests for embeddings that have not ended.
    """

    _answers: Callable[[], Iterable[Answer]]
    _embeddings: Callable[[], Iterable[PendingEmbeddings]]
    policy: PolicyState = attrs.field(factory=PolicyState, init=False)
    """What the latest plan has left for the next one, with what each principal was given."""

    @property
    def service(self) -> Service:
        """What each principal was given."""
        return self.policy.service

    def check_limit(self, principal: Principal, n: int) -> None:
        """Raise TooManyRequests if ``principal`` may not have ``n`` more answers in flight."""
        most = principal.max_requests
        if most is not None:
            now = self._n_requests(principal)
            if now + n > most:
                raise TooManyRequests(f"{principal.name} has {now} answers in flight and may have {most}")

    def arrived(self, principal: Principal) -> None:
        """A request of ``principal`` has come; call it before the request is in a queue."""
        waiting = {
            answer.principal.name for answer in self._answers() if answer.state in (State.WAITING, State.PREFILL)
        }
        waiting |= {pending.principal.name for pending in self._embeddings()}
        if principal.name not in waiting:
            self.policy = attrs.evolve(self.policy, service=self.service.arrived(principal.name, waiting))

    def ended(self, principal: Principal) -> None:
        """A request of ``principal`` has ended."""
        if not self._n_requests(principal):
            self.policy = self.policy.without(principal.name)

    def _n_requests(self, principal: Principal) -> int:
        """Answers and requests for embeddings of ``principal``, waiting ones included."""
        present = [
            *[request.principal for request in self._answers()],
            *[request.principal for request in self._embeddings()],
        ]
        return sum([other.name == principal.name for other in present])
