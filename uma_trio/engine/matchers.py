"""Follows the grammars of many sequences, and fills the masks of a step while its logits are computed.

A matcher is a cache: it must know a grammar and the tokens of an answer so far, and both come with every input that
samples.  So forks, rejected draft tokens, restarts of the engine and loaded states need nothing of their own.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import numpy as np

from uma_trio.engine.slow_thread import SlowThread
from uma_trio.engine.token_masks import NOTHING, TokenMask, TokenMasks
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.grammar.vocabulary import STACK_BYTES, Vocabulary, start_matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Future: TypeAlias = concurrent.futures.Future

MAX_THREADS: Final = 8

MAX_IDLE: Final = 8
"""Matchers that are kept of sequences that sample nothing at the moment.  Each can take tens of megabytes."""

SLOW_S: Final = 0.005
"""CPU time of a mask above which the next one of its sequence is filled by the slow thread."""

LOOK_AHEAD_MS: Final = 2.0
"""How long ``forced_after`` may take."""


@attrs.define(eq=False)
class _Work:
    """What a thread does for one sequence."""

    run: Callable[[], None]
    future: Future[None] | None = None
    """Ends when this and other work are done."""
    is_done: bool = False
    error: Exception | None = None


@attrs.define(eq=False)
class _SequenceMatcher:
    """The matcher of one sequence.  Used by one thread at a time."""

    key: str
    compiled: Future[LLMatcher]
    """The beginning of its grammar."""
    matcher: LLMatcher | None = None
    consumed: list[int] = attrs.field(factory=list)
    answers: list[list[int]] = attrs.field(factory=list)
    """After which masks were filled last, or are being filled."""
    masks: list[TokenMask] = attrs.field(factory=list)
    """These masks; none after a draft token that the grammar forbids."""
    forced: Sequence[int] = ()
    """The only tokens that can follow the last of ``answers``."""
    work: _Work | None = None
    is_slow: bool = False
    """Whether the slow thread fills its masks."""
    used_s: float = 0.0
    """CPU time of all its masks."""

    @property
    def is_busy(self) -> bool:
        return self.work is not None and not self.work.is_done


@attrs.frozen
class FilledMasks:
    """The masks of one call."""

    masks: Mapping[int, TokenMask]
    """By row.  Those of a sequence that cannot go on allow nothing."""
    late: Sequence[int]
    """Rows whose mask was not ready."""
    failures: Mapping[int, str]
    """Sequences that cannot go on, with the reason."""
    forced: Mapping[int, Sequence[int]]
    """Sequences whose grammar allows only these tokens after the one that is sampled."""
    wait_ms: float


@attrs.frozen
class PendingMasks:
    """Masks of one ``llama_decode`` call, on their way."""

    _pending: Sequence[tuple[int, int, int, _SequenceMatcher, _Work | None]]
    """For each sequence: its id, first row, number of rows, matcher, and the work that fills the masks; ``None`` while
    earlier work goes on."""

    def wait(self, timeout_ms: float) -> FilledMasks:
        """Wait for the masks."""
        began = time.perf_counter()
        _wait([work for *_, work in self._pending if work is not None], timeout_ms)
        wait_ms = 1e3 * (time.perf_counter() - began)
        masks: dict[int, TokenMask] = {}
        late: list[int] = []
        failures: dict[int, str] = {}
        forced: dict[int, Sequence[int]] = {}
        for seq_id, first, n, sequence, work in self._pending:
            if work is None or not work.is_done:
                late += range(first, first + n)
            elif work.error is not None:
                failures[seq_id] = str(work.error)
                masks |= dict.fromkeys(range(first, first + n), NOTHING)
            else:
                masks |= enumerate(sequence.masks, first)
                if len(sequence.forced) > 1:
                    forced[seq_id] = sequence.forced[1:]
        return FilledMasks(masks, late, failures, forced, wait_ms)


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
        self._masks = TokenMasks(n_vocab)
        self._n_threads = max(1, min(n_threads, MAX_THREADS))
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._slow: SlowThread | None = None
        """For compiling, and masks above ``SLOW_S``, so that no other sequence waits for them."""
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled: dict[str, Future[LLMatcher]] = {}
        self._sequences: OrderedDict[int, _SequenceMatcher] = OrderedDict()
        """Those that sampled last are at the end."""

    def define(self, key: str, source: str, *, replaces: str | None = None) -> None:
        """Make a grammar known.  It is compiled in a thread.

        Args:
            replaces: key of a grammar to forget.
        """
        if self._pool is None:
            threading.stack_size(STACK_BYTES)
            self._pool = concurrent.futures.ThreadPoolExecutor(self._n_threads, "uma-trio grammar")
            self._slow = SlowThread("uma-trio slow grammar")
            self._tokenizer = self._pool.submit(lambda: self._vocabulary().tokenizer())
        tokenizer = self._tokenizer
        assert tokenizer is not None
        assert self._slow is not None
        # submitted before all work that waits for it, with the least time used, so a waiting thread cannot take its place
        self._compiled[key] = self._slow.submit(0.0, lambda: start_matcher(tokenizer.result(), source))
        if replaces is not None:
            del self._compiled[replaces]

    def begin(self, wanted: Iterable[tuple[int, int, GrammarState, Sequence[int]]]) -> PendingMasks:
        """Begin to fill masks.  Does not block.

        Args:
            wanted: for each input that samples by a grammar: its sequence, the row of its first sample, the state before
                that, and the draft tokens between its samples.
        """
        pending = []
        begun: list[_SequenceMatcher] = []
        for seq_id, first, state, drafts in wanted:
            answer = state.answer.tolist()
            answers = [[*answer, *drafts[:n]] for n in range(1 + len(drafts))]
            sequence = self._sequence(seq_id, state.key)
            work = None
            if not sequence.is_busy:
                if sequence.work is None or answers != sequence.answers:  # otherwise they were late in the step before
                    sequence.answers = answers
                    sequence.work = _Work(functools.partial(_fill, sequence, self._n_words, self._masks))
                    begun.append(sequence)
                work = sequence.work
            pending.append((seq_id, first, len(answers), sequence, work))
        self._begin(begun)
        self._forget(len(pending) + MAX_IDLE)
        return PendingMasks(pending)

    def forced_after(self, sampled: Sequence[tuple[int, GrammarState]]) -> dict[int, Sequence[int]]:
        """The only tokens that can follow those that were just sampled, by sequence.

        Blocks for ``LOOK_AHEAD_MS`` at most.  Otherwise ``FilledMasks.forced`` tells it one step later.

        Args:
            sampled: sequences, and their grammar after the sampled tokens.
        """
        looking = []
        for seq_id, state in sampled:
            sequence = self._sequences.get(seq_id)
            if sequence is not None and sequence.matcher is not None and not (sequence.is_busy or sequence.is_slow):
                sequence.answers = []
                answer = state.answer.tolist()
                sequence.work = work = _Work(functools.partial(_look_ahead, sequence, sequence.matcher, answer))
                looking.append((seq_id, sequence, work))
        self._begin([sequence for _, sequence, _ in looking])
        _wait([work for *_, work in looking], LOOK_AHEAD_MS)
        return {
            seq_id: sequence.forced
            for seq_id, sequence, work in looking
            if work.is_done and work.error is None and sequence.forced
        }

    def close(self) -> None:
        """End the threads, when what they do is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._slow is not None:
            self._slow.close()

    def _sequence(self, seq_id: int, key: str) -> _SequenceMatcher:
        """The matcher of a sequence; a new one if its grammar is another one than before."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.key != key:
            compiled = self._compiled[key]
            self._sequences[seq_id] = sequence = _SequenceMatcher(key, compiled, is_slow=not compiled.done())
        self._sequences.move_to_end(seq_id)
        return sequence

    def _begin(self, sequences: Sequence[_SequenceMatcher]) -> None:
        """Have threads do the work of ``sequences``, all of a thread together: handing it over takes as long as a mask."""
        if not sequences:
            return
        assert self._pool is not None
        assert self._slow is not None
        quick: list[_Work] = []
        for sequence in sequences:
            assert sequence.work is not None
            if sequence.is_slow:
                sequence.work.future = self._slow.submit(sequence.used_s, functools.partial(_do, [sequence.work]))
            else:
                quick.append(sequence.work)
        for at in range(min(self._n_threads, len(quick))):
            works = quick[at :: self._n_threads]
            future = self._pool.submit(_do, works)
            for work in works:
                work.future = future

    def _forget(self, n_kept: int) -> None:
        """Drop matchers of sequences that ended or pause.  A sequence that goes on gets a new one."""
        for seq_id in [*self._sequences][: max(0, len(self._sequences) - n_kept)]:
            if not self._sequences[seq_id].is_busy:
                del self._sequences[seq_id]


def _do(works: Sequence[_Work]) -> None:
    for work in works:
        try:
            work.run()
        except Exception as error:  # noqa: BLE001 who waits for it gets it
            work.error = error
        work.is_done = True


def _wait(works: Iterable[_Work], timeout_ms: float) -> None:
    """Wait until all work is done, but no longer than ``timeout_ms``."""
    futures = {work.future for work in works if work.future is not None and not work.is_done}
    if futures:
        concurrent.futures.wait(futures, timeout_ms / 1e3)


def _fill(sequence: _SequenceMatcher, n_words: int, masks: TokenMasks) -> None:
    """Bring the matcher after each of the sequence's answers, and find what may follow.

    A draft token that the grammar forbids is never sampled, so there are no masks after it.

    Raises:
        GrammarFailed: the matcher cannot go on.
    """
    began = time.thread_time()
    sequence.forced, sequence.masks = (), []
    if sequence.matcher is None:
        sequence.matcher, sequence.consumed = sequence.compiled.result().deep_copy(), []
    matcher = sequence.matcher
    bits = np.empty(n_words, np.uint32)
    for n, answer in enumerate(sequence.answers):
        if not _advance(sequence, matcher, answer, is_draft=n > 0):
            return
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        _check(sequence, matcher)
        mask = masks.of(bits)
        sequence.masks.append(mask)
        sequence.forced = matcher.compute_ff_tokens() if mask.is_single else ()
    took_s = time.thread_time() - began
    sequence.used_s += took_s
    sequence.is_slow = took_s > SLOW_S * len(sequence.answers)


def _look_ahead(sequence: _SequenceMatcher, matcher: LLMatcher, answer: list[int]) -> None:
    """Bring the matcher after ``answer``, and note the only tokens that can follow.

    Raises:
        GrammarFailed: the matcher cannot go on; the next mask fails in the same way.
    """
    sequence.forced = ()
    if _advance(sequence, matcher, answer, is_draft=True) and not matcher.is_stopped():
        sequence.forced = matcher.compute_ff_tokens()


def _advance(sequence: _SequenceMatcher, matcher: LLMatcher, answer: list[int], *, is_draft: bool) -> bool:
    """Go back to what ``answer`` and the matcher have in common, and on from there.

    Returns:
        Whether the matcher has come to the end of ``answer``; false if a draft token is forbidden.

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
    _check(sequence, matcher)
    if n < len(following):
        if is_draft:
            return False
        raise GrammarFailed(f"token {following[n]} does not follow the grammar")
    return True


def _check(sequence: _SequenceMatcher, matcher: LLMatcher) -> None:
    """
    Raises:
        GrammarFailed: the matcher cannot go on.  It never recovers, so the sequence gets a new one.
    """
    if matcher.is_error():
        sequence.matcher, sequence.answers = None, []
        raise GrammarFailed(matcher.get_error())
