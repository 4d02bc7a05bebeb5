"""Requests that come when they come, whether the server keeps up or not; and which of them were served well."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import psutil
import trio
from measure import Cpu, stream
from pinning import Pins, pinned
from rigs import Rig, room

from uma_trio.client import BrokenProtocol, ServerError
from uma_trio.demo.load import Transport
from uma_trio.demo.recording import Answer, Question, durations_ms, percentile

NO_CONNECTION = "connection"
"""Why a request was refused where the server said nothing."""


@attrs.frozen(kw_only=True)
class Mix:
    """Short chats, and some long prompts among them."""

    short_words: int
    """In the mean, as all of these; from half of it to one and a half."""
    short_tokens: int
    long_share: float
    long_words: int
    long_tokens: int

    def requests(self, seed: int) -> Iterator[Request]:
        """Without end; the same ones for the same seed."""
        rng = random.Random(seed)
        for n in itertools.count(1):
            short = rng.random() >= self.long_share
            words, tokens = (self.short_words, self.short_tokens) if short else (self.long_words, self.long_tokens)
            asked = stream(rng, f"r{n}", _around(rng, words), _around(rng, tokens))
            yield Request(question=asked.questions[0], interactive=short)

    @property
    def room(self) -> int:
        """Tokens of context that a sequence needs."""
        return max(
            room(_most(self.short_words), _most(self.short_tokens)),
            room(_most(self.long_words), _most(self.long_tokens)),
        )

    def __str__(self) -> str:
        return (
            f"{1 - self.long_share:.0%} of about {self.short_words} words + {self.short_tokens} tokens, "
            f"{self.long_share:.0%} of {self.long_words} + {self.long_tokens}"
        )


def _around(rng: random.Random, mean: int) -> int:
    return max(1, rng.randint(mean // 2, _most(mean)))


def _most(mean: int) -> int:
    return mean + mean // 2


@attrs.frozen(kw_only=True)
class Request:
    """One of them."""

    question: Question
    interactive: bool


@attrs.frozen(kw_only=True)
class Slo:
    """What makes a request a good one."""

    ttft_ms: float
    itl_ms: float
    of: Literal["p99", "mean"]
    """Of the request's own times between tokens."""

    def soon(self, answer: Answer) -> bool:
        return answer.ttft_ms is not None and answer.ttft_ms <= self.ttft_ms

    def steady(self, answer: Answer) -> bool:
        gaps = durations_ms(answer.gaps)
        if not gaps:
            return True
        found = statistics.fmean(gaps) if self.of == "mean" else percentile(gaps, 99)
        return found is not None and found <= self.itl_ms

    def good(self, outcome: Outcome) -> bool:
        return outcome.ended and self.soon(outcome.answer) and self.steady(outcome.answer)

    def __str__(self) -> str:
        return f"TTFT at most {self.ttft_ms:g} ms, {self.of} time between its tokens at most {self.itl_ms:g} ms"


@attrs.define(kw_only=True)
class Outcome:
    """What became of a request."""

    answer: Answer
    refused: str | None = None
    """The error's code."""
    refused_ms: float | None = None
    """From sending it until that was known."""
    retry_after_ms: float | None = None

    @property
    def ended(self) -> bool:
        """It has its whole answer."""
        return self.answer.reason is not None


@attrs.frozen(kw_only=True)
class Offered:
    """All that was measured."""

    outcomes: list[Outcome]
    seconds: float
    """For how long requests came."""
    wall_s: float
    cpu: Cpu
    rss_start: int | None
    """Bytes of the server, as the next; ``None`` where its process is not known."""
    rss_end: int | None


async def offer(
    rig: Rig, mix: Mix, *, rate: float, seconds: float, drain_s: float, seed: int, pins: Pins | None
) -> Offered:
    """Poisson arrivals, ``rate`` a second for ``seconds``; then ``drain_s`` for those that have not ended.

    Who has no answer by then hangs up.  The same seed gives the same requests at any rate, only denser.
    """
    rng = random.Random(f"arrivals {seed}")
    outcomes: list[Outcome] = []
    with pinned(rig.pid, pins):
        before, began, rss_start = Cpu.now(rig.pid), trio.current_time(), _rss(rig.pid)
        async with trio.open_nursery() as nursery:
            at_s = 0.0
            for request in mix.requests(seed):
                at_s += rng.expovariate(rate)
                if at_s > seconds:
                    break
                await trio.sleep_until(began + at_s)
                outcome = Outcome(answer=Answer(question=request.question, sent_s=trio.current_time()))
                outcomes.append(outcome)
                nursery.start_soon(_ask, rig.transport, request, outcome)
            nursery.cancel_scope.deadline = began + seconds + drain_s
        return Offered(
            outcomes=outcomes,
            seconds=seconds,
            wall_s=trio.current_time() - began,
            cpu=Cpu.now(rig.pid).since(before),
            rss_start=rss_start,
            rss_end=_rss(rig.pid),
        )


async def capacity(rig: Rig, mix: Mix, *, clients: int, seconds: float, seed: int, pins: Pins | None) -> float:
    """Requests a second that are done where ``clients`` ask one after another, without a pause.

    The first quarter of the time is not counted: until then they have all begun together.
    """
    ended_s: list[float] = []
    requests = mix.requests(seed)

    async def client() -> None:
        for request in requests:
            outcome = Outcome(answer=Answer(question=request.question, sent_s=trio.current_time()))
            await _ask(rig.transport, request, outcome)
            ended_s.append(trio.current_time())

    with pinned(rig.pid, pins):
        began = trio.current_time()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(clients):
                    nursery.start_soon(client)
    counted = [at for at in ended_s if at > began + seconds / 4]
    return len(counted) / (0.75 * seconds)


async def _ask(transport: Transport, request: Request, outcome: Outcome) -> None:
    answer = outcome.answer

    def on_token(text: str) -> None:
        answer.token_s.append(trio.current_time())
        answer.texts.append(text)

    try:
        async with transport.connect(interactive=request.interactive) as connection:
            end = await connection.ask(request.question, on_token)
    except ServerError as error:
        if not str(error.code).startswith("E_LIMIT"):
            raise
        outcome.refused, outcome.retry_after_ms = error.code, error.event.retry_after_ms
    except (BrokenProtocol, OSError):
        outcome.refused = NO_CONNECTION
    else:
        answer.reason = end.reason
        answer.prompt_tokens, answer.completion_tokens = end.prompt_tokens, end.completion_tokens
    if outcome.refused is not None:
        outcome.refused_ms = 1e3 * (trio.current_time() - answer.sent_s)


def _rss(pid: int | None) -> int | None:
    return None if pid is None else int(psutil.Process(pid).memory_info().rss)


@attrs.frozen(kw_only=True)
class Figures:
    """Of one run, or the medians of several; ``None`` of what there was none of."""

    arrived: float
    arrived_per_s: float
    good: float
    goodput: float
    """Good ones a second."""
    refused: float
    unfinished: float
    """Neither refused nor answered when the time was over."""
    soon_share: float | None
    """Of those that were admitted: who had a token in time, and whose tokens came in time."""
    steady_share: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    """Of all times between tokens."""
    refused_p50_ms: float | None
    refused_max_ms: float | None
    retry_after_p50_ms: float | None
    tokens_per_s: float
    rss_start_mib: float | None
    rss_end_mib: float | None
    generator_cpu: float
    others_cpu: float

    @classmethod
    def of(cls, offered: Offered, slo: Slo) -> Figures:
        outcomes, wall_s = offered.outcomes, offered.wall_s
        admitted = [outcome for outcome in outcomes if outcome.refused is None]
        refused = [outcome for outcome in outcomes if outcome.refused is not None]
        good = sum(slo.good(outcome) for outcome in outcomes)
        ttft = [outcome.answer.ttft_ms for outcome in admitted if outcome.answer.ttft_ms is not None]
        gaps = durations_ms(gap for outcome in admitted for gap in outcome.answer.gaps)
        refused_ms = [outcome.refused_ms for outcome in refused if outcome.refused_ms is not None]
        retry_ms = [outcome.retry_after_ms for outcome in refused if outcome.retry_after_ms is not None]
        return cls(
            arrived=len(outcomes),
            arrived_per_s=len(outcomes) / offered.seconds,
            good=good,
            goodput=good / offered.seconds,
            refused=len(refused),
            unfinished=sum(not outcome.ended for outcome in admitted),
            soon_share=_share([slo.soon(outcome.answer) for outcome in admitted]),
            steady_share=_share([slo.steady(outcome.answer) for outcome in admitted]),
            ttft_p50_ms=percentile(ttft, 50),
            ttft_p99_ms=percentile(ttft, 99),
            itl_p50_ms=percentile(gaps, 50),
            itl_p99_ms=percentile(gaps, 99),
            refused_p50_ms=percentile(refused_ms, 50),
            refused_max_ms=max(refused_ms, default=None),
            retry_after_p50_ms=percentile(retry_ms, 50),
            tokens_per_s=sum(len(outcome.answer.token_s) for outcome in admitted) / wall_s,
            rss_start_mib=_mib(offered.rss_start),
            rss_end_mib=_mib(offered.rss_end),
            generator_cpu=offered.cpu.us / wall_s,
            others_cpu=offered.cpu.others / wall_s,
        )


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / 2**20
