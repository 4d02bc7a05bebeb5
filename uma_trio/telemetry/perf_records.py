"""The records of the perf log, and how they are encoded as JSON Lines.

A log is a sequence of lines, one JSON object each. Each start of the daemon appends a header line, then one line for
each tick and each finished request, then an end line. docs/PERF_LOG.md is the reference for readers of the file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Annotated, Any, Final, Protocol, TypeAlias, TypeVar

import attrs
import msgspec

FORMAT: Final = "uma-trio-perf"
VERSION: Final = 2
"""Version of the format. Readers ignore unknown fields, so a new field keeps the version; a new meaning raises it."""

FIRST_BYTES: Final = b'{"kind":"header","format":"%s"' % FORMAT.encode()
"""Every perf log begins with these bytes, after decompression."""

GZIP_MAGIC: Final = b"\x1f\x8b"


T = TypeVar("T")

Summed: TypeAlias = Annotated[T, "summed"]
"""A count of a tick.  The sum over all ticks is a metric: ``tokens_total`` of ``tokens``."""

Averaged: TypeAlias = Annotated[T, "averaged"]
"""Milliseconds of a tick.  The mean over the ticks that have them is a metric: ``decode_ms_avg`` of ``decode_ms``."""

Divided: TypeAlias = Annotated[T, "divided"]
"""What all passes of a tick have together: each pass gets a share."""

Repeated: TypeAlias = Annotated[T, "repeated"]
"""What each pass of a tick has."""

BeforePasses: TypeAlias = Annotated[T, "before passes"]
"""What comes before the first pass of a tick: the other passes have ``None``."""

OfThePass: TypeAlias = Annotated[T, "of the pass"]
"""What ``TickRecord.each_pass`` finds for each pass."""


class NotAPerfLog(ValueError):
    """The data is not a perf log of a known version. The message says why."""


class _Record(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """A line of the log. docs/PERF_LOG.md explains each field. A name that ends in ``_s`` counts seconds since the
    start of the run; one that ends in ``_ms`` is a duration."""


class Header(_Record, kw_only=True, tag="header", omit_defaults=False):
    """The first line of a run: what ran, and with which settings."""

    format: str = FORMAT
    version: int = VERSION
    uma_trio: str
    llama_cpp: str | None
    started: str
    clock_s: float
    """The monotonic clock at the start. The writer subtracts it from all times of the run."""
    model: str
    description: str = ""
    size_bytes: int | None = None
    n_ctx: int
    n_seq_max: int
    n_batch: int
    scheduling: dict[str, Any] = {}
    identity: dict[str, str] = {}
    """What decides the tokens of all answers: fingerprint of the model's file, of the chat template, and the environment of
    the engine: library, devices, threads, layout."""


class TickRecord(_Record, kw_only=True, tag="tick"):
    """One tick: what it computed, and where its time went.  Each field says what one of several passes has of it."""

    start_s: OfThePass[float]
    decode_seq_ids: Repeated[Sequence[int]] = []
    prefill_chunks: Repeated[Sequence[tuple[int, int]]] = []
    """Pairs of a sequence id and a number of prompt tokens."""
    recomputed_tokens: Divided[int] = 0
    """Tokens of these chunks that had been computed before, and were lost."""
    tokens: Summed[Divided[int]] = 0
    """Generated tokens, accepted draft tokens included."""
    context_tokens: Divided[int] = 0
    """KV cells that the attention of all decoding sequences scanned."""
    prefill_context: Repeated[float] = 0.0
    """KV cells from before this tick that each prompt token scanned."""
    decode_calls: Summed[Divided[int]] = 1
    n_passes: OfThePass[int] = 1
    """Forward passes in a row: tokens that each decoding sequence could get, draft tokens aside.  Other figures are sums."""
    draft_tokens: Summed[Divided[int]] = 0
    accepted_draft_tokens: Summed[Divided[int]] = 0
    model_draft_tokens: Summed[Divided[int]] = 0
    """Draft tokens that the draft model proposed; ``draft_tokens`` counts them, too."""
    accepted_model_draft_tokens: Summed[Divided[int]] = 0
    forced_tokens: Summed[Divided[int]] = 0
    """Accepted tokens that were the only ones a constraint allowed; ``draft_tokens`` does not count them."""
    late_masks: Summed[Divided[int]] = 0
    """Samples whose mask was not ready in time."""
    logits_rows: Divided[int] = 0
    """Rows of logits that were sampled."""
    copied_logits_rows: Divided[int] = 0
    """Those of them that had to be copied before sampling."""
    runs_ahead: Repeated[bool] = False
    """It was submitted while the tick before computed."""
    draft_model_ms: Averaged[BeforePasses[float | None]] = None
    """Time of the draft model, which is not part of ``duration_ms``; ``None`` if it computed nothing."""
    predicted_ms: Divided[float | None] = None
    """The cost model's prediction of ``duration_ms``."""
    decode_ms: Averaged[Divided[float]] = 0.0
    sample_ms: Averaged[Divided[float]] = 0.0
    mask_wait_ms: Averaged[Divided[float | None]] = None
    """How much of ``sample_ms`` was waiting for the masks of grammars; ``None`` if there were none."""
    embedding_ms: BeforePasses[float | None] = None
    """Time for texts to embed, which is not part of ``duration_ms``; ``None`` if there were none."""
    copy_ms: BeforePasses[float | None] = None
    """Time for saving and loading KV states, which is not part of ``duration_ms``; ``None`` if there were none."""
    host_gap_ms: BeforePasses[float | None] = None
    """Time since the end of the previous tick; ``None`` if there was no work in between."""
    idle_ms: BeforePasses[float | None] = None
    """How long there was no request since the previous tick; ``None`` if there always was one."""
    running: Repeated[int] = 0
    """Sequences that held places, whether or not this tick computed them."""
    queue_depth: Repeated[int] = 0
    bytes_moved: Divided[float | None] = None
    memory_bandwidth_share: Repeated[float | None] = None

    @property
    def n_decodes(self) -> int:
        return len(self.decode_seq_ids)

    @property
    def n_prefills(self) -> int:
        return len(self.prefill_chunks)

    @property
    def prompt_tokens(self) -> int:
        return sum(n for _, n in self.prefill_chunks)

    @property
    def duration_ms(self) -> float:
        return self.decode_ms + self.sample_ms

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_ms / 1e3

    def each_pass(self) -> list[TickRecord]:
        """A tick for each pass, with its share of the figures."""
        passes = self.n_passes
        if passes == 1:
            return [self]
        pass_s = self.duration_ms / passes / 1e3
        ticks = [msgspec.structs.replace(self, n_passes=1, start_s=self.start_s + n * pass_s) for n in range(passes)]
        for name in DIVIDED:
            if total := getattr(self, name):
                for n, tick in enumerate(ticks):
                    setattr(tick, name, _share(total, n, passes))
        for name in BEFORE_PASSES:
            for tick in ticks[1:]:
                setattr(tick, name, None)
        return ticks


def _share(total: float, n: int, passes: int) -> float:
    """The share of pass ``n``.  Shares of a count are whole, and have it as their sum."""
    return total * (n + 1) // passes - total * n // passes if isinstance(total, int) else total / passes


def fields_that_are(kind: Any, record: type[_Record] = TickRecord) -> tuple[str, ...]:
    """The fields of a record that have a kind, such as ``Summed``."""
    [word] = kind.__metadata__
    return tuple(
        [field.name for field in msgspec.structs.fields(record) if word in getattr(field.type, "__metadata__", ())]
    )


def check_passes(record: type[_Record]) -> None:
    """Check that each field of a record says what a pass has of it.

    Raises:
        TypeError: a field does not, or says several things.
    """
    kinds = (Divided, Repeated, BeforePasses, OfThePass)
    said = Counter([name for kind in kinds for name in fields_that_are(kind, record)])
    if wrong := [name for name in record.__struct_fields__ if said[name] != 1]:
        raise TypeError(f"{record.__name__} does not say what each pass has of {', '.join(wrong)}")


check_passes(TickRecord)
SUMMED: Final = fields_that_are(Summed)
AVERAGED: Final = fields_that_are(Averaged)
DIVIDED: Final = fields_that_are(Divided)
BEFORE_PASSES: Final = fields_that_are(BeforePasses)


class Replay(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What decided the tokens of an answer, with what is in the header. Hashes are SHA-256."""

    prompt_hash: str
    answer_hash: str
    """Both hash token ids, as 32-bit integers, little endian."""
    rules_hash: str
    """Hash of what decides next to the sampling parameters: constraint, bias, stop strings, stop tokens, adapters, limits."""
    sampling: dict[str, Any] = {}
    """The sampling parameters that are not built in, with the seed."""
    adapters: list[str] = []
    """Fingerprints, each with its scale."""
    cached_tokens: int = 0
    steps_alone: int = 0
    """Steps that computed this answer alone."""
    steps_shared: int = 0
    """Steps that computed others as well, in a batch of another shape."""
    inexact: str = ""
    """Why a request of its own cannot compute the same; empty if it can."""
    fields: dict[str, Any] = {}
    """A request that computes the answer again, with the tokens of its prompt; only with prompts."""
    answer: list[int] = []
    """Its tokens; only with prompts."""


class RequestRecord(_Record, kw_only=True, tag="request"):
    """One finished request. It holds no prompt and no text, unless ``perf_log_replay`` is ``prompts``."""

    id: str
    principal: str = ""
    priority: str = "normal"
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str
    inter_token_ms: Sequence[float] = []
    replay: Replay | None = None
    """With ``perf_log_replay``."""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else 1e3 * (self.first_token_s - self.arrived_s)


class Trailer(_Record, kw_only=True, tag="end", omit_defaults=False):
    """The last line of a run that ended in order."""

    dropped_records: int = 0


class PerfSink(Protocol):
    """Takes records, and never changes them. ``write`` neither blocks nor fails."""

    def write(self, record: TickRecord | RequestRecord) -> None: ...


MAX_RECENT: Final = 1024
"""Records that a ``RecentRecords`` keeps: 10 seconds of a daemon with 100 ticks a second."""


class RecentRecords:
    """The latest records since ``take`` was called last. Implements ``PerfSink``.

    Args:
        origin_s: the moment that times of the records count from.
    """

    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s
        self._records: deque[TickRecord | RequestRecord] = deque(maxlen=MAX_RECENT)
        self._dropped = 0

    def write(self, record: TickRecord | RequestRecord) -> None:
        """Keep a record; if there are too many, the oldest is dropped."""
        self._dropped += len(self._records) == self._records.maxlen
        self._records.append(record)

    def take(self) -> tuple[list[dict[str, Any]], int]:
        """Remove all records: as plain values, and the number of those that were dropped.

        A request is without ``inter_token_ms``, whose length has no bound, and without ``replay``.
        """
        records = [rounded(record, self._origin_s) for record in self._records]
        plain = [msgspec.to_builtins(record) for record in records]
        for record in plain:
            record.pop("inter_token_ms", None)
            record.pop("replay", None)
        dropped, self._dropped = self._dropped, 0
        self._records.clear()
        return plain, dropped


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Header | TickRecord | RequestRecord | Trailer)


def encode(record: Header | TickRecord | RequestRecord | Trailer, origin_s: float = 0.0) -> bytes:
    """One line, of a tick or a request with rounded numbers. NaN and infinity become ``null``."""
    if isinstance(record, TickRecord | RequestRecord):
        record = rounded(record, origin_s)
    return _encoder.encode(record) + b"\n"


def rounded(record: TickRecord | RequestRecord, origin_s: float) -> TickRecord | RequestRecord:
    """The record with seconds relative to ``origin_s`` and rounded to 1 µs, and other values to three decimals."""
    changes: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if type(value) is float:
            changes[name] = round(value - origin_s, 6) if name.endswith("_s") else round(value, 3)
    if isinstance(record, RequestRecord):
        changes["inter_token_ms"] = [round(value, 2) for value in record.inter_token_ms]
    return msgspec.structs.replace(record, **changes)


@attrs.define(kw_only=True)
class Run:
    """What one start of the daemon wrote."""

    header: Header
    ticks: list[TickRecord] = attrs.field(factory=list)
    requests: list[RequestRecord] = attrs.field(factory=list)
    """In the order in which they finished."""
    trailer: Trailer | None = None
    """``None`` if the daemon still runs or was killed."""
    unreadable_lines: int = 0


def decode(*parts: bytes) -> list[Run]:
    """Decode a log, given as the contents of its files, oldest first. Each may be gzipped.

    A header that equals the previous one continues that run, as a rotated log does. A torn last line is ignored.
    Other lines that cannot be decoded are counted in their run.

    Raises:
        NotAPerfLog: the data is empty, does not begin with a header, or has another version.
    """
    data = b"".join([_gunzip(part) if part.startswith(GZIP_MAGIC) else part for part in parts])
    if not data:
        raise NotAPerfLog("the file is empty")
    if not data.startswith(FIRST_BYTES):
        raise NotAPerfLog("it does not begin with the header of a perf log")
    runs: list[Run] = []
    for line in data.split(b"\n")[:-1]:
        try:
            record = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if not runs:
                raise NotAPerfLog("its first header is damaged") from None
            runs[-1].unreadable_lines += bool(line)
            continue
        if isinstance(record, Header):
            if record.version != VERSION:
                raise NotAPerfLog(f"its format has version {record.version}; this uma-trio reads version {VERSION}")
            if not runs or runs[-1].header != record:
                runs.append(Run(header=record))
        elif isinstance(record, TickRecord):
            runs[-1].ticks += record.each_pass()
        elif isinstance(record, RequestRecord):
            runs[-1].requests.append(record)
        else:
            runs[-1].trailer = record
    if not runs:
        raise NotAPerfLog("its first header is incomplete")
    return runs


def _gunzip(data: bytes) -> bytes:
    """Decompress ``data`` up to the first byte that is damaged or missing."""
    parts, file = [], gzip.GzipFile(fileobj=io.BytesIO(data))
    try:
        while part := file.read1(1 << 20):
            parts.append(part)
    except (EOFError, OSError, zlib.error):
        pass
    return b"".join(parts)
