"""An open load: requests arrive at random, whether or not the server keeps up.  Counts those that meet an SLO."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import trio
from measure import Cpu, stream
from pinning import Pins, pinned
from processes import rss_bytes
from rigs import Rig, room

from uma_trio.client import BrokenProtocol, ServerError
from uma_trio.demo.load import Transport
from uma_trio.demo.recording import Answer, Question, durations_ms, percentile

NO_CONNECTION = "connection"
"""In place of an error code, if the server did not accept the connection or closed it."""


@attrs.frozen(kw_only=True)
class Mix:
    """A mix of short chats and long prompts.  Each size varies between 0.5 and 1.5 times its mean."""

    short_words: int
    short_tokens: int
    long_share: float
    long_words: int
    long_tokens: int

    def requests(self, seed: int) -> Iterator[Request]:
        """Yield requests without end; the same ones for the same seed."""
        rng = random.Random(seed)
        for n in itertools.count(1):
            short = rng.random() >= self.long_share
            words, tokens = (self.short_words, self.short_tokens) if short else (self.long_words, self.long_tokens)
            asked = stream(rng, f"r{n}", _around(rng, words), _around(rng, tokens))
            yield Request(question=asked.questions[0], interactive=short)

    @property
    def room(self) -> int:
        """Tokens of context that each sequence needs."""
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
    """A request of the mix."""

    question: Question
    interactive: bool


@attrs.frozen(kw_only=True)
class Slo:
    """The limits that a good request meets."""

    ttft_ms: float
    itl_ms: float
    of: Literal["p99", "mean"]
    """Statistic of the request's inter-token latencies."""

    def meets_ttft(self, answer: Answer) -> bool:
        return answer.ttft_ms is not None and answer.ttft_ms <= self.ttft_ms

    def meets_itl(self, answer: Answer) -> bool:
        gaps = durations_ms(answer.gaps)
        if not gaps:
            return True
        itl_ms = statistics.fmean(gaps) if self.of == "mean" else percentile(gaps, 99)
        return itl_ms is not None and itl_ms <= self.itl_ms

    def good(self, outcome: Outcome) -> bool:
        """Whether the request completed within both limits."""
        return outcome.ended and self.meets_ttft(outcome.answer) and self.meets_itl(outcome.answer)

    def __str__(self) -> str:
        return f"TTFT at most {self.ttft_ms:g} ms, {self.of} of its inter-token latencies at most {self.itl_ms:g} ms"


@attrs.define(kw_only=True)
class Outcome:
    """The outcome of a request."""

    answer: Answer
    refused: str | None = None
    """Error code of a refused request."""
    refused_ms: float | None = None
    """Time from the request to the refusal."""
    retry_after_ms: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.answer.reason is not None


@attrs.frozen(kw_only=True)
class Offered:
    """Measurements of an open load."""

    outcomes: list[Outcome]
    seconds: float
    """Time in which requests arrived."""
    wall_s: float
    cpu: Cpu
    rss_start: int | None
    """Memory of the server and its child processes, in bytes, before the load; ``None`` if its process is unknown."""
    rss_end: int | None


async def offer(
    rig: Rig, mix: Mix, *, rate: float, seconds: float, drain_s: float, seed: int, pins: Pins | None
) -> Offered:
    """Send ``rate`` requests per second for ``seconds``, as a Poisson process, and wait up to ``drain_s`` for answers.

    Then the remaining clients close their connections.  The same seed gives the same requests at every rate.
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
    """Requests per second that the server completes when ``clients`` clients send one request after another.

    The first quarter of the time does not count, because all clients start together.
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
    return None if pid is None else rss_bytes(pid)


@attrs.frozen(kw_only=True)
class Figures:
    """Figures of one run, or the medians of several; ``None`` without a measurement."""

    arrived: float
    arrived_per_s: float
    good: float
    goodput: float
    """Good requests per second."""
    refused: float
    unfinished: float
    """Neither refused nor complete at the end."""
    ttft_met_share: float | None
    """Share of admitted requests within the TTFT limit."""
    itl_met_share: float | None
    """Share of admitted requests within the ITL limit."""
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    """All inter-token latencies; likewise ``itl_p50_ms``."""
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
            ttft_met_share=_share([slo.meets_ttft(outcome.answer) for outcome in admitted]),
            itl_met_share=_share([slo.meets_itl(outcome.answer) for outcome in admitted]),
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
            generator_cpu=offered.cpu.generator / wall_s,
            others_cpu=offered.cpu.others / wall_s,
        )


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / 2**20
