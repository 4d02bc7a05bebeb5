"""The parts of an answer: what each of them owns changes together, and for one reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Final

import attrs

from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.policy.places import MIN_TURN_S
from uma_trio.daemon.serving.prompt_lookup import PromptLookup
from uma_trio.daemon.serving.steering import Steering
from uma_trio.daemon.serving.token_history import TokenHistory
from uma_trio.daemon.text.assembler import TextAssembler
from uma_trio.daemon.text.budget import ReasoningBudget
from uma_trio.engine_link.sampling import Bias, SamplingParams
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.grammar.compiler import Grammar
from uma_trio.protocol.events import Logprobs
from uma_trio.protocol.usage import Timings

EWMA_WEIGHT: Final = 0.2


@attrs.frozen(kw_only=True)
class AnswerSampling:
    """How the tokens of one answer are chosen."""

    params: SamplingParams
    banned: TokenIds | None
    """Ids that must not be sampled: ``ignore_eos``, and what ``logit_bias`` bans."""
    bias: Bias | None
    history: TokenHistory | None
    """The tokens that penalties look at, if there are penalties."""
    logprobs: int | None
    grammar: Grammar | None = None
    """Allows some tokens only."""


@attrs.define(eq=False)
class AnswerText:
    """The text of one answer so far.  What was streamed is not kept."""

    assembler: TextAssembler
    """Makes text of the tokens that follow."""
    texts: list[str] = attrs.field(factory=list)
    """Text that was not streamed.  With a controller it has one element for each token."""
    reasoning_texts: list[str] = attrs.field(factory=list)
    """Reasoning that was not streamed."""
    logprobs: list[Logprobs | None] = attrs.field(factory=list)
    """Log-probabilities that were not streamed.  With a controller one for each token, ``None`` if there is none."""
    n_before_message: int = 0
    """Tokens before the text that answers the last message of the user: those up to an inserted message."""
    _n_reasoning_before: int = attrs.field(default=0, init=False)
    """Tokens of reasoning among them."""

    def copy(self) -> AnswerText:
        """A copy that goes on by itself."""
        copied = copy.copy(self)
        copied.assembler = copy.deepcopy(self.assembler)
        copied.texts, copied.reasoning_texts = [*self.texts], [*self.reasoning_texts]
        copied.logprobs = [*self.logprobs]
        return copied

    def answer_message(self, n_before: int, assembler: TextAssembler) -> None:
        """A message of the user was inserted: the text begins anew after the first ``n_before`` tokens."""
        self._n_reasoning_before = self.n_reasoning_tokens
        self.n_before_message, self.assembler = n_before, assembler

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens of reasoning and its markers."""
        return self._n_reasoning_before + self.assembler.n_reasoning_tokens


@attrs.define
class PlaceState:
    """How an answer stands with its place in the KV cache.  ``RunningSet`` changes it."""

    queued_at: float
    """Since when it has been waiting for a place, if it is: its arrival, or the time at which it lost its place."""
    placed_at: float = -math.inf
    """When it got its place."""
    stalled_at: float = math.inf
    """Since when its client has not read; infinite if it reads, or if a step in flight computes its next token."""
    was_preempted: bool = False
    """It has lost its place once.  What it finds in the KV cache then is its own."""
    n_lost: int = 0
    """Tokens that were in the KV cache when it lost its place, or when the engine or the daemon died."""
    parked: SavedState | None = None
    """A copy of them."""
    regained_at: float | None = None
    """When the KV cache had again what was lost."""
    has_gained: bool = False
    """Whether it has more than before it got this place: more in the KV cache, or a new token."""

    def begin(self, now: float) -> None:
        """It has got a place."""
        self.placed_at, self.regained_at, self.has_gained = now, None, False

    def end(self, now: float, n_computed: int, copied: SavedState | None) -> None:
        """It has lost its place to another one, with ``n_computed`` tokens."""
        self.lose(n_computed)
        self.queued_at, self.stalled_at, self.was_preempted, self.parked = now, math.inf, True, copied

    def lose(self, n_computed: int) -> None:
        """Its ``n_computed`` tokens in the KV cache are lost."""
        self.n_lost = max(self.n_lost, n_computed)

    def note_progress(self, now: float, n_computed: int) -> None:
        """Note that the KV cache has ``n_computed`` tokens: perhaps again what was lost, and more."""
        if n_computed >= self.n_lost and self.regained_at is None:
            self.regained_at = now
        self.has_gained = self.has_gained or n_computed > self.n_lost

    def note_token(self, now: float) -> None:
        """Note a new token: it has gained something."""
        if self.regained_at is None:
            self.regained_at = now
        self.has_gained = True

    def turn_ends_at(self, *, is_suspended: bool) -> float:
        """When it may lose the only place of its principal.

        After it has lost its place once, its turn begins when the KV cache has again what was lost, and lasts as long as
        that took.  So every turn gains something, and at least half of the time goes into new work.

        Args:
            is_suspended: it has no work.
        """
        if is_suspended or not self.was_preempted:
            return self.placed_at + MIN_TURN_S
        if self.regained_at is None or not self.has_gained:
            return math.inf
        return self.regained_at + max(MIN_TURN_S, self.regained_at - self.placed_at)


@attrs.define
class DraftState:
    """How the draft model serves one answer."""

    acceptance_rate: float
    """Expected share of the tokens for which it proposes the right one."""
    precision: float = 1.0
    """Expected share of the proposed tokens that are right; it mostly stops before a wrong one."""
    n_computed: int = 0
    """Tokens of the answer that it has computed."""
    seq_id: int | None = None
    """The sequence id under which it has."""


@attrs.define
class Speculation:
    """Where its draft tokens are from."""

    lookup: PromptLookup | None = None
    """Proposes some from what the prompt and the answer have, if speculation is on."""
    model: DraftState | None = None
    """How the draft model serves it, if there is one and speculation is on."""
    forced: Sequence[int] = ()
    """The only tokens that can follow by its grammar, as far as they are known: drafts that are always accepted."""
    n_forced: int = 0
    """Tokens of the answer that were forced."""

    @property
    def acceptance_rate(self) -> float:
        """Expected share of the draft tokens that are accepted, if the draft model does not propose them."""
        if self.forced:
            return 1.0
        return 0.0 if self.lookup is None else self.lookup.acceptance_rate


@attrs.define
class AnswerBounds:
    """What ends the answer before the model does, and changes that its client asks for."""

    token_limit: int
    """Tokens that it may have: ``max_tokens``, for which it has cells, or what its client has lowered that to."""
    budget: ReasoningBudget | None
    """What it may still reason, if that is limited."""
    stops_at_sentence: bool = False
    """It ends with its sentence."""
    steering: Steering | None = None
    """A change that its client has asked for, and that is not made yet."""
    was_steered: bool = False
    """Its client has changed it."""


@attrs.define
class TokenTimes:
    """When what happened to it.  Times are trio's clock, in seconds."""

    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    cancelled_at: float | None = None
    """When it was ended from outside: by its client, a timeout, or shutdown."""
    ended_at: float | None = None
    paused: bool = False
    """Its client did not read, so the time until its next token is not the server's."""
    inter_token_ewma_ms: float | None = None
    gaps_ms: list[float] = attrs.field(factory=list)
    """Time between tokens, for the perf log."""

    def record_tokens(self, now: float, *, paused: bool) -> float | None:
        """Note that tokens came; returns the milliseconds since the ones before, if that time was the server's."""
        gap_ms = None
        if self.last_token_at is None:
            self.first_token_at = now
        elif not paused:
            gap_ms = 1e3 * (now - self.last_token_at)
            before = gap_ms if self.inter_token_ewma_ms is None else self.inter_token_ewma_ms
            self.inter_token_ewma_ms = before + EWMA_WEIGHT * (gap_ms - before)
        self.last_token_at = now
        return gap_ms

    def timings(self, now: float, n_sampled: int) -> Timings:
        """Durations until ``now``, of an answer with ``n_sampled`` tokens."""
        first = self.first_token_at
        generating_s = (self.last_token_at or 0.0) - (first or 0.0)
        return Timings(
            queue_ms=_ms((self.admitted_at if self.admitted_at is not None else now) - self.arrived_at),
            ttft_ms=None if first is None else _ms(first - self.arrived_at),
            total_ms=_ms(now - self.arrived_at),
            tokens_per_s=round((n_sampled - 1) / generating_s, 2) if n_sampled > 1 and generating_s > 0 else None,
        )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
