"""One request on its way: what is known of it, and what its client is told."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import attrs
import numpy as np
import trio

from uma_trio.engine.records import Draw, Feed, TokenIds
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Eos, FinishReason, Generate, Logprobs, ServerEvent, Timings, Usage
from uma_trio.sampling import Bias, Lookup, SamplingParams, TextAssembler, Transcript
from uma_trio.scheduling.policy import Slot

EWMA_WEIGHT = 0.2


class Sink(Protocol):
    """Where a job's events go.  Never blocks: a client that does not read fills it and slows itself."""

    def send(self, event: ServerEvent) -> None:
        """Pass ``event`` on, or keep it until the client takes it.  To a dead client: nothing happens."""

    @property
    def has_room(self) -> bool:
        """Whether the job may go on; the sink wakes the runner when this turns true again."""


class State(enum.Enum):
    """Where a job is.

    It moves down this list and may skip; only a lost KV cache sends it from DECODE back to PREFILL.
    """

    QUEUED = enum.auto()
    """Waits for a sequence."""
    PREFILL = enum.auto()
    """Its tokens are being read into the KV cache."""
    DECODE = enum.auto()
    """Generates."""
    DONE = enum.auto()
    """Its last event is sent."""


@attrs.define(eq=False, kw_only=True)
class Job:
    """A request and everything that changes while it is served.  Only this room writes to it."""

    request: Generate
    prompt: Prompt
    max_tokens: int
    params: SamplingParams
    mask: TokenIds | None
    """Ids that must not be sampled: ``ignore_eos``, and what ``logit_bias`` bans."""
    bias: Bias | None = None
    transcript: Transcript | None = None
    """For its penalties, if there are any."""
    ending: Collection[int]
    """Tokens that end it."""
    sink: Sink
    arrived_at: float
    """On trio's clock, as all times here."""
    slot: Slot
    """What the policy sees of it."""
    index: int | None = None
    """Which of the request's answers it is, where there are several."""
    target_tbt_s: float
    """Its next token is due so long after the last one."""
    durable: bool = False
    """What it leaves in the cache is to be saved before it has to go."""

    state: State = State.QUEUED
    seq_id: int = -1
    n_fed: int = 0
    """Tokens that are in the KV cache, or will be when the step under way is done."""
    n_cached: int = 0
    """Of its prompt; others had computed them."""
    pause: int = 0
    """A step ends where so many tokens of its prompt are read, and a checkpoint is made; 0: nowhere before the end."""
    waits: bool = False
    """For another sequence to compute what both begin with."""
    tokens: list[int] = attrs.field(factory=list)
    """Sampled so far."""
    n_shown: int | None = None
    """Of a session's, those before the first that is part of the stop string which was found; else ``None``."""
    lookup: Lookup | None = None
    """Guesses at its next tokens, if it makes any."""
    guesses: Sequence[int] = ()
    """Those that the step under way checks."""
    texts: list[str] = attrs.field(factory=list)
    """What was not streamed."""
    logprobs: list[Logprobs] = attrs.field(factory=list)
    """The same of these."""
    assembler: TextAssembler = attrs.field(
        default=attrs.Factory(lambda self: TextAssembler(self.request.stops), takes_self=True)
    )
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    inter_token_ewma_ms: float | None = None
    gaps_ms: list[float] = attrs.field(factory=list)
    """Between the moments at which tokens came, for the perf log."""
    paused: bool = False
    """Its client did not read: the time until its next token is not the server's."""
    ended_at: float | None = None
    cancelled_at: float | None = None
    """When it was ended from outside: by its client, a timeout, or shutdown."""
    done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def cells(self) -> int:
        """KV cells that it can come to need.  The last sampled token is never fed."""
        return len(self.prompt.tokens) + self.max_tokens - 1

    @property
    def pending(self) -> int:
        """Tokens to be fed before the next one can be sampled, or before reading pauses."""
        if self.n_fed < self.pause:
            return self.pause - self.n_fed
        return len(self.prompt.tokens) + len(self.tokens) - self.n_fed

    @property
    def most_guesses(self) -> int:
        """More could not all become part of the answer."""
        return self.max_tokens - len(self.tokens) - 1

    def draw(self, step: int) -> Draw:
        """How its token number ``step``, counted from 0, is chosen."""
        past = None if self.transcript is None else self.transcript.past(step)
        return Draw(self.params, step, self.mask, self.bias, past, self.request.logprobs)

    def prompt_feed(self, n: int) -> Feed:
        """The next ``n`` tokens before the first one that is sampled next, booked as being in the cache."""
        n_prompt, pos = len(self.prompt.tokens), self.n_fed
        tokens: TokenIds | list[int] = self.prompt.tokens[pos : pos + n]
        if pos + n > n_prompt:  # the cache was lost in the middle of its answer
            tokens = [*tokens, *self.tokens[max(0, pos - n_prompt) : pos + n - n_prompt]]
        self.n_fed += n
        self.slot.context += n
        self.slot.pending = self.pending
        draws = (self.draw(len(self.tokens)),) if self.slot.pending == 0 else ()
        return Feed(self.seq_id, pos, tokens, draws)

    def token_feed(self, n_guesses: int) -> Feed:
        """The last token, and guesses at those that follow, booked as being in the cache."""
        pos, step, slot = self.n_fed, len(self.tokens), self.slot
        slot.pending = 0
        if not n_guesses:
            self.n_fed = slot.context = pos + 1
            return Feed(self.seq_id, pos, self.tokens[-1:], (self.draw(step),))
        assert self.lookup is not None
        self.guesses = self.lookup.guesses(n_guesses)
        self.n_fed = slot.context = pos + 1 + n_guesses
        if self.transcript is not None:
            self.transcript.write(step, self.guesses)
        draws = [self.draw(step + n) for n in range(1 + n_guesses)]
        return Feed(self.seq_id, pos, [self.tokens[-1], *self.guesses], draws)

    def checked(self, drawn: Sequence[int]) -> Sequence[int]:
        """The tokens that are its next ones: those after guesses that came true, and one more.

        What was fed for wrong guesses no longer counts as being in the cache.
        """
        n = 0
        while n < len(self.guesses) and drawn[n] == self.guesses[n]:
            n += 1
        self.n_fed = self.slot.context = self.n_fed - (len(self.guesses) - n)
        self.guesses = ()
        return drawn[: n + 1]

    def offer_guesses(self, most: int) -> None:
        """Tell the policy how many guesses there are; of one that makes any."""
        assert self.lookup is not None
        self.slot.drafts = len(self.lookup.guesses(min(most, self.most_guesses))) if most else 0
        self.slot.hits = self.lookup.hits

    def known_tokens(self) -> TokenIds:
        """What its sequence holds, less guesses that nobody has checked; of a session's, less a stop string."""
        n_prompt = len(self.prompt.tokens)
        if self.n_fed <= n_prompt:
            return self.prompt.tokens[: self.n_fed]
        told = np.asarray(self.tokens[: self.n_fed - n_prompt][: self.n_shown], dtype=np.int32)
        return np.concatenate([self.prompt.tokens, told])

    def stopped(self, n: int, piece: Callable[[int], bytes]) -> None:
        """Its first ``n`` tokens end with or behind a stop string: those after them do not count.

        Args:
            piece: token id -> its bytes.
        """
        del self.tokens[n:]
        if self.request.session_id is None:  # else it goes on with what was shown
            return
        assert self.assembler.matched is not None
        stop, tail, shown = self.assembler.matched.encode(), piece(self.tokens[-1]), n - 1
        most = len(tail) + 4 * len(stop)  # it is in there, though bytes that are no text may hide it
        while shown and stop not in tail and len(tail) < most:
            shown -= 1
            tail = piece(self.tokens[shown]) + tail
        self.n_shown = shown

    def gained(self, token: int) -> None:
        """Its next token has been sampled."""
        if self.transcript is not None:
            self.transcript.write(len(self.tokens), (token,))
        self.tokens.append(token)
        if self.lookup is not None:
            self.lookup.follow(token)

    def timed(self, now: float, *, paused: bool) -> float | None:
        """Its latest tokens came at ``now``; the milliseconds since those before, if they were the server's."""
        gap_ms = None
        if self.last_token_at is None:
            self.first_token_at = now
        elif not paused:
            gap_ms = 1e3 * (now - self.last_token_at)
            before = gap_ms if self.inter_token_ewma_ms is None else self.inter_token_ewma_ms
            self.inter_token_ewma_ms = before + EWMA_WEIGHT * (gap_ms - before)
        self.last_token_at = now
        return gap_ms

    def eos(self, reason: FinishReason, now: float) -> Eos:
        """The last event of a job that was served, wholly or in part."""
        first, n = self.first_token_at, len(self.tokens)
        generating_s = (self.last_token_at or 0.0) - (first or 0.0)
        return Eos(
            id=self.request.id,
            index=self.index,
            reason=reason,
            usage=Usage(
                prompt_tokens=len(self.prompt.tokens),
                completion_tokens=n,
                cached_tokens=self.n_cached,
                dropped_tokens=self.prompt.dropped,
            ),
            timings=Timings(
                queue_ms=_ms((self.admitted_at if self.admitted_at is not None else now) - self.arrived_at),
                ttft_ms=None if first is None else _ms(first - self.arrived_at),
                total_ms=_ms(now - self.arrived_at),
                tokens_per_s=round((n - 1) / generating_s, 2) if n > 1 and generating_s > 0 else None,
            ),
            text=None if self.request.stream else "".join(self.texts),
            logprobs=None if self.request.stream or self.request.logprobs is None else self.logprobs,
            stop=self.assembler.matched,
            seed=None if self.params.greedy else self.params.seed,
            metadata=self.request.metadata,
        )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
