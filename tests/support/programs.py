"""Controllers as lists of operations, and their results on the fake engine.

A ``Program`` also checks the order of its calls: a mask or a splice is asked for once, and its tokens follow before
anything else is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from tests.support.controlling import START, Client
from tests.support.fake_engine import expected_continuation
from tests.support.fake_runtime import SKIPPED, ScriptedController, Trap
from uma_trio.aici.runtime.interface import Sample, Splice, StopSequence
from uma_trio.aici_link.messages import PreResult


@attrs.frozen
class Say:
    """Append tokens before anything is sampled."""

    tokens: Sequence[int]


@attrs.frozen
class Insert:
    """Append tokens in place of a sampled one."""

    tokens: Sequence[int]


@attrs.frozen
class Back:
    """Remove the last ``n`` tokens, and append others."""

    n: int
    tokens: Sequence[int] = ()


@attrs.frozen
class Gen:
    """Sample."""

    n: int
    allowed: Sequence[int] = ()
    """Empty: all tokens."""


@attrs.frozen
class Fork:
    """Go on with each of ``branches``, the first of which is the sequence itself."""

    branches: Sequence[Script]


@attrs.frozen
class Wait:
    """Suspend until a variable is set."""

    name: str


@attrs.frozen
class Set:
    """Set a variable."""

    name: str


@attrs.frozen
class Skip:
    """The next mask is late.  An operation that needs a mask follows."""


@attrs.frozen
class Fail:
    """Trap."""

    in_mid: bool = False


Operation: TypeAlias = Say | Insert | Back | Gen | Fork | Wait | Set | Skip | Fail
Script: TypeAlias = Sequence[Operation]


class Program(ScriptedController):
    """Runs the operations that are its argument; ends the sequence after the last one.

    Its log is the path of branches that it takes, such as ``/1/0``.  After a fork, and in place of a mask, it cannot wait or fork.
    """

    def __init__(self, argument: Script) -> None:
        super().__init__()
        self.rest = list(argument)
        self.answered = False
        """The engine has a mask or a splice, and has not reported the result."""
        self.disturbed = False
        """It was asked something else meanwhile.  That is right only if the engine has ended the sequence."""
        self.generated = 0
        self.path = ""

    def pre(self) -> PreResult:
        if self.answered:
            self.disturbed = True
            return PreResult()
        self._run()
        match self._next:
            case Fail(in_mid=False):
                raise Trap("wanted to fail")
            case Say(tokens):
                return PreResult(ff_tokens=list(tokens))
            case Wait():
                return PreResult(suspend=True)
            case Fork(branches):
                return PreResult(num_forks=len(branches))
            case None:
                return PreResult(num_forks=0)
        return PreResult()

    def mid(self, fork_group: Sequence[int]) -> Any:
        assert not self.answered, "a mask was asked for twice"
        if isinstance(self._next, Fork):
            branches = self._next.branches
            assert len(fork_group) == len(branches)
            chosen = fork_group.index(self.id)
            self.rest = [*branches[chosen], *self.rest[1:]]
            self.path += f"/{chosen}"
            self.log(f"{self.path} ")
        self._run()
        if isinstance(self._next, Skip):
            del self.rest[0]
            return SKIPPED
        self.answered = True
        match self._next:
            case Fail():
                raise Trap("wanted to fail")
            case Gen(_, allowed):
                return allowed or Sample()
            case Say(tokens) | Insert(tokens):
                return Splice(0, list(tokens))
            case Back(n, tokens):
                return Splice(n, list(tokens))
        return StopSequence()

    def post(self, tokens: Sequence[int], backtrack: int) -> bool:
        assert not self.disturbed, "pre came between a mask and its token"
        self.answered = False
        match self._next:
            case Gen(n):
                assert len(tokens) == 1
                self.generated += 1
                if self.generated == n:
                    self._done()
            case Say(expected) | Insert(expected) | Back(_, expected):
                assert list(tokens) == list(expected)
                self._done()
        self._run()
        return not self.rest

    @property
    def _next(self) -> Operation | None:
        return self.rest[0] if self.rest else None

    def _done(self) -> None:
        del self.rest[0]
        self.generated = 0

    def _run(self) -> None:
        """Do what takes no step."""
        while isinstance(found := self._next, Set | Wait):
            if isinstance(found, Set):
                self.write(found.name, "set")
            elif found.name not in self.shared:
                return
            del self.rest[0]


def next_token(known: Sequence[int], allowed: Sequence[int] = ()) -> int:
    """What the fake engine samples behind ``known``, greedily."""
    [token] = expected_continuation(known, 1)
    free = sorted(allowed)
    return token if not free or token in free else free[token % len(free)]


def expected(script: Script, known: Sequence[int] = (START,), path: str = "") -> dict[str, list[int]]:
    """The tokens of each answer, by its path.

    Args:
        known: tokens before the script begins.
    """
    known = list(known)
    for n, operation in enumerate(script):
        match operation:
            case Say(tokens) | Insert(tokens):
                known += tokens
            case Back(removed, tokens):
                del known[len(known) - removed :]
                known += tokens
            case Gen(count, allowed):
                for _ in range(count):
                    known.append(next_token(known, allowed))
            case Fork(branches):
                rest = script[n + 1 :]
                found: dict[str, list[int]] = {}
                for index, branch in enumerate(branches):
                    found |= expected([*branch, *rest], known, f"{path}/{index}")
                return found
    return {path: known[1:]}


def by_path(client: Client, values: Mapping[int, Any]) -> dict[str, Any]:
    """``values``, which are by index, by the paths that the answers have taken."""
    return {"".join(client.outputs(index).split()[-1:]): value for index, value in values.items()}


def straight(script: Script, path: Iterable[int]) -> Script:
    """The script without forks that takes the branches of ``path``."""
    indices, found = iter(path), list[Operation]()
    for n, operation in enumerate(script):
        if isinstance(operation, Fork):
            return [*found, *straight([*operation.branches[next(indices)], *script[n + 1 :]], indices)]
        found.append(operation)
    return found
