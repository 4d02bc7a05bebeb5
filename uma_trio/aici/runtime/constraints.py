"""Functions of the import module ``uma_trio_constraint``: the engine's constraints, for controllers."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final

import attrs
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from uma_trio.aici.runtime.guest import BLOB_CONSTRAINT, Fatal, Guest
from uma_trio.aici.runtime.turns import OutOfTime
from uma_trio.errors import BadRequest, InvalidConstraint
from uma_trio.grammar.checker import SandboxedChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.grammar.explain import explain, explain_constraint
from uma_trio.grammar.vocabulary import STACK_BYTES, Vocabulary, start_matcher
from uma_trio.protocol.requests import Constraint, constraint_kind

MAX_SOURCE_BYTES: Final = 256 << 10
MAX_LIVE: Final = 16
"""Constraints of one controller."""
MAX_TOKENS: Final = 1 << 16
"""Tokens of one ``constraint_advance``."""
MAX_KEPT: Final = 32
"""Compiled grammars that are kept.  The next constraint with one of them need not be compiled."""

FAILED: Final = -1

_CONSTRAINT: Final = msgspec.json.Decoder(Constraint)


class _Refused(Exception):
    """What the controller asks of a constraint is not possible; says why."""


@attrs.define(eq=False)
class LiveConstraint:
    """A constraint of one controller, and how far its text has come."""

    matcher: LLMatcher
    mask: bytes | None = None
    """Tokens allowed now, one bit each; ``None``: not computed yet."""

    def copy(self) -> LiveConstraint:
        """The same for a fork."""
        return LiveConstraint(self.matcher.deep_copy(), self.mask)


class Constraints:
    """Compiles constraints and follows them.  Thread-safe; a ``LiveConstraint`` is used by one thread at a time.

    Args:
        vocabulary: makes the vocabulary, when the first constraint comes.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self.functions: Mapping[str, Callable[..., int | None]] = {
            "constraint_new": self._new,
            "constraint_mask": _reporting(_mask),
            "constraint_allowed_one": _reporting(_allowed_one),
            "constraint_advance": _reporting(_advance),
            "constraint_can_end": _reporting(lambda guest, live: int(live.matcher.is_accepting())),
            "constraint_is_done": _reporting(lambda guest, live: int(live.matcher.is_stopped())),
            "constraint_drop": _drop,
        }

    def prepare(self) -> None:
        """Do what the first constraint needs, outside of the time of a controller.  Blocks for half a second once.

        Ignores errors: the first constraint meets them again, and reports them.
        """
        concurrent.futures.wait([self._submit(Constraint(choice=["a"]))])

    def close(self) -> None:
        """End the threads after the work that they have begun."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _new(self, guest: Guest, start: int, size: int) -> int:
        try:
            if size > MAX_SOURCE_BYTES:
                raise _Refused(f"the constraint has {size} bytes; at most {MAX_SOURCE_BYTES}")
            if len(guest.constraints) >= MAX_LIVE:
                raise _Refused(f"there are {MAX_LIVE} constraints; drop one first")
            constraint = _parse(guest.memory.read(start, size))
            try:
                matcher = self._submit(constraint).result(max(0.0, guest.deadline - time.monotonic()))
            except concurrent.futures.TimeoutError:
                raise OutOfTime("the constraint takes longer to compile than the call may take") from None
        except (_Refused, BadRequest, InvalidConstraint) as error:
            return _report(guest, str(error))
        guest.n_constraints_made += 1
        guest.constraints[guest.n_constraints_made] = LiveConstraint(matcher)
        return guest.n_constraints_made

    def _submit(self, constraint: Constraint) -> concurrent.futures.Future[LLMatcher]:
        with self._lock:
            if self._pool is None:
                threading.stack_size(STACK_BYTES)  # llguidance recurses
                self._pool = concurrent.futures.ThreadPoolExecutor(2, "uma-trio constraint")
            return self._pool.submit(self._compile, constraint)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        """A matcher at the beginning.

        Raises:
            InvalidConstraint: it cannot be followed.
        """
        grammar = self._compiler.compile(constraint)
        with self._lock:
            kept = self._kept.get(grammar.key)
            if kept is not None:
                self._kept.move_to_end(grammar.key)
                return kept.deep_copy()
        matcher = start_matcher(self._tokenizer, grammar.source)
        if matcher.is_error():
            wrong = explain_constraint(matcher.get_error(), constraint)
            raise InvalidConstraint(wrong.message, field=wrong.field)
        with self._lock:
            self._kept[grammar.key] = matcher
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(lambda: self._vocabulary, SandboxedChecker(lambda: self._vocabulary))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()


def _parse(source: bytes) -> Constraint:
    """Decode a constraint.

    Raises:
        _Refused: it is not valid JSON, or has a wrong field.
        BadRequest: it has not exactly one kind.
    """
    try:
        constraint = _CONSTRAINT.decode(source)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"not a valid constraint: {error}") from None
    constraint_kind(constraint)
    return constraint


def _report(guest: Guest, error: str) -> int:
    guest.blobs[BLOB_CONSTRAINT] = error.encode("utf-8", "replace")
    return FAILED


def _reporting(function: Callable[..., int]) -> Callable[..., int]:
    """A host function that takes a constraint's id, calls ``function`` with that constraint, and reports a refusal."""

    def call(guest: Guest, constraint: int, *arguments: int) -> int:
        live = guest.constraints.get(constraint)
        if live is None:
            return _report(guest, f"there is no constraint {constraint}")
        try:
            return function(guest, live, *arguments)
        except _Refused as error:
            return _report(guest, str(error))

    return call


def _mask(guest: Guest, live: LiveConstraint) -> int:
    guest.allow(_computed_mask(guest, live))
    return 0


def _allowed_one(guest: Guest, live: LiveConstraint) -> int:
    words = np.frombuffer(_computed_mask(guest, live), "<u4")
    allowed = np.flatnonzero(words)
    if len(allowed) != 1 or (word := int(words[allowed[0]])).bit_count() != 1:
        raise _Refused("more than one token is allowed" if len(allowed) else "no token is allowed")
    return int(allowed[0]) * 8 * words.itemsize + word.bit_length() - 1


def _advance(guest: Guest, live: LiveConstraint, start: int, n: int) -> int:
    if n > MAX_TOKENS:
        raise Fatal(f"constraint_advance by {n} tokens; at most {MAX_TOKENS}")
    tokens = np.frombuffer(guest.memory.read(start, 4 * n), "<u4").tolist()
    wrong = next((token for token in tokens if token >= guest.n_vocab), None)
    if wrong is not None:
        raise _Refused(f"token {wrong} is not in the vocabulary")
    consumed = live.matcher.try_consume_tokens(tokens) if tokens else 0
    live.mask = None
    if live.matcher.is_error():
        raise _Refused(explain(live.matcher.get_error()))
    if consumed < len(tokens):
        live.matcher.rollback(consumed)
        raise _Refused(f"token {tokens[consumed]} is not allowed there")
    return 0


def _drop(guest: Guest, constraint: int) -> None:
    guest.constraints.pop(constraint, None)


def _computed_mask(guest: Guest, live: LiveConstraint) -> bytes:
    if live.mask is None:
        live.mask = live.matcher.compute_bitmask()
        if live.matcher.is_error():
            live.mask = None
            raise _Refused(explain(live.matcher.get_error()))
    return live.mask
