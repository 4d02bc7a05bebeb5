"""One answer in flight: its request, its tokens, and where it stands."""

from __future__ import annotations

import copy
import enum
import math
from collections import abc
from collections.abc import Callable, Collection
from typing import Final, Protocol

import attrs
import numpy as np
import trio

from uma_trio.daemon.answer.budget import ReasoningBudget
from uma_trio.daemon.answer.regions import make_assembler
from uma_trio.daemon.answer.text import TextAssembler
from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.lost_prefixes import Comparison
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.prompts.media import rows_between, whole_part
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.scheduling.places import MIN_TURN_S
from uma_trio.daemon.scheduling.view import Priority, SequenceView
from uma_trio.daemon.serving.controllers.state import Control, Phase
from uma_trio.daemon.serving.prompt_lookup import PromptLookup
from uma_trio.daemon.serving.steering import Steering
from uma_trio.daemon.serving.token_history import TokenHistory
from uma_trio.daemon.store.answer_log import Change
from uma_trio.engine_link.adapters import NO_ADAPTERS, AdapterSet
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.engine_link.messages import SampleRequest, StepInput
from uma_trio.engine_link.sampling import Bias, SamplingParams
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.grammar.compiler import Grammar
from uma_trio.principal import Principal
from uma_trio.protocol.events import Eos, Logprobs, PrefillProgress
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Explanation, FinishReason, Timings, Usage

EWMA_WEIGHT: Final = 0.2

MIN_FORCED: Final = 0.125
"""Share of forced tokens from which on a sequence counts as often forced; judged after ``MIN_TOKENS_TO_JUDGE``."""

MIN_TOKENS_TO_JUDGE: Final = 16

NOT_PLACED: Final = -1
"""In a view, instead of the sequence id of a sequence that waits."""


class EventSink(Protocol):
    """Where the events of an answer go.  Never blocks: a client that does not read fills it and so pauses its stream."""

    def send(self, event: ServerEvent) -> None:
        """Pass ``event`` on, or keep it until the client takes it.  Does nothing once the client has gone."""

    @property
    def has_room(self) -> bool:
        """Whether the sequence may go on.  The sink wakes the scheduler when this turns true again."""


class TokenLog(Protocol):
    """Keeps the tokens of an answer, so that it can go on after the daemon was killed."""

    @property
    def known(self) -> abc.Sequence[int]:
        """The tokens that the answer has at its beginning: those of an earlier daemon."""

    @property
    def mu(self) -> float | None:
        """The state of mirostat after them."""

    @property
    def changes(self) -> abc.Sequence[Change]:
        """How a client has changed the answer meanwhile.  What it inserted is among these tokens."""

    def attempt(self) -> None:
        """The answer is worked on from now on: a daemon that ends before the next token perhaps dies of it."""

    def add(self, tokens: abc.Sequence[int], mu: float | None, changes: abc.Sequence[Change]) -> None:
        """Note new tokens, whose events have gone to the sink, and changes between them.  Never blocks."""

    async def kept(self, change: Change) -> None:
        """Wait until ``change`` is on disk, or in memory if nothing of the answer is on disk.

        Raises:
            AnswerNotFound: the answer has ended without it.
            ShuttingDown: the daemon ends, and the next one perhaps goes on without it.
        """


class State(enum.Enum):
    """Where a sequence is.  It moves down this list and may skip; a lost KV cache sends it from DECODE to PREFILL."""

    WAITING = enum.auto()
    """Waits for KV cells."""
    PREFILL = enum.auto()
    """Its tokens are being computed into the KV cache."""
    DECODE = enum.auto()
    """Generates."""
    FINISHED = enum.auto()
    """Its last event is sent.  It still holds its KV cells while a step computes them."""


@attrs.frozen(kw_only=True)
class Sampling:
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
    """How a sequence stands with its place in the KV cache.  ``RunningSet`` changes it."""

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

    def note_progress(self, now: float, *, has_gained: bool) -> None:
        """Note that the KV cache has again what was lost; ``has_gained``: and more."""
        if self.regained_at is None:
            self.regained_at = now
        self.has_gained = self.has_gained or has_gained

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
    """How the draft model serves one sequence."""

    acceptance_rate: float
    """Expected share of the tokens for which it proposes the right one."""
    precision: float = 1.0
    """Expected share of the proposed tokens that are right; it mostly stops before a wrong one."""
    n_computed: int = 0
    """Tokens of the sequence that it has computed."""
    seq_id: int | None = None
    """The sequence id under which it has."""


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One answer and everything that changes while it is served.  Times are trio's clock, in seconds."""

    request: Generate
    prompt: Prompt
    max_tokens: int
    sampling: Sampling
    end_ids: Collection[int]
    """Tokens that end it."""
    sink: EventSink
    principal: Principal
    priority: Priority
    adapters: AdapterSet = NO_ADAPTERS
    arrived_at: float
    due_at: float
    """When its next token is due."""
    deadline_at: float = math.inf
    """When it is to be complete."""
    grace_s: float = 0.0
    """How much later than ``due_at`` the first token may be before others have to wait for it: a request that sets a short
    target goes before others of its principal, and does not slow down everybody."""
    target_itl_ms: float
    """Inter-token latency that it is promised."""
    max_rows: int = 0
    """See ``ModelInfo.max_rows``."""
    durable: bool
    index: int | None
    """Which of the request's answers it is; ``None`` if there is only one, and no controller that could fork it."""
    control: Control | None = None
    """Where its controller stands, if it has one."""
    log: TokenLog | None = None
    """Keeps its tokens, if it is detached."""
    exact_rows: int = 0
    """Most lost tokens of the answer in a chunk: ``ModelInfo.exact_rows``, if the answer promises an undisturbed text; 0: any
    number."""

    state: State = State.WAITING
    allocation: Allocation | None = None
    """Its place in the KV cache, which also counts the tokens there."""
    comparison: Comparison | None = None
    """How its prompt compares with what the KV cache had when it got its first place."""
    n_cached: int = 0
    """Prompt tokens that did not have to be computed."""
    tokens: list[int] = attrs.field(factory=list)
    """Sampled so far."""
    n_tokens_before_stop: int | None = None
    """Tokens in front of the stop string that was found; only for sessions, which go on from there."""
    lookup: PromptLookup | None = None
    """Proposes draft tokens, if speculation is on."""
    draft_state: DraftState | None = None
    """How the draft model serves it, if there is one and speculation is on."""
    forced: abc.Sequence[int] = ()
    """The only tokens that can follow by its grammar, as far as they are known."""
    n_forced: int = 0
    """Tokens of the answer that were forced."""
    n_replayed: int = 0
    """Tokens of the answer that an earlier daemon has sampled."""
    text: AnswerText = attrs.field(
        default=attrs.Factory(lambda self: AnswerText(self._assembler(self.prompt.opens_reasoning)), takes_self=True)
    )
    budget: ReasoningBudget | None = attrs.field(
        default=attrs.Factory(lambda self: _budget(self.prompt), takes_self=True)
    )
    """What it may still reason, if that is limited."""
    steering: Steering | None = None
    """A change that its client has asked for, and that is not made yet."""
    token_limit: int = attrs.field(default=attrs.Factory(lambda self: self.max_tokens, takes_self=True))
    """Tokens that it may have: ``max_tokens``, for which it has cells, or what its client has lowered that to."""
    stops_at_sentence: bool = False
    """It ends with its sentence."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    inter_token_ewma_ms: float | None = None
    gaps_ms: list[float] = attrs.field(factory=list)
    """Time between tokens, for the perf log."""
    paused: bool = False
    """Its client did not read, so the time until its next token is not the server's."""
    place: PlaceState = attrs.field(default=attrs.Factory(lambda self: PlaceState(self.arrived_at), takes_self=True))
    keep_computed: bool = True
    """What it computed may be kept for others; not of one that failed."""
    cancelled_at: float | None = None
    """When it was ended from outside: by its client, a timeout, or shutdown."""
    ended_at: float | None = None
    was_steered: bool = False
    """Its client has changed it."""
    n_steps: tuple[int, int] = (0, 0)
    """Steps that have computed it alone, and together with others."""
    energy_j: float | None = None
    """What it has taken of the energy that the machine counts; ``None``: nobody counts."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """Set after the last event."""

    # -- where it stands ------------------------------------------------------------------------

    @property
    def max_cells(self) -> int:
        """KV cells that it can need at most.  The last sampled token is never computed."""
        return len(self.prompt.tokens) + self.max_tokens - 1

    @property
    def n_computed(self) -> int:
        """Tokens in the KV cache."""
        return 0 if self.allocation is None else self.allocation.n_tokens

    @property
    def is_blocked(self) -> bool:
        """Waits for another sequence to compute the prefix that both share, or for a saved state."""
        allocation = self.allocation
        return allocation is not None and (allocation.leader is not None or allocation.awaits_state)

    @property
    def n_known(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def n_computable(self) -> int:
        """Tokens that the next step may compute in all: all but the last one if none may be sampled after it."""
        return self.n_known if self.control is None or self.control.may_sample else self.n_known - 1

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer from ``start`` on, up to ``end``."""
        n_prompt = len(self.prompt.tokens)
        tokens: list[int] = self.prompt.tokens[start:end].tolist()
        return tokens if end <= n_prompt else tokens + self.tokens[max(0, start - n_prompt) : end - n_prompt]

    def view(self, *, pause: int = 0) -> SequenceView:
        """What the policy may know of a sequence that no step in flight computes, without drafts.

        Args:
            pause: a step must end at this many tokens, for a checkpoint; 0: nowhere.
        """
        n_computed = self.n_computed
        end = pause if n_computed < pause else self.n_computable
        return self._view(end=self._chunk_end(n_computed, end), n_context=n_computed, due_s=self.due_at)

    def view_after(self, end: int, *, samples: bool, completed_at: float) -> SequenceView:
        """What the policy may know of it after the step in flight.

        Args:
            end: tokens in the KV cache after that step.
            samples: the step samples its next token.
            completed_at: when the step is expected to be complete.
        """
        return self._view(
            end=end + 1 if samples else self._chunk_end(end, self.n_known),
            n_context=end,
            due_s=completed_at + self.target_itl_ms / 1e3 if samples else self.due_at,
        )

    def _chunk_end(self, start: int, end: int) -> int:
        """Where a chunk of the tokens from ``start`` to ``end`` ends at the latest.

        Lost tokens of a detached answer are computed again exactly as they were decoded, so that its text is the one without
        the death of an engine or of the daemon.  Where that is slow, the client of another answer would wait for it.
        """
        n_prompt = len(self.prompt.tokens)
        if self.max_rows:
            return min(end, start + self.max_rows)
        n_lost = self.place.n_lost
        if not self.exact_rows or start >= n_lost or n_lost <= n_prompt:
            return end
        return min(end, n_prompt if start < n_prompt else start + self.exact_rows)

    def _view(self, *, end: int, n_context: int, due_s: float) -> SequenceView:
        is_whole = False
        if self.prompt.media and n_context < len(self.prompt.tokens):
            end, is_whole = whole_part(self.prompt.media, n_context, end)
        return SequenceView(
            seq_id=NOT_PLACED if self.allocation is None else self.allocation.seq_id,
            n_pending=end - n_context,
            is_whole=is_whole,
            n_context=n_context,
            due_s=due_s,
            grace_s=self.grace_s,
            priority=self.priority,
            principal=self.principal.name,
            weight=self.principal.weight,
            acceptance_rate=self.acceptance_rate,
        )

    def drafts(self, n: int) -> abc.Sequence[int]:
        """At most ``n`` draft tokens; never so many that not all could become part of the answer.

        Tokens that its grammar forces are drafts that are always accepted.
        """
        n = max(0, min(n, self.n_free - 1))
        if self.forced:
            return self.forced[:n]
        return () if self.lookup is None or not n else self.lookup.draft(n)

    @property
    def n_free(self) -> int:
        """How many tokens it may sample before something else decides how it goes on."""
        if self.steering is not None or self.stops_at_sentence:
            return 1
        n = self.token_limit - len(self.tokens)
        return n if self.budget is None else int(min(n, self.budget.room))

    @property
    def often_forced(self) -> bool:
        """Whether it is worth knowing what its grammar forces before the next step is planned."""
        if self.sampling.grammar is None:
            return False
        return len(self.tokens) < MIN_TOKENS_TO_JUDGE or self.n_forced >= MIN_FORCED * len(self.tokens)

    @property
    def acceptance_rate(self) -> float:
        """Expected share of its draft tokens that are accepted."""
        if self.forced:
            return 1.0
        return 0.0 if self.lookup is None else self.lookup.acceptance_rate

    @property
    def can_yield(self) -> bool:
        """Whether it can lose its place between two steps, and go on later.

        A sequence that waits for another one or for a saved state computes soon.  A mask of its controller is for the next
        step.
        """
        if self.state not in (State.PREFILL, State.DECODE) or self.is_blocked:
            return False
        return self.control is None or self.control.phase not in (Phase.AWAITING_MASK, Phase.MASK_READY)

    @property
    def is_suspended(self) -> bool:
        """Its controller waits for others, so it has no work."""
        return self.control is not None and self.control.phase is Phase.SUSPENDED

    @property
    def has_called(self) -> bool:
        """Whether the text that was sent ends in a call of a tool, or follows one."""
        assembler = self.text.assembler
        return assembler.in_calls or bool(assembler.calls)

    # -- what a step computes of it -------------------------------------------------------------

    def prefill_input(self, start: int, n: int) -> StepInput:
        """``n`` tokens after the first ``start``; the step samples if they are the last known ones."""
        end = start + n  # after the prompt if the KV cache was lost in the middle of the answer
        tokens = self.known_tokens(start, end)
        samples = [self._sample_request(len(self.tokens))] if end == self.n_known else []
        grammar = self._grammar_state() if samples else None
        stop_ids, adapters = self.request.stop_token_ids, self.adapters.scales
        media = rows_between(self.prompt.media, start, end)
        return StepInput(self._seq_id, start, tokens, samples, stop_ids, grammar, adapters, media)

    def decode_input(self, drafts: abc.Sequence[int] = ()) -> StepInput:
        """The last token, and draft tokens that the same step verifies."""
        n = len(self.tokens)
        if self.sampling.history is not None:
            self.sampling.history.write(n, drafts)
        samples = [self._sample_request(n + i) for i in range(1 + len(drafts))]
        tokens = [self.tokens[-1], *drafts]
        stop_ids, grammar, adapters = self.request.stop_token_ids, self._grammar_state(), self.adapters.scales
        return StepInput(self._seq_id, self.n_computed, tokens, samples, stop_ids, grammar, adapters)

    @property
    def _seq_id(self) -> int:
        assert self.allocation is not None
        return self.allocation.seq_id

    def _sample_request(self, n_before: int) -> SampleRequest:
        sampling = self.sampling
        past = None if sampling.history is None else sampling.history.past(n_before)
        breakers = self.request.dry_sequence_breakers if sampling.params.dry_window else ()
        return SampleRequest(
            sampling.params, n_before, sampling.banned, sampling.bias, past, sampling.logprobs, breakers=breakers
        )

    def _grammar_state(self) -> GrammarState | None:
        grammar = self.sampling.grammar
        return None if grammar is None else GrammarState(grammar.key, np.array(self.tokens, np.int32))

    # -- results --------------------------------------------------------------------------------

    def append(self, token: int) -> None:
        """Add a sampled token."""
        if self.sampling.history is not None:
            self.sampling.history.write(len(self.tokens), (token,))
        self.tokens.append(token)
        if self.lookup is not None:
            self.lookup.append(token)

    def adapt(self, mu: float) -> None:
        """Note the state of mirostat after a sampled token."""
        self.sampling = attrs.evolve(self.sampling, params=self.sampling.params.with_mu(mu))

    def answer_message(self, n_before: int, *, opens_reasoning: bool) -> None:
        """A message of the user was inserted: the text of the answer begins anew after the first ``n_before`` tokens."""
        self.text.answer_message(n_before, self._assembler(opens_reasoning))

    def _assembler(self, opens_reasoning: bool) -> TextAssembler:
        return make_assembler(self.request.stops, self.prompt.reasoning, self.prompt.calling, is_open=opens_reasoning)

    def go_on(self) -> None:
        """Set the state by how much is to be computed before the next token is sampled."""
        self.state = State.DECODE if self.tokens and self.n_known - self.n_computed == 1 else State.PREFILL

    def fork(self, index: int, control: Control, now: float) -> Sequence:
        """A copy of it, of which nothing is in the KV cache yet, as answer ``index``; random numbers are its own."""
        sampling, own, text = self.sampling, self.index or 0, self.text
        params = sampling.params.with_seed((sampling.params.seed - own + index) % 2**63)
        return Sequence(
            request=self.request,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            sampling=attrs.evolve(sampling, params=params, history=sampling.history and sampling.history.copy()),
            end_ids=self.end_ids,
            sink=self.sink,
            principal=self.principal,
            priority=self.priority,
            adapters=self.adapters,
            arrived_at=now,
            admitted_at=now,
            due_at=now + self.target_itl_ms / 1e3,
            target_itl_ms=self.target_itl_ms,
            max_rows=self.max_rows,
            durable=False,
            index=index,
            control=control,
            tokens=list(self.tokens),
            text=AnswerText(copy.deepcopy(text.assembler), list(text.texts), logprobs=list(text.logprobs)),
        )

    def cut_at_stop(self, n: int, token_to_bytes: Callable[[int], bytes]) -> None:
        """Drop the tokens after the first ``n``, which end with or after a stop string."""
        del self.tokens[n:]
        if self.request.session_id is None:
            return
        stop = (self.text.assembler.matched or "").encode()
        tail, shown = token_to_bytes(self.tokens[-1]), n - 1
        most = len(tail) + 4 * len(stop)  # the stop string is in there, perhaps between bytes that are not valid text
        while shown and stop not in tail and len(tail) < most:
            shown -= 1
            tail = token_to_bytes(self.tokens[shown]) + tail
        self.n_tokens_before_stop = shown

    def computed_tokens(self) -> TokenIds:
        """The tokens in the KV cache that others may go on from; without a stop string that a session does not show."""
        n, n_prompt = self.n_computed, len(self.prompt.tokens)
        if n <= n_prompt:
            return self.prompt.tokens[:n]
        answer = np.asarray(self.tokens[: n - n_prompt][: self.n_tokens_before_stop], dtype=np.int32)
        return np.concatenate([self.prompt.tokens, answer])

    def report_prefill(self, n_prefilled: int) -> None:
        """Report that ``n_prefilled`` tokens of the prompt are in the KV cache, if the request asks for that.

        Prefill of an answer that goes on after the engine was restarted is not reported.
        """
        if self.request.progress and self.first_token_at is None:
            event = PrefillProgress(
                id=self.request.id,
                prefilled_tokens=n_prefilled,
                prompt_tokens=len(self.prompt.tokens),
                index=self.index,
            )
            self.sink.send(event)

    def record_token_time(self, now: float, *, paused: bool) -> float | None:
        """Note that tokens came; returns the milliseconds since the ones before, if that time was the server's."""
        gap_ms = None
        self.place.note_progress(now, has_gained=True)
        if self.last_token_at is None:
            self.first_token_at = now
        elif not paused:
            gap_ms = 1e3 * (now - self.last_token_at)
            before = gap_ms if self.inter_token_ewma_ms is None else self.inter_token_ewma_ms
            self.inter_token_ewma_ms = before + EWMA_WEIGHT * (gap_ms - before)
        self.last_token_at = now
        return gap_ms

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        reasoning = 0 if self.request.separate_reasoning else None
        if self.prompt.reasoning is not None:
            reasoning = self.text.n_reasoning_tokens
        return Usage(
            prompt_tokens=len(self.prompt.tokens),
            completion_tokens=len(self.tokens),
            cached_tokens=self.n_cached,
            dropped_tokens=self.prompt.dropped,
            reasoning_tokens=reasoning,
            sampled_tokens=None if self.control is None else self.control.n_sampled,
            inserted_tokens=None if self.control is None else self.control.n_inserted,
            energy_j=None if self.energy_j is None else round(self.energy_j, 3),
        )

    def timings(self, now: float) -> Timings:
        """Durations until ``now``."""
        first, n = self.first_token_at, len(self.tokens) - self.n_replayed
        generating_s = (self.last_token_at or 0.0) - (first or 0.0)
        return Timings(
            queue_ms=_ms((self.admitted_at if self.admitted_at is not None else now) - self.arrived_at),
            ttft_ms=None if first is None else _ms(first - self.arrived_at),
            total_ms=_ms(now - self.arrived_at),
            tokens_per_s=round((n - 1) / generating_s, 2) if n > 1 and generating_s > 0 else None,
        )

    @property
    def _has_ended_itself(self) -> bool:
        """Whether it ended where its grammar allows it: with one of the model's end tokens, or after its only call."""
        assembler = self.text.assembler
        if assembler.matched is None and assembler.has_ended:
            return True
        return (
            bool(self.tokens) and self.tokens[-1] in self.end_ids and self.tokens[-1] not in self.request.stop_token_ids
        )

    def eos(self, reason: FinishReason, now: float, explanation: Explanation | None) -> Eos:
        """The last event of a sequence that was served, wholly or in part.

        Args:
            explanation: why tokens of its prompt were computed again, if its request asks for that.
        """
        params, text, assembler = self.sampling.params, self.text, self.text.assembler
        return Eos(
            id=self.request.id,
            index=self.index,
            reason="tool_calls" if assembler.calls and reason == "stop" and assembler.matched is None else reason,
            usage=attrs.evolve(self.usage, explanation=explanation),
            timings=self.timings(now),
            text=None if self.request.stream else "".join(text.texts),
            reasoning="".join(text.reasoning_texts) or None,
            tool_calls=[*assembler.calls] or None,
            logprobs=None
            if self.request.stream or self.request.logprobs is None
            else [each for each in text.logprobs if each is not None],
            constraint_complete=None if self.sampling.grammar is None else self._has_ended_itself,
            stop=assembler.matched,
            waits_for=(self.control.waits_for or None) if reason == "deadlock" and self.control is not None else None,
            seed=None if params.greedy else params.seed,
            metadata=self.request.metadata,
        )


def _budget(prompt: Prompt) -> ReasoningBudget | None:
    return None if prompt.limit is None else prompt.limit.budget(prompt.text, prompt.calling)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
