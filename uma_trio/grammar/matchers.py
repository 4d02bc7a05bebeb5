"""Follows the grammars of many sequences, and fills the masks of a step while its logits are computed.

A matcher is a cache: what it must know is a grammar and the tokens of an answer so far, and both come with every
request to sample.  So forks, rejected draft tokens, restarts of the engine and loaded states need nothing of their own.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from uma_trio.grammar.vocabulary import STACK_BYTES, Vocabulary, start_matcher

MAX_THREADS: Final = 8
MAX_LOOK_AHEAD: Final = 8
LOOK_AHEAD_MS: Final = 2.0

MAX_KEPT: Final = 64
"""Grammars whose compiled form is kept."""


class GrammarState(msgspec.Struct, array_like=True, gc=False):
    """A grammar, and how far an answer has come in it."""

    source: str
    """As ``compiler`` makes it."""
    answer: np.ndarray
    """Tokens of the answer so far, ``[n]`` int32."""

    def behind(self, tokens: Sequence[int]) -> GrammarState:
        """The same with more tokens."""
        return GrammarState(self.source, np.append(self.answer, np.array(tokens, np.int32)))


@attrs.define(eq=False)
class _Sequence:
    """The matcher of one sequence.  Used by one thread at a time."""

    source: str
    matcher: LLMatcher | None = None
    consumed: list[int] = attrs.field(factory=list)
    answers: list[list[int]] = attrs.field(factory=list)
    """For which masks were filled last, or are being filled."""
    bits: npt.NDArray[np.uint32] = attrs.field(factory=lambda: np.zeros((0, 0), np.uint32))
    """These masks."""
    forced: Sequence[int] = ()
    """What alone may follow behind the last of them: the token that is sampled next, and those behind it."""
    filling: concurrent.futures.Future[None] | None = None


@attrs.frozen
class AppliedMasks:
    """What came of the masks of one call."""

    late: Sequence[int]
    """Rows whose mask was not ready."""
    failures: Mapping[int, str]
    """Sequences that cannot go on, with the reason."""
    forced: Mapping[int, Sequence[int]]
    """Sequences whose grammar allows just these tokens behind the one that is sampled."""
    wait_ms: float


@attrs.define(eq=False)
class PendingMasks:
    """Masks of one ``llama_decode`` call, on their way."""

    _rows: Sequence[int]
    _bits: npt.NDArray[np.uint32]
    _filling: Sequence[concurrent.futures.Future[None] | None]
    _sequences: Sequence[tuple[int, _Sequence]]
    """Sequence id and matcher for each row."""

    def apply(self, logits: npt.NDArray[np.float32], timeout_ms: float) -> AppliedMasks:
        """Wait for the masks, and set the logits of tokens that are not allowed to -inf.

        Args:
            logits: ``[n_rows, n_vocab]``, changed in place.
        """
        began = time.perf_counter()
        concurrent.futures.wait([each for each in self._filling if each is not None], timeout_ms / 1e3)
        wait_ms = 1e3 * (time.perf_counter() - began)
        late: list[int] = []
        failures: dict[int, str] = {}
        forced: dict[int, Sequence[int]] = {}
        for row, bits, filling, (seq_id, sequence) in zip(
            self._rows, self._bits, self._filling, self._sequences, strict=True
        ):
            if filling is None or not filling.done():
                late.append(row)
            elif (error := filling.exception()) is not None:
                failures[seq_id] = str(error)
                logits[row] = -np.inf
            else:
                allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: logits.shape[1]]
                np.putmask(logits[row], allowed == 0, -np.inf)
                if len(sequence.forced) > 1:
                    forced[seq_id] = sequence.forced[1:]
        return AppliedMasks(late, failures, forced, wait_ms)


class GrammarFailed(Exception):
    """The grammar became too complex, or the answer does not follow it."""


class Matchers:
    """The matchers of one engine.

    Args:
        vocabulary: makes the vocabulary, when the first constrained request comes.
        n_threads: for filling masks, next to the computation.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], n_vocab: int, n_threads: int) -> None:
        self._vocabulary = vocabulary
        self._n_words = -(-n_vocab // 32)
        self._n_threads = max(1, min(n_threads, MAX_THREADS))
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._tokenizer: concurrent.futures.Future[LLTokenizer] | None = None
        self._compiled: OrderedDict[str, concurrent.futures.Future[LLMatcher]] = OrderedDict()
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, wanted: Iterable[tuple[int, int, Sequence[GrammarState | None]]]) -> PendingMasks | None:
        """Begin to fill masks.  Does not block.

        Args:
            wanted: for each input that samples: the row of its first sample, its sequence, and one state a sample.

        Returns:
            ``None`` if no sample follows a grammar.
        """
        constrained = [each for each in wanted if any(each[2])]
        if not constrained:
            return None
        rows = [row + n for row, _, states in constrained for n in range(len(states))]
        bits = np.zeros((len(rows), self._n_words), np.uint32)
        filling: list[concurrent.futures.Future[None] | None] = []
        for _, seq_id, states in constrained:
            at = len(filling)
            future = self._fill_soon(seq_id, [state for state in states if state is not None], bits[at:])
            filling += [future] * len(states)
        owners = [(seq_id, self._sequences[seq_id]) for _, seq_id, states in constrained for _ in states]
        return PendingMasks(rows, bits, filling, owners)

    def forced_behind(self, sampled: Sequence[tuple[int, GrammarState]]) -> dict[int, Sequence[int]]:
        """What alone may follow the tokens that were just sampled, by sequence.  Blocks for ``LOOK_AHEAD_MS`` at most.

        Nothing for more than ``MAX_LOOK_AHEAD`` sequences: then the time would be missed elsewhere.  The masks of the next
        step tell it too, one step later.

        Args:
            sampled: sequences, and their grammar behind the sampled tokens.
        """
        if len(sampled) > MAX_LOOK_AHEAD or self._pool is None:
            return {}
        looking = []
        for seq_id, state in sampled:
            sequence = self._sequences.get(seq_id)
            if (
                sequence is not None
                and sequence.matcher is not None
                and (not sequence.filling or sequence.filling.done())
            ):
                sequence.answers = []
                sequence.filling = self._pool.submit(_look_ahead, sequence, sequence.matcher, state.answer.tolist())
                looking.append((seq_id, sequence, sequence.filling))
        done, _ = concurrent.futures.wait([future for *_, future in looking], LOOK_AHEAD_MS / 1e3)
        return {seq_id: sequence.forced for seq_id, sequence, future in looking if future in done and sequence.forced}

    def close(self) -> None:
        """End the threads, when what they do is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill_soon(
        self, seq_id: int, states: Sequence[GrammarState], bits: npt.NDArray[np.uint32]
    ) -> concurrent.futures.Future[None] | None:
        """Fill one row of ``bits`` for each state; ``None`` while an earlier mask of the sequence is being filled."""
        if self._pool is None:
            threading.stack_size(STACK_BYTES)
            self._pool = concurrent.futures.ThreadPoolExecutor(self._n_threads, "uma-trio grammar")
            self._tokenizer = self._pool.submit(lambda: self._vocabulary().tokenizer())
        source = states[0].source
        compiled = self._compile_soon(source)
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.source != source:
            self._sequences[seq_id] = sequence = _Sequence(source)
        elif sequence.filling is not None and not sequence.filling.done():
            return None
        answers = [state.answer.tolist() for state in states]
        if sequence.filling is not None and answers == sequence.answers:  # they were late in the step before
            bits[: len(answers)] = sequence.bits[: len(answers)]
            return sequence.filling
        sequence.answers, sequence.bits = answers, bits
        sequence.filling = self._pool.submit(_fill, sequence, compiled, answers, bits)
        return sequence.filling

    def _compile_soon(self, source: str) -> concurrent.futures.Future[LLMatcher]:
        """The beginning of a grammar.  Submitted before all that waits for it, so that it is not waited for in vain."""
        assert self._pool is not None
        assert self._tokenizer is not None
        compiled = self._compiled.get(source)
        if compiled is None:
            tokenizer = self._tokenizer
            compiled = self._pool.submit(lambda: start_matcher(tokenizer.result(), source))
            self._compiled[source] = compiled
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return compiled


def _fill(
    sequence: _Sequence,
    compiled: concurrent.futures.Future[LLMatcher],
    answers: Sequence[list[int]],
    bits: npt.NDArray[np.uint32],
) -> None:
    """Bring the matcher behind each of ``answers``, and write the mask of what may follow.

    A draft token that the grammar forbids is never sampled, so masks behind it are left empty.

    Raises:
        GrammarFailed: the matcher cannot go on.
    """
    sequence.forced = ()
    if sequence.matcher is None:
        sequence.matcher = compiled.result().deep_copy()
    matcher = sequence.matcher
    for n, answer in enumerate(answers):
        if not _advance(sequence, matcher, answer, is_draft=n > 0):
            return
        matcher.unsafe_compute_mask_ptr(bits[n].ctypes.data, bits[n].nbytes)
        if matcher.is_error():
            raise GrammarFailed(matcher.get_error())
        sequence.forced = matcher.compute_ff_tokens() if _is_single(bits[n]) else ()


def _look_ahead(sequence: _Sequence, matcher: LLMatcher, answer: list[int]) -> None:
    """Bring the matcher behind ``answer``, and note what alone may follow.

    Raises:
        GrammarFailed: the matcher cannot go on; the next mask fails in the same way.
    """
    sequence.forced = ()
    if _advance(sequence, matcher, answer, is_draft=True) and not matcher.is_stopped():
        sequence.forced = matcher.compute_ff_tokens()


def _is_single(bits: npt.NDArray[np.uint32]) -> bool:
    """Whether a mask allows one token only."""
    words = bits[bits != 0]
    return len(words) == 1 and int(words[0]).bit_count() == 1


def _advance(sequence: _Sequence, matcher: LLMatcher, answer: list[int], *, is_draft: bool) -> bool:
    """Go back to what ``answer`` and the matcher have in common, and on from there.

    Returns:
        Whether the matcher is behind ``answer``; false if a draft token is forbidden.

    Raises:
        GrammarFailed: the grammar forbids a token of ``answer``, or the matcher cannot go on.
    """
    consumed = sequence.consumed
    same = len(consumed)
    if answer[:same] != consumed:  # a draft token was rejected, or the sequence id has a new owner
        same = next(n for n, (a, b) in enumerate(zip([*answer, -1], consumed, strict=False)) if a != b)
        matcher.rollback(len(consumed) - same)
    following = answer[same:]
    n = matcher.try_consume_tokens(following) if following else 0
    sequence.consumed = answer[: same + n]
    if matcher.is_error():
        raise GrammarFailed(matcher.get_error())
    if n < len(following):
        if is_draft:
            return False
        raise GrammarFailed(f"token {following[n]} does not follow the grammar")
    return True
