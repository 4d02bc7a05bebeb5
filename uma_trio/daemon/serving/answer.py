"""One answer in flight: its request, its tokens, and where it stands."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence, Set
from typing import Final, Protocol

import attrs
import numpy as np
import trio

from uma_trio.daemon.kv.allocation import Allocation
from uma_trio.daemon.kv.lost_prefixes import Comparison
from uma_trio.daemon.policy.view import Priority, SequenceView
from uma_trio.daemon.prompts.media import rows_between, whole_part
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.answer_parts import (
    AnswerBounds,
    AnswerSampling,
    AnswerText,
    PlaceState,
    Speculation,
    TokenTimes,
)
from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.serving.controllers.state import NO_CONTROL, Control, NoControl
from uma_trio.daemon.text.assembler import TextAssembler
from uma_trio.daemon.text.regions import make_assembler
from uma_trio.engine_link.adapters import NO_ADAPTERS, AdapterSet
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.engine_link.messages import SampleRequest, StepInput
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.principal import Principal
from uma_trio.protocol.events import Eos, PrefillProgress
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Explanation, FinishReason, Timings, Usage

MIN_FORCED: Final = 0.125
"""Share of forced tokens from which on an answer counts as often forced; judged after ``MIN_TOKENS_TO_JUDGE``."""

MIN_TOKENS_TO_JUDGE: Final = 16

NO_IDS: Final[frozenset[int]] = frozenset()

NOT_PLACED: Final = -1
"""In a view, instead of the sequence id of an answer that waits."""


class EventSink(Protocol):
    """Where the events of an answer go.  Never blocks: a client that does not read fills it and so pauses its stream."""

    def send(self, *events: ServerEvent) -> None:
        """Pass ``events`` on, or keep them until the client takes them.  Does nothing once the client has gone."""

    @property
    def has_room(self) -> bool:
        """Whether the answer may go on.  The sink wakes the scheduler when this turns true again."""


class State(enum.Enum):
    """Where an answer is.  It moves down this list and may skip; a lost KV cache sends it from DECODE to PREFILL."""

    WAITING = enum.auto()
    """Waits for KV cells."""
    PREFILL = enum.auto()
    """Its tokens are being computed into the KV cache."""
    DECODE = enum.auto()
    """Generates."""
    FINISHED = enum.auto()
    """It is in no further step, and holds its KV cells only while one computes them.  ``Answer.done``: its last event is sent."""


@attrs.define(eq=False, kw_only=True)
class Answer:
    """One answer and everything that changes while it is served.  Times are trio's clock, in seconds.

    A fork takes over each argument that ``fork`` does not name.
    """

    request: Generate
    prompt: Prompt
    max_tokens: int
    sampling: AnswerSampling
    end_ids: Set[int]
    """Tokens without text: the end of the answer, as the model or the request has it."""
    sink: EventSink
    principal: Principal
    priority: Priority
    adapters: AdapterSet = NO_ADAPTERS
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
    times: TokenTimes
    durable: bool
    index: int | None
    """Which of the request's answers it is; ``None`` if there is only one, and no controller that could fork it."""
    control: Control | NoControl = NO_CONTROL
    """Where its controller stands, if it has one."""
    record: AnswerRecord | None = None
    """Keeps it, if it is detached."""
    exact_rows: int = 0
    """Most lost tokens of the answer in a chunk: ``ModelInfo.exact_rows``, if the answer promises an undisturbed text; 0: any
    number."""
    tokens: list[int] = attrs.field(factory=list)
    """Sampled so far."""
    text: AnswerText = attrs.field(
        default=attrs.Factory(lambda self: AnswerText(self._assembler(self.prompt.opens_reasoning)), takes_self=True)
    )

    # What a fork does not take over: these fields are no arguments.
    state: State = attrs.field(default=State.WAITING, init=False)
    allocation: Allocation | None = attrs.field(default=None, init=False)
    """Its place in the KV cache, which also counts the tokens there."""
    comparison: Comparison | None = attrs.field(default=None, init=False)
    """How its prompt compares with what the KV cache had when it got its first place."""
    n_cached: int = attrs.field(default=0, init=False)
    """Prompt tokens that did not have to be computed."""
    n_tokens_before_stop: int | None = attrs.field(default=None, init=False)
    """Tokens in front of the stop string that was found; only for sessions, which go on from there."""
    n_replayed: int = attrs.field(default=0, init=False)
    """Tokens of the answer that an earlier daemon has sampled."""
    speculation: Speculation = attrs.field(factory=Speculation, init=False)
    bounds: AnswerBounds = attrs.field(default=attrs.Factory(lambda self: self._bounds(), takes_self=True), init=False)
    place: PlaceState = attrs.field(
        default=attrs.Factory(lambda self: PlaceState(self.times.arrived_at), takes_self=True), init=False
    )
    keep_computed: bool = attrs.field(default=True, init=False)
    """What it computed may be kept for others; not of one that failed."""
    n_steps: tuple[int, int] = attrs.field(default=(0, 0), init=False)
    """Steps that have computed it alone, and together with others."""
    energy_j: float | None = attrs.field(default=None, init=False)
    """What it has taken of the energy that the machine counts; ``None``: nobody counts."""
    done: trio.Event = attrs.field(factory=trio.Event, init=False)
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
        """Waits for another answer to compute the prefix that both share, or for a saved state."""
        allocation = self.allocation
        return allocation is not None and (allocation.leader is not None or allocation.awaits_state)

    @property
    def n_known(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def n_computable(self) -> int:
        """Tokens that the next step may compute in all: all but the last one if none may be sampled after it."""
        return self.n_known if self.control.may_sample else self.n_known - 1

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer from ``start`` on, up to ``end``."""
        n_prompt = len(self.prompt.tokens)
        tokens: list[int] = self.prompt.tokens[start:end].tolist()
        return tokens if end <= n_prompt else tokens + self.tokens[max(0, start - n_prompt) : end - n_prompt]

    def view(self, *, pause: int = 0) -> SequenceView:
        """What the policy may know of an answer that no step in flight computes, without drafts.

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
            acceptance_rate=self.speculation.acceptance_rate,
        )

    def drafts(self, n: int) -> Sequence[int]:
        """At most ``n`` draft tokens; never so many that not all could become part of the answer.

        Tokens that its grammar forces are drafts that are always accepted.
        """
        n, speculation = max(0, min(n, self.n_free - 1)), self.speculation
        if speculation.forced:
            return speculation.forced[:n]
        return () if speculation.lookup is None or not n else speculation.lookup.draft(n)

    @property
    def n_free(self) -> int:
        """How many tokens it may sample before something else decides how it goes on."""
        bounds = self.bounds
        if bounds.steering is not None or bounds.stops_at_sentence:
            return 1
        n = bounds.token_limit - len(self.tokens)
        return n if bounds.budget is None else int(min(n, bounds.budget.n_free))

    @property
    def often_forced(self) -> bool:
        """Whether it is worth knowing what its grammar forces before the next step is planned."""
        if self.sampling.grammar is None:
            return False
        return len(self.tokens) < MIN_TOKENS_TO_JUDGE or self.speculation.n_forced >= MIN_FORCED * len(self.tokens)

    @property
    def ending_ids(self) -> Set[int]:
        """Tokens that end it when they are sampled.  With a controller, only that one ends it."""
        return NO_IDS if self.control.exists else self.end_ids

    @property
    def can_yield(self) -> bool:
        """Whether it can lose its place between two steps, and go on later.

        An answer that waits for another one or for a saved state computes soon.  A mask of its controller is for the next
        step.
        """
        if self.state not in (State.PREFILL, State.DECODE) or self.is_blocked:
            return False
        return self.control.may_yield

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

    def decode_input(self, drafts: Sequence[int] = ()) -> StepInput:
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
        if self.speculation.lookup is not None:
            self.speculation.lookup.append(token)

    def adapt(self, mu: float) -> None:
        """Note the state of mirostat after a sampled token."""
        self.sampling = attrs.evolve(self.sampling, params=self.sampling.params.with_mu(mu))

    def answer_message(self, n_before: int, *, opens_reasoning: bool) -> None:
        """A message of the user was inserted: the text of the answer begins anew after the first ``n_before`` tokens."""
        self.text.answer_message(n_before, self._assembler(opens_reasoning))

    def _assembler(self, opens_reasoning: bool) -> TextAssembler:
        return make_assembler(self.request.stops, self.prompt.reasoning, self.prompt.calling, is_open=opens_reasoning)

    def _bounds(self) -> AnswerBounds:
        limit = self.prompt.reasoning_limit
        return AnswerBounds(
            self.max_tokens, None if limit is None else limit.budget(self.prompt.text, self.prompt.calling)
        )

    def go_on(self) -> None:
        """Set the state by how much is to be computed before the next token is sampled."""
        self.state = State.DECODE if self.tokens and self.n_known - self.n_computed == 1 else State.PREFILL

    def fork(self, index: int, control: Control, now: float) -> Answer:
        """A copy of it, of which nothing is in the KV cache yet, as answer ``index``; random numbers are its own."""
        sampling, own = self.sampling, self.index or 0
        params = sampling.params.with_seed((sampling.params.seed - own + index) % 2**63)
        return attrs.evolve(
            self,
            sampling=attrs.evolve(sampling, params=params, history=sampling.history and sampling.history.copy()),
            times=TokenTimes(now, admitted_at=now),
            due_at=now + self.target_itl_ms / 1e3,
            deadline_at=math.inf,  # a forecast refuses requests, not forks; the request keeps the deadline
            grace_s=0.0,  # as after a first token
            durable=False,
            index=index,
            control=control,
            record=None,  # it keeps one answer
            exact_rows=0,
            tokens=[*self.tokens],
            text=self.text.copy(),
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
        if self.request.progress and self.times.first_token_at is None:
            event = PrefillProgress(
                id=self.request.id,
                prefilled_tokens=n_prefilled,
                prompt_tokens=len(self.prompt.tokens),
                index=self.index,
            )
            self.sink.send(event)

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
            sampled_tokens=self.control.n_sampled,
            inserted_tokens=self.control.n_inserted,
            energy_j=None if self.energy_j is None else round(self.energy_j, 3),
        )

    def timings(self, now: float) -> Timings:
        """Durations until ``now``."""
        return self.times.timings(now, len(self.tokens) - self.n_replayed)

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
        """The last event of an answer that was served, wholly or in part.

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
            else [token for token in text.logprobs if token is not None],
            constraint_complete=None if self.sampling.grammar is None else self._has_ended_itself,
            stop=assembler.matched,
            waits_for=[*self.control.waits_for] or None if reason == "deadlock" else None,
            seed=None if params.greedy else params.seed,
            metadata=self.request.metadata,
        )
