"""Texts to embed or to rank: which of them the next step computes, next to the streams.

A request waits here until all of its texts are computed; one that ranks has a text for each document.  A step takes one
chunk of them, as large as the time allows that streams leave.  Requests of the least served principal go first.  Texts
are computed in order, and only the last one of a chunk can go on in the next chunk, so the engine needs room for one
long text.  A model that does not generate computes each text in one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from uma_trio.daemon.policy.fairness import Service
from uma_trio.daemon.serving.answer import EventSink
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.messages import MAX_EMBEDDING_SEQUENCES, EmbeddingInput, ModelInfo, StepOutput
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.errors import DecodeFailed, QueueFull, UmaError
from uma_trio.principal import Principal
from uma_trio.protocol.answers import HealthCheck
from uma_trio.protocol.events import Embeddings, Eos, Failure, RankedDocument, Ranking
from uma_trio.protocol.requests import PoolingRequest
from uma_trio.protocol.usage import Timings, Usage

MIN_TOKENS: Final = 16
"""Tokens of a chunk, at least, unless there are fewer."""

RATE_WEIGHT: Final = 0.3
"""Weight of the latest chunk in the time for a token, if the chunk took less than predicted.  A longer time counts at
once."""

MAX_FLOATS_PER_EVENT: Final = 16_384
"""More embeddings take several events: encoding one keeps the event loop for about a millisecond."""

DIGITS: Final = 8
"""Decimal places of an embedding's numbers: what 32-bit floats can hold of numbers below 1."""

FATAL_CRASHES: Final = 2
"""A request fails if it was in this many steps that killed the engine."""


@attrs.define(eq=False)
class PendingEmbeddings:
    """A request to embed texts that is not answered yet."""

    done_word: ClassVar[str] = "embedded"
    """What the log says of its end."""

    request: PoolingRequest
    texts: Sequence[TokenIds]
    sink: EventSink
    principal: Principal
    dimensions: int | None = attrs.field(default=None, kw_only=True)
    """Numbers of an embedding that are wanted; ``None``: all."""
    adapters: Scales = ()
    arrived_at: float = attrs.field(factory=trio.current_time)
    done: trio.Event = attrs.field(factory=trio.Event)
    """Set after its last event."""
    n_done: int = 0
    """Texts that are computed."""
    n_started: int = 0
    """Texts of which all tokens are computed or in flight."""
    position: int = 0
    """Tokens of the next text that are computed or in flight."""
    n_tokens: int = 0
    """Tokens of the texts that are computed."""
    n_crashes: int = 0
    unsent: list[list[float]] = attrs.field(factory=list)
    """Embeddings, or scores, that no event has."""

    @property
    def usage(self) -> Usage:
        """Tokens up to here."""
        return Usage(prompt_tokens=self.n_tokens, completion_tokens=0)

    def add(self, vector: npt.NDArray[np.float32]) -> None:
        """Take the embedding or the score of the next text."""
        self.unsent.append(_shortened(vector, self.dimensions))

    def next_event(self) -> Embeddings | Ranking:
        """What has not been sent."""
        unsent, self.unsent = self.unsent, []
        more = self.n_done < len(self.texts)
        return Embeddings(embeddings=unsent, usage=self.usage, more=more, id=self.request.id)


@attrs.define(eq=False)
class PendingRanking(PendingEmbeddings):
    """A request to rank documents that is not answered yet: a document has one number, its score."""

    done_word = "ranked"

    top_n: int | None = attrs.field(default=None, kw_only=True)

    def next_event(self) -> Ranking:
        """All scores."""
        return Ranking(results=_ranked(self.unsent, self.top_n), usage=self.usage, id=self.request.id)


def _ranked(scores: Sequence[Sequence[float]], top_n: int | None) -> list[RankedDocument]:
    """The ``top_n`` best documents, the best one first."""
    documents = [RankedDocument(index=index, score=score) for index, [score] in enumerate(scores)]
    return sorted(documents, key=lambda document: -document.score)[:top_n]


@attrs.frozen
class EmbeddingChunk:
    """The texts that one step computes."""

    inputs: Sequence[EmbeddingInput]
    owners: Sequence[PendingEmbeddings]
    """The request of each of ``inputs``."""
    predicted_ms: float

    @property
    def adapters(self) -> Scales:
        """LoRA adapters that all of them are computed with."""
        return self.owners[0].adapters

    @property
    def n_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.inputs)

    def costs(self) -> dict[str, float]:
        """Tokens by principal, divided by its weight."""
        costs: dict[str, float] = {}
        for text, pending in zip(self.inputs, self.owners, strict=True):
            name = pending.principal.name
            costs[name] = costs.get(name, 0.0) + len(text.tokens) / pending.principal.weight
        return costs


class EmbeddingQueue:
    """All requests for embeddings of one model.

    Args:
        max_length: more are refused.
        on_end: called with the principal of a request that has ended.
    """

    def __init__(self, info: ModelInfo, max_length: int, on_end: Callable[[Principal], None]) -> None:
        self._info = info
        self._computes_whole = info.purpose != "generate"
        """A text is in one chunk, however long it is."""
        self._max_length = max(1, max_length)
        self._on_end = on_end
        self._pending: list[PendingEmbeddings] = []
        self._in_progress: PendingEmbeddings | None = None
        """Whose text goes on in the next chunk."""
        self._next_seq_id = 0
        self._open_seq_id = 0
        self._ms_per_token: float | None = None
        self._texts_total = 0
        self._tokens_total = 0
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingEmbeddings]:
        return iter(self._pending)

    @property
    def is_ready(self) -> bool:
        """Whether a chunk could be computed now."""
        return any(pending.sink.has_room for pending in self._pending)

    @property
    def min_chunk_ms(self) -> float:
        """What the smallest chunk is predicted to take."""
        return MIN_TOKENS * (self._ms_per_token or 0.0)

    def health(self) -> HealthCheck:
        """Whether another request may wait."""
        n_waiting = len(self._pending)
        is_full = n_waiting >= self._max_length
        return HealthCheck(name="queue", ok=not is_full, reason=f"{n_waiting} of {self._max_length} requests wait")

    def add(self, pending: PendingEmbeddings) -> None:
        """Let ``pending`` wait for its turn.

        Raises:
            QueueFull: too many wait already.
        """
        if len(self._pending) >= self._max_length:
            raise QueueFull(f"{len(self._pending)} requests for embeddings or rankings wait already")
        self._pending.append(pending)

    # -- chunks ---------------------------------------------------------------------------------

    def next_chunk(self, time_ms: float, service: Service) -> EmbeddingChunk | None:
        """The texts that the next step computes; ``None`` if there are none.

        Args:
            time_ms: how long that may take.  If it is too short for the smallest chunk, it is exceeded.
            service: what each principal was given so far.
        """
        room = self._info.embedding_batch
        if self._ms_per_token is None:
            room = min(room, MIN_TOKENS)  # the first chunk measures
        else:
            room = min(room, max(MIN_TOKENS, int(time_ms / self._ms_per_token)))
        inputs: list[EmbeddingInput] = []
        owners: list[PendingEmbeddings] = []
        for pending in self._turns(service):
            if not room or len(inputs) == MAX_EMBEDDING_SEQUENCES:
                break
            if owners and owners[0] is not pending and (pending.n_crashes or owners[0].n_crashes):
                continue  # one that is suspected of a crash has a chunk of its own
            if owners and owners[0].adapters != pending.adapters:
                continue  # one call has one set of adapters
            if inputs and self._computes_whole and len(pending.texts[pending.n_started]) > room:
                break  # it goes into the next chunk
            part = self._take(pending, room)
            inputs.append(part)
            owners.append(pending)
            room = max(0, room - len(part.tokens))
        if not inputs:
            return None
        n_tokens = sum(len(text.tokens) for text in inputs)
        return EmbeddingChunk(inputs, owners, n_tokens * (self._ms_per_token or 0.0))

    def _turns(self, service: Service) -> Iterator[PendingEmbeddings]:
        """Whose text is next: first the text in progress, then those of clients that read, least served principal first."""
        if self._in_progress is not None:
            yield self._in_progress
        for pending in sorted(self._pending, key=lambda pending: service.counter(pending.principal.name)):
            while pending.sink.has_room and pending.n_started < len(pending.texts):
                n_started = pending.n_started
                yield pending
                if pending.n_started == n_started:
                    break  # its text goes on in the next chunk, or it was passed over

    def _take(self, pending: PendingEmbeddings, room: int) -> EmbeddingInput:
        """Take up to ``room`` tokens of the next text of ``pending``."""
        text = pending.texts[pending.n_started]
        if self._computes_whole:
            room = len(text)
        if not pending.position:
            self._open_seq_id = self._next_seq_id
            self._next_seq_id = (self._next_seq_id + 1) % MAX_EMBEDDING_SEQUENCES
        tokens = text[pending.position : pending.position + room].tolist()
        part = EmbeddingInput(self._open_seq_id, pending.position, tokens, len(text))
        pending.position += len(tokens)
        self._in_progress = pending
        if part.is_last:
            pending.n_started += 1
            pending.position = 0
            self._in_progress = None
        return part

    def complete(self, chunk: EmbeddingChunk, output: StepOutput) -> None:
        """A step has computed ``chunk``: send what is complete."""
        self._n_bytes = output.embedding_bytes
        if output.embedding_failure is not None:
            self._in_progress = None
            for pending in dict.fromkeys(chunk.owners):
                self.end(pending, DecodeFailed(f"the embeddings cannot be computed: {output.embedding_failure}"))
            return
        ms, before = output.embedding_ms / chunk.n_tokens, self._ms_per_token or 0.0
        self._ms_per_token = max(ms, before + RATE_WEIGHT * (ms - before))  # a chunk that is too long delays streams
        self._tokens_total += chunk.n_tokens
        vectors = iter(output.embeddings)
        for text, pending in zip(chunk.inputs, chunk.owners, strict=True):
            if not text.is_last:
                continue
            vector = next(vectors)
            self._texts_total += 1
            if pending.done.is_set():
                continue
            if not np.isfinite(vector).all():
                number = pending.n_done
                self.end(
                    pending, DecodeFailed(f"the model computes no finite numbers for text {number} of the request")
                )
                continue
            pending.n_done += 1
            pending.n_crashes = 0
            pending.n_tokens += text.length
            pending.add(vector)
            if pending.n_done == len(pending.texts):
                pending.sink.send(pending.next_event())
                self._remove(pending)
            elif len(pending.unsent) * len(vector) >= MAX_FLOATS_PER_EVENT:
                pending.sink.send(pending.next_event())

    def lost(self, chunk: EmbeddingChunk | None) -> None:
        """The engine has lost what it had computed: texts in progress begin again.

        Args:
            chunk: what the fatal step computed.  A request that was in such a step twice fails.
        """
        self._in_progress = None
        self._n_bytes = 0
        for pending in dict.fromkeys(chunk.owners if chunk is not None else ()):
            pending.n_crashes += 1
            if pending.n_crashes >= FATAL_CRASHES:
                self.end(pending, DecodeFailed("the engine failed twice while it computed these embeddings"))
        for pending in self._pending:
            pending.n_started, pending.position = pending.n_done, 0

    # -- the end --------------------------------------------------------------------------------

    def end(self, pending: PendingEmbeddings, reason: UmaError | None) -> None:
        """End ``pending`` with an error, or as cancelled.  Does nothing to one that has ended."""
        if pending.done.is_set():
            return
        if reason is None:
            pending.sink.send(cancelled(pending.request, pending.arrived_at, pending.usage))
        else:
            reason.request_id = pending.request.id
            pending.sink.send(Failure.of(reason))
        self._remove(pending)

    def _remove(self, pending: PendingEmbeddings) -> None:
        self._pending.remove(pending)
        if self._in_progress is pending:
            self._in_progress = None
        pending.done.set()
        self._on_end(pending.principal)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        return {
            "requests": len(self._pending),
            "texts_total": self._texts_total,
            "tokens_total": self._tokens_total,
            "ms_per_token": None if self._ms_per_token is None else round(self._ms_per_token, 4),
            "bytes": self._n_bytes,
        }


def cancelled(request: PoolingRequest, arrived_at: float, usage: Usage) -> Eos:
    """The last event of a request that its client has cancelled."""
    total_ms = round(1e3 * (trio.current_time() - arrived_at), 3)
    return Eos(id=request.id or "", reason="cancelled", usage=usage, timings=Timings(queue_ms=0.0, total_ms=total_ms))


def _shortened(vector: npt.NDArray[np.float32], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` numbers, with length 1."""
    shortened = vector.astype(np.float64)
    if dimensions is not None and dimensions < len(shortened):
        shortened = shortened[:dimensions]
        shortened /= np.sqrt(shortened @ shortened) or 1.0
    numbers: list[float] = shortened.round(DIGITS).tolist()
    return numbers
