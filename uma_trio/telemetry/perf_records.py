"""What the perf log holds: a header a run, then one record for each tick and each request.

Plain values with their units in their names.  ``key`` and ``kind`` of a field say how it stands in the file;
``perf_format`` turns records into bytes and back, and docs/PERF_LOG.md has the tables for other readers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import attrs

VERSION: Final = 1
"""Of the format.  New fields do not change it, for readers skip what they do not know; a new meaning does."""


class Kind(enum.Enum):
    """How a value stands in the file.  Fractions are kept as whole numbers, which take a third of the bytes."""

    COUNT = enum.auto()
    """A whole number."""
    TEXT = enum.auto()
    NUMBER = enum.auto()
    """A float as it is."""
    SETTINGS = enum.auto()
    """A map from text to plain values."""
    MOMENT = enum.auto()
    """Seconds on the run's clock; in the file microseconds since the run's beginning."""
    DURATION = enum.auto()
    """Milliseconds; in the file microseconds."""
    SHARE = enum.auto()
    """Of 1; in the file ten-thousandths."""
    ROUNDED = enum.auto()
    """In the file the nearest whole number."""
    COUNTS = enum.auto()
    """Whole numbers."""
    PAIRS = enum.auto()
    """Pairs of whole numbers."""
    DURATIONS = enum.auto()
    """Milliseconds; in the file hundredths of a millisecond."""


def recorded(key: str, kind: Kind, default: Any = attrs.NOTHING) -> Any:
    """A field that stands under ``key`` in the file, and is left out there where it is its default."""
    return attrs.field(default=default, metadata={"key": key, "kind": kind})


@attrs.frozen(kw_only=True)
class Header:
    """What a run was made with."""

    NAME: ClassVar = "uma-trio perf log"

    version: int = recorded("version", Kind.COUNT, VERSION)
    uma_trio: str = recorded("uma_trio", Kind.TEXT)
    """Its version."""
    llama_cpp: str | None = recorded("llama_cpp", Kind.TEXT, None)
    """What the library was built from."""
    started: str = recorded("started", Kind.TEXT)
    """Wall clock, ISO 8601: when the run's clock showed ``clock_s``."""
    clock_s: float = recorded("clock_s", Kind.NUMBER)
    """Where moments count from, on the monotonic clock that ticks and requests share."""
    model: str = recorded("model", Kind.TEXT)
    """File name."""
    description: str = recorded("description", Kind.TEXT, "")
    """llama.cpp's words: architecture, size, quantisation."""
    size_bytes: int | None = recorded("size_bytes", Kind.COUNT, None)
    """Of the weights."""
    n_ctx: int = recorded("n_ctx", Kind.COUNT)
    n_seq_max: int = recorded("n_seq_max", Kind.COUNT)
    n_batch: int = recorded("n_batch", Kind.COUNT)
    scheduling: Mapping[str, Any] = recorded("scheduling", Kind.SETTINGS, attrs.Factory(dict))
    """The settings of that section."""


@attrs.define(kw_only=True)
class TickRecord:
    """One tick.  Not to be changed once it is handed over (and not frozen, for that makes it twice as dear)."""

    NAME: ClassVar = "tick"

    t_s: float = recorded("t", Kind.MOMENT)
    """When the step began."""
    seq_ids: Sequence[int] = recorded("seq", Kind.COUNTS, ())
    """The streams: sequences that decode, a row each."""
    prompts: Sequence[tuple[int, int]] = recorded("pre", Kind.PAIRS, ())
    """The prompts: (sequence, tokens of it in this tick)."""
    tokens: int = recorded("out", Kind.COUNT, 0)
    """Tokens that came of it: of streams, of prompts that ended, of drafts that were accepted."""
    context_tokens: int = recorded("ctx", Kind.COUNT, 0)
    """Tokens that the attention of all streams reads: those before each of them; see ``Work``."""
    prompt_context: float = recorded("pctx", Kind.ROUNDED, 0.0)
    """Tokens in front of the prompts' chunks, on average over their tokens."""
    n_decodes: int = recorded("calls", Kind.COUNT, 1)
    """Calls of llama_decode."""
    drafted: int = recorded("draft", Kind.COUNT, 0)
    """Tokens that were guessed and checked by it, beside the one of each stream."""
    accepted: int = recorded("acc", Kind.COUNT, 0)
    """Those of them that were right."""
    predicted_ms: float | None = recorded("pred", Kind.DURATION, None)
    """What the cost model expected of ``decode_ms`` and ``sample_ms`` together."""
    decode_ms: float = recorded("dec", Kind.DURATION, 0.0)
    sample_ms: float = recorded("smp", Kind.DURATION, 0.0)
    host_gap_ms: float | None = recorded("gap", Kind.DURATION, None)
    """Since the end of the tick before; ``None`` if there was nothing to do in between."""
    waiting: int = recorded("q", Kind.COUNT, 0)
    """Requests in the queue."""
    bytes_moved: float | None = recorded("bytes", Kind.ROUNDED, None)
    """Estimate of what was read from memory: weights and KV cache."""
    bandwidth_share: float | None = recorded("bw", Kind.SHARE, None)
    """That, as a share of what the device can read in the time."""

    @property
    def streams(self) -> int:
        return len(self.seq_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum([n for _, n in self.prompts])

    @property
    def ms(self) -> float:
        """From the beginning of the step to its end."""
        return self.decode_ms + self.sample_ms


@attrs.define(kw_only=True)
class RequestRecord:
    """One request, when it has ended.  Holds nothing of what was asked or answered."""

    NAME: ClassVar = "request"

    id: str = recorded("id", Kind.TEXT)
    tenant: int = recorded("tenant", Kind.COUNT, 0)
    """User id."""
    priority: str = recorded("class", Kind.TEXT, "normal")
    arrived_s: float = recorded("in", Kind.MOMENT)
    admitted_s: float | None = recorded("adm", Kind.MOMENT, None)
    """When it was given a sequence."""
    first_token_s: float | None = recorded("first", Kind.MOMENT, None)
    ended_s: float = recorded("end", Kind.MOMENT)
    prompt_tokens: int = recorded("prompt", Kind.COUNT, 0)
    cached_tokens: int = recorded("hit", Kind.COUNT, 0)
    """Tokens of the prompt that were in the KV cache already."""
    completion_tokens: int = recorded("out", Kind.COUNT, 0)
    reason: str = recorded("why", Kind.TEXT)
    """How it ended: ``stop``, ``length``, ``cancelled``, or an error code."""
    itl_ms: Sequence[float] = recorded("itl", Kind.DURATIONS, ())
    """Times between the moments at which tokens came, one after another: a right guess comes with the token before.
    Without those in which its client did not read."""

    @property
    def ttft_ms(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_token_s is None else 1e3 * (self.first_token_s - self.arrived_s)


@attrs.frozen(kw_only=True)
class Trailer:
    """A run came to its end in order."""

    NAME: ClassVar = "end"

    dropped: int = recorded("dropped", Kind.COUNT, 0)
    """Records that were not written, since the disk did not follow."""


Record = TickRecord | RequestRecord | Trailer


class PerfSink(Protocol):
    """Where records go.  Takes no time and never fails: what cannot be written is counted."""

    def tick(self, record: TickRecord) -> None: ...

    def request(self, record: RequestRecord) -> None: ...
