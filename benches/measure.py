"""Run one load on one server; record when each token arrives, and the processor time of the processes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import attrs
import psutil
import trio
from pinning import Pins, pinned
from processes import cpu_s
from rigs import Rig

from uma_trio.demo import load
from uma_trio.demo.recording import Answer, Question, Stream, Track
from uma_trio.demo.scorecard import Counters

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "on",
    "for",
    "with",
    "by",
    "from",
    "at",
    "as",
    "that",
    "it",
    "his",
    "her",
    "they",
    "are",
    "this",
    "have",
    "had",
    "not",
    "but",
    "all",
    "one",
    "two",
    "can",
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "street",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
]
"""Common English words, a token each in most vocabularies."""


def stream(rng: random.Random, name: str, words: int, tokens: int, *, interactive: bool = True) -> Stream:
    """A stream with a raw prompt of common words that generates exactly ``tokens`` tokens with any model."""
    text = " ".join(rng.choices(WORDS, k=words))
    question = Question(text=text, raw=True, max_tokens=tokens, ignore_eos=True)
    return Stream(name=name, questions=(question,), interactive=interactive)


@attrs.frozen(kw_only=True)
class Cpu:
    """Processor time so far, in seconds."""

    generator: float
    """This process, the load generator."""
    server: float | None
    """The server and its child processes; ``None`` if its process is not known."""
    machine: float
    """All processes."""

    @classmethod
    def now(cls, pid: int | None) -> Cpu:
        all_cores = psutil.cpu_times()
        return cls(
            generator=time.process_time(),
            server=None if pid is None else cpu_s(pid),
            machine=sum(all_cores) - all_cores.idle - getattr(all_cores, "iowait", 0.0),
        )

    def since(self, before: Cpu) -> Cpu:
        server = self.server - before.server if self.server is not None and before.server is not None else None
        return Cpu(generator=self.generator - before.generator, server=server, machine=self.machine - before.machine)

    @property
    def others(self) -> float:
        """Time of all other processes, which is noise in every figure; includes the server if its process is not known."""
        return max(0.0, self.machine - self.generator - (self.server or 0.0))


@attrs.frozen(kw_only=True)
class Result:
    """Measurements of one load."""

    tracks: list[Track]
    wall_s: float
    counted: Counters | None
    cpu: Cpu

    @property
    def n_tokens(self) -> int:
        """Generated tokens, as the server counts them."""
        return sum(answer.completion_tokens for track in self.tracks for answer in track.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.wall_s

    def unfinished(self) -> list[str]:
        """A line for each answer that failed or has the wrong length."""
        return [
            f"{track.stream.name} got {answer.completion_tokens} of {answer.question.max_tokens} tokens and ended with "
            f"{answer.reason}"
            for track in self.tracks
            for answer in track.answers
            if (answer.reason, answer.completion_tokens) != ("length", answer.question.max_tokens)
        ]


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second from the first token of each answer to its last one, for answers that ran one at a time.

    Several tokens may arrive in one event; they count at its time.
    """
    tokens = sum((len(answer.token_s) - 1) * answer.completion_tokens / len(answer.token_s) for answer in answers)
    return tokens / sum(answer.token_s[-1] - answer.token_s[0] for answer in answers)


async def measure(
    rig: Rig, streams: Sequence[Stream], *, head_start: int = 0, every_s: float = 0.0, pins: Pins | None = None
) -> Result:
    """Run ``streams`` on the server and measure them.  ``head_start`` and ``every_s`` are those of ``load.together``."""
    counters = await rig.transport.counters()
    with pinned(rig.pid, pins):
        before, began = Cpu.now(rig.pid), trio.current_time()
        tracks = await load.together(streams, rig.transport, head_start=head_start, every_s=every_s)
        wall_s, cpu = trio.current_time() - began, Cpu.now(rig.pid).since(before)
    counters_after = await rig.transport.counters()
    counted = counters_after.since(counters) if counters and counters_after else None
    return Result(tracks=tracks, wall_s=wall_s, counted=counted, cpu=cpu)


async def warm_up(rig: Rig) -> None:
    """Send a short request that is not measured, so that weights are loaded and first allocations done."""
    await measure(rig, [stream(random.Random("warm up"), "warm up", 16, 8)])
