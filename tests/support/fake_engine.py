"""An engine without a model: it tracks the content of the KV cache, and fails where llama.cpp would fail.

The next token of a sequence is a function of all tokens before it, and of seed and position where sampling is not greedy.
So a test can verify that a stream was computed from the right prefix: see ``expected_continuation``.  A penalty excludes all
tokens that it applies to.  A ``Past`` that differs from the sequence fails the step.  A bias of at least 50 decides, and the
mask of a controller excludes all tokens that are 50 below its best.  The fake engine and the real one pass the same tests:
see ``engine_contract``.
"""

from __future__ import annotations

import copy
import math
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from tests.support.state_files import hashes_of
from uma_trio import config
from uma_trio.daemon.engines.link import KnownGrammars
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.engine.matchers import Matchers
from uma_trio.engine.state_check import FRONT_PAGES
from uma_trio.engine.worker import StepRunner
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.devices import DeviceMemory, Devices
from uma_trio.engine_link.interrupts import FLAG_BYTES, N_STEPS, Interrupts
from uma_trio.engine_link.kv_ops import (
    MAX_CHECKPOINTS,
    CopyPrefix,
    DropCheckpoint,
    KvOp,
    LoadState,
    MeasureState,
    SaveCheckpoint,
    SaveState,
    Truncate,
)
from uma_trio.engine_link.masks import MaskFile, Masks
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.messages import (
    MASK_LATE,
    MAX_EMBEDDING_SEQUENCES,
    AdapterFile,
    DefineGrammar,
    Draft,
    Drafted,
    DraftInput,
    EmbeddingInput,
    EngineDied,
    EngineError,
    LayoutReport,
    LoadError,
    MasksReady,
    ModelInfo,
    Ready,
    Revoked,
    SampleRequest,
    Start,
    Step,
    StepCallbacks,
    StepFailed,
    StepInput,
    StepOutput,
)
from uma_trio.engine_link.sampling import NO_TOKEN, SamplingParams, TokenLogprobs
from uma_trio.engine_link.state_pages import PAGE_BYTES
from uma_trio.grammar.vocabulary import Vocabulary
from uma_trio.models.purpose import Purpose

N_VOCAB = 1000
EMBEDDING_WIDTH = 8
EOG = 0
STATE_BYTES = 1536
"""Size of one token in a saved state."""
STATE_BYTES_PER_MS = 3e5
"""Simulated speed of saving and loading."""
CHECKPOINT_BYTES = 64


def adapters_digest(scales: Scales) -> int:
    """What adapters add to the digest of each token that is computed with them."""
    return zlib.crc32(repr([(number, float(scale)) for number, scale in scales]).encode()) % 9973 if scales else 0


class SequenceContent:
    """The content of a sequence: its tokens, their cells, and for each length a digest of the tokens so far.

    The digest also depends on the adapters that each token was computed with.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        digests: Iterable[int] = (17,),
        cells: Iterable[object] = (),
        adapters: Iterable[int] = (),
    ) -> None:
        self._tokens = list(tokens)
        self._digests = list(digests)
        self._cells = list(cells)
        self._adapters = list(adapters)

    @property
    def length(self) -> int:
        return len(self._digests) - 1

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def cells(self) -> list[object]:
        """Copies of a sequence share its cells."""
        return self._cells

    @property
    def adapters(self) -> list[int]:
        """``adapters_digest`` for each token."""
        return self._adapters

    def read(self, tokens: Iterable[int], adapters: int = 0) -> None:
        read = list(map(int, tokens))
        digest, added, digests = self._digests[-1], 7 + adapters, self._digests
        for token in read:
            digests.append(digest := (digest * 31 + token + added) % 99991)
        self._tokens += read
        self._adapters += [adapters] * len(read)
        self._cells += [object() for _ in read]

    def digest(self, length: int) -> int:
        """The digest of the first ``length`` tokens."""
        return self._digests[length]

    def before(self, length: int, n: int) -> list[int]:
        """The last ``n`` of the first ``length`` tokens, without placeholders of rows."""
        found = self._tokens[:length]
        if any(token >= PLACEHOLDER for token in found):
            found = [token for token in found if token < PLACEHOLDER]
        return found[len(found) - n :]

    def beginning(self, length: int) -> SequenceContent:
        return SequenceContent(
            self._tokens[:length], self._digests[: length + 1], self._cells[:length], self._adapters[:length]
        )

    def next_token(self, length: int, sample: SampleRequest, repeats: int = 0) -> int:
        """The most likely token behind the first ``length`` tokens; EOG only as a repetition."""
        token = 1 + self._digests[length] % (N_VOCAB - 1)
        if repeats and length >= repeats and self._digests[length] % 8:
            token = self._tokens[length - repeats]
        if sample.params.is_adaptive:
            token = 1 + (token + round(100 * sample.params.surprise_limit)) % (N_VOCAB - 1)
        if sample.params.greedy or (sample.params.seed + 3 * sample.n_before) % 7:
            return token
        return 1 + (token + sample.params.seed + sample.n_before) % (N_VOCAB - 1)


def next_mu(params: SamplingParams, token: int) -> float:
    """The state of mirostat after ``token``."""
    return params.surprise_limit - params.mirostat_eta * (token % 11 - params.mirostat_tau)


def chosen(preferred: Iterable[int], avoided: Collection[int]) -> int:
    """The first token that is not avoided."""
    return next(token for token in chain(preferred, range(1, N_VOCAB)) if token not in avoided)


def penalised_tokens(params: SamplingParams, tokens: Sequence[int], n_prompt: int) -> set[int]:
    """The tokens that penalties apply to.

    Args:
        tokens: prompt and answer.
    """
    window = tokens[-params.repetition_window :] if params.repetition_window else ()
    return {*window, *(tokens[n_prompt:] if params.counts_answer else ())}


def expected_score(token: int, n: int) -> TokenLogprobs:
    """The log-probability of ``token``, with the ``n`` most likely tokens."""
    return TokenLogprobs(-(token % 97) / 8, tuple((token + i, -(token % 97 + i) / 8) for i in range(n)))


def expected_continuation(
    prompt: Iterable[int],
    n: int,
    *,
    repeats: int = 0,
    params: SamplingParams | None = None,
    adapters: Scales = (),
) -> list[int]:
    """The first ``n`` tokens that follow ``prompt``, if none are banned."""
    content, params, with_adapters = SequenceContent(), params or SamplingParams(), adapters_digest(adapters)
    read = list(prompt)
    n_prompt = len(read)
    content.read(read, with_adapters)
    for step in range(n):
        token = content.next_token(content.length, SampleRequest(params, step), repeats)
        read.append(chosen([token], penalised_tokens(params, read, n_prompt)))
        content.read(read[-1:], with_adapters)
        if params.is_adaptive:
            params = params.with_mu(next_mu(params, read[-1]))
    return read[n_prompt:]


FIRST_BYTE = N_VOCAB - 11
"""For grammars, the last ids are single digits and a space: a vocabulary must spell any text.  They are never sampled."""


def fake_vocabulary() -> Vocabulary:
    """Tokens are decimal numbers and a space, and 0 ends an answer."""
    tokens = [b"<end>", *[b"%d " % token for token in range(1, FIRST_BYTE)], *[b"%d" % n for n in range(10)], b" "]

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for word in re.findall(r"[1-9][0-9]* |.", text):
            whole = word.endswith(" ") and len(word) > 1 and int(word) < FIRST_BYTE
            found += [int(word)] if whole else [tokens.index(character.encode()) for character in word]
        return found

    return Vocabulary(tokens, [EOG], [EOG], None, encode)


def expected_embedding(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The embedding of a text: how often it has tokens of each remainder, and its last token."""
    counts = np.bincount(np.asarray(tokens) % (EMBEDDING_WIDTH - 1), minlength=EMBEDDING_WIDTH).astype(np.float64)
    counts[-1] = tokens[-1]
    vector: npt.NDArray[np.float32] = (counts / np.sqrt(counts @ counts)).astype(np.float32)
    return vector


def expected_score_of(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The score of a query with a document."""
    return np.array([sum(token * (n + 1) for n, token in enumerate(tokens)) % 97 / 8], np.float32)


class FakeEngine:
    """See ``messages.Engine``.

    Args:
        fills_gaps: the plan may make one call of decodes whose sequence ids have gaps.  A fake call takes any ids.
        attention_scan: what the plan counts as context.  A fake call takes no time for it.
        cost_ms: (prompt tokens, rows of decodes) -> simulated milliseconds of a call.
        eog_after: the model ends a sequence that has grown to so many tokens.
        can_truncate: otherwise a sequence can only be removed or copied as a whole, or truncated to a checkpoint.
        repeats: the model mostly says what stood so many tokens before; 0: never.
        adapters: names of LoRA adapters.
        draft_errors: there is a draft model, and one in so many of its tokens is wrong; 0: none is.
        draft_ms: simulated milliseconds of one call of the draft model.
        draft_ctx: tokens that it can know of a sequence.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 4096,
        n_seq_max: int = 8,
        n_batch: int = 512,
        unified: bool = True,
        fills_gaps: bool = False,
        attention_scan: AttentionScan = AttentionScan.SEQUENCE,
        cost_ms: Callable[[int, int], float] = lambda prompt, decodes: 5 + 0.1 * prompt + 0.5 * decodes,
        eog_after: int | None = None,
        repeats: int = 0,
        can_truncate: bool = True,
        exact_rows: int = 0,
        max_rows: int = 0,
        checkpoints: int | None = None,
        can_embed: bool = True,
        purpose: Purpose = "generate",
        adapters: Sequence[str] = (),
        draft_errors: int | None = None,
        draft_ms: float = 0.5,
        draft_ctx: int = 1 << 20,
    ) -> None:
        drafter: dict[str, Any] = {}
        if draft_errors is not None:
            drafter = {"draft_model": "fake draft", "draft_ctx": draft_ctx, "draft_batch": min(128, n_batch)}
            drafter |= {"draft_call_ms": draft_ms, "draft_token_ms": draft_ms / 50}
        self.info = ModelInfo(
            name="fake",
            description="fake",
            n_vocab=N_VOCAB,
            n_ctx=n_ctx,
            n_ctx_seq=n_ctx if unified else n_ctx // n_seq_max,
            n_ctx_train=1 << 20,
            n_batch=n_batch,
            n_seq_max=n_seq_max,
            eog_ids=(EOG,),
            size_bytes=1,
            n_params=1,
            unified=unified,
            fills_gaps=fills_gaps,
            attention_scan=attention_scan,
            n_embd=EMBEDDING_WIDTH,
            n_embd_out=EMBEDDING_WIDTH,
            purpose=purpose,
            can_embed=can_embed and purpose != "rank",
            embedding_ctx=512,
            embedding_batch=min(128, n_batch),
            **drafter,
            exact_rows=exact_rows,
            max_rows=max_rows,
            can_truncate=can_truncate,
            state_can_truncate=can_truncate,
            max_checkpoints=0 if can_truncate else MAX_CHECKPOINTS * n_seq_max if checkpoints is None else checkpoints,
            adapters=tuple(
                AdapterFile(name=name, path=Path(f"{name}.gguf"), fingerprint=f"content of {name}") for name in adapters
            ),
        )
        self.cost_ms = cost_ms
        self.eog_after = eog_after
        self.repeats = repeats
        self.steps: list[Step] = []
        self.cost_of_last_ms = self.cost_of_earlier_ms = 0.0
        """Milliseconds of the last pass, and of the passes before it."""
        self.fail_next: EngineError | EngineDied | None = None
        """Raised by the next step that computes."""
        self.poison: int | None = None
        """A step in which this token is computed kills the engine."""
        self.fail_restarts = 0
        """So many attempts to start the engine again fail."""
        self.resets = 0
        self.late_grammar_masks = 0
        """So many masks of grammars are late."""
        self._matchers = Matchers(fake_vocabulary, N_VOCAB, 1)
        self._aborted = False
        self._masks_ready: MasksReady | None = None
        self._cache: dict[int, SequenceContent] = {}
        self._texts: dict[int, list[int]] = {}
        self._draft_errors, self._draft_call_ms = draft_errors, draft_ms
        self.drafted: dict[int, SequenceContent] = {}
        """What the draft model holds."""
        self.draft_inputs: list[Sequence[DraftInput]] = []
        self._drafting_ms = 0.0
        """Simulated time of the draft model before the next step."""
        self.draft_failure: str | None = None
        """The next drafts fail with this reason."""
        self.embedding_failure: str | None = None
        """The next texts to embed fail with this reason."""
        self.controller_masks: Masks | None = None
        self.interrupts: Interrupts | None = None
        self.is_async = False
        self.checkpoints: dict[int, tuple[int, int]] = {}
        """Length and digest of what was held, by number of the checkpoint."""

    def describe(self) -> Ready:
        devices = Devices(backend="cpu", found=(), memory=(DeviceMemory("CPU", 7000, 2000, 1000, 5000, 16_000),))
        return Ready(self.info, LayoutReport("fake", "only one"), devices, "fake", "fake")

    def step(self, step: Step, callbacks: StepCallbacks | None = None) -> StepOutput:
        # the runner changes the inputs of sequences that go on
        self.steps.append(msgspec.structs.replace(step, calls=[[*map(copy.copy, call)] for call in step.calls]))
        self.cost_of_earlier_ms += self.cost_of_last_ms
        self.cost_of_last_ms, self._drafting_ms = self._drafting_ms, 0.0
        drafting_ms = self.cost_of_last_ms
        refused: list[tuple[int, str]] = []
        sizes: list[tuple[int, list[int]]] = []
        copied_ms = 0.0
        saved_bytes = 0
        for op in step.ops:
            match op:
                case MeasureState():
                    found = [CHECKPOINT_BYTES if number in self.checkpoints else 0 for number in op.checkpoints]
                    length = self.used_cells().get(op.seq_id, 0)
                    sizes.append((op.seq_id, [STATE_BYTES * length, *found]))
                case SaveState() | LoadState():
                    self._check_seq(op.seq_id)
                    try:
                        if isinstance(op, SaveState):
                            saved_bytes += self._save(op)
                            copied_ms += op.n_bytes / STATE_BYTES_PER_MS
                        else:
                            self._load(op)
                            copied_ms += op.n_bytes / STATE_BYTES_PER_MS
                    except ValueError as error:
                        refused.append((op.seq_id, str(error)))
                case DropCheckpoint():
                    self.checkpoints.pop(op.checkpoint, None)
                case _:
                    self._change(op)
        self.cost_of_last_ms += copied_ms
        self._grammar_failures: list[tuple[int, str]] = []
        self._forced: list[tuple[int, Sequence[int]]] = []
        self._mus: list[tuple[int, float]] = []
        inputs = [each for call in step.calls for each in call]
        copied: dict[str, Any] = {
            "copied_ms": copied_ms,
            "saved_bytes": saved_bytes,
            "refused": refused,
            "state_sizes": sizes,
        }
        if not inputs and not step.embeddings:
            return StepOutput(number=step.number, **copied)
        failure, self.fail_next = self.fail_next, None
        if self._aborted:
            failure = EngineError("aborted")
        if self.poison is not None and any(self.poison in each.tokens for each in [*inputs, *step.embeddings]):
            failure = EngineDied("poisoned")
        if failure is not None:
            self.cost_of_last_ms = self.cost_ms(0, len(inputs))
            raise failure
        copied |= self._embed(step.embeddings, adapters_digest(step.embedding_adapters))
        if not inputs:
            return StepOutput(number=step.number, **copied)
        sampled = []
        samples = [sample for each in inputs for sample in each.samples]
        for call in step.calls:
            for each in call:
                if any(not 0 <= number < len(self.info.adapters) for number, _ in each.adapters):
                    raise EngineError(f"an input with the adapters {each.adapters}")
            lengths = [len(each.tokens) for each in call]
            if not lengths or not all(lengths) or sum(lengths) > self.info.n_batch:
                raise EngineError(f"a call of {lengths} tokens")
            if callbacks is not None:
                callbacks.computing(0.0)
            has_masks = any(sample.controller_mask is not None for each in call for sample in each.samples)
            self._masks_ready = (
                callbacks.wait_for_masks(step.number, step.mask_timeout_ms)
                if has_masks and callbacks is not None and self.controller_masks is not None
                else None
            )
            for each in call:
                sampled += self._compute(each, adapters_digest(each.adapters))
            if sum(self.used_cells().values()) > self.info.n_ctx < self.distinct_cells():
                raise EngineError("no room in the KV cache")
            decodes = sum(len(each.samples) for each in call if len(each.samples) == len(each.tokens))
            self.cost_of_last_ms += self.cost_ms(sum(lengths) - decodes, decodes)
        scores = [
            None if sample.logprobs is None else expected_score(token, sample.logprobs)
            for token, sample in zip(sampled, samples, strict=True)
        ]
        return StepOutput(
            tuple(sampled),
            step.number,
            decode_ms=self.cost_of_last_ms - drafting_ms - copied_ms - copied.get("embedding_ms", 0.0),
            scores=scores if any(scores) else (),
            forced=self._forced,
            mus=self._mus,
            grammar_failures=self._grammar_failures,
            **copied,
        )

    def _embed(self, inputs: Sequence[EmbeddingInput], adapters: int) -> dict[str, Any]:
        """What a step reports of the texts in it."""
        if not inputs:
            return {}
        n_tokens = sum(len(each.tokens) for each in inputs)
        going_on = {each.seq_id for each in inputs if each.position}
        is_whole = self.info.purpose != "generate"
        is_long = n_tokens > self.info.embedding_batch and not (is_whole and len(inputs) == 1)
        in_parts = is_whole and any(each.position or not each.is_last for each in inputs)
        if len(going_on) > 1 or is_long or in_parts or len(inputs) > MAX_EMBEDDING_SEQUENCES:
            raise EngineError(f"{len(inputs)} texts to embed of {n_tokens} tokens, and {len(going_on)} go on")
        ms = self.cost_ms(n_tokens, 0)
        self.cost_of_last_ms += ms
        self._texts = {seq_id: text for seq_id, text in self._texts.items() if seq_id in going_on}
        vectors = []
        failure, self.embedding_failure = self.embedding_failure, None
        for each in inputs:
            text = self._texts.setdefault(each.seq_id, [])
            if each.position != len(text):
                failure = "the beginning of a text is lost"
            text += each.tokens
            if each.is_last:
                of_text = expected_score_of if self.info.purpose == "rank" else expected_embedding
                vectors.append(of_text([*self._texts.pop(each.seq_id), *([adapters] if adapters else [])]))
        if failure is not None:
            self._texts.clear()
            vectors = []
        return {"embeddings": vectors, "embedding_ms": ms, "embedding_bytes": 1000, "embedding_failure": failure}

    def _state(self, seq_id: int) -> bytes:
        """The tokens of a sequence as text, with what they were computed with, padded."""
        held = self._cache.get(seq_id, SequenceContent())
        words = [b"%d@%d" % each for each in zip(held.tokens, held.adapters, strict=True)]
        return b" ".join(words).ljust(STATE_BYTES * len(words), b"\0")

    def _save(self, op: SaveState) -> int:
        state = self._state(op.seq_id)
        total = op.n_bytes + sum(size for _, size in op.checkpoints)
        if len(state) > op.n_bytes or os.fstat(op.fd).st_size < op.offset + total:
            raise ValueError("the file is too small")
        kept = b""
        for number, size in op.checkpoints:
            if number not in self.checkpoints or size != CHECKPOINT_BYTES:
                raise ValueError(f"no checkpoint {number}, or one of another size")
            kept += (b"%d %d" % self.checkpoints[number]).ljust(CHECKPOINT_BYTES)
        os.pwrite(op.fd, state, op.offset)
        os.pwrite(op.fd, kept, op.offset + op.n_bytes)
        return total if op.checkpoints else len(state)

    def _load(self, op: LoadState) -> None:
        self._cache.pop(op.seq_id, None)
        state = os.pread(op.fd, op.n_bytes, op.offset)
        self._verify(op)
        try:
            tokens = [tuple(map(int, word.split(b"@", 1))) for word in state.partition(b"\0")[0].split()]
            content = SequenceContent()
            for token, adapters in tokens:
                content.read([token], adapters)
        except ValueError:
            tokens = []
        if len(state) != STATE_BYTES * len(tokens):
            tokens = []
        room = self.info.n_ctx - sum(held.length for held in self._cache.values())
        if not tokens or len(tokens) != op.length or len(tokens) > min(room, self.info.n_ctx_seq):
            raise ValueError("not a state, or no room for it")
        self._cache[op.seq_id] = content
        at = op.offset + op.n_bytes
        for number, size in op.checkpoints:
            if number is not None:
                length, digest = map(int, os.pread(op.fd, size, at).split())
                self.checkpoints[number] = (length, digest)
            at += size

    @staticmethod
    def _verify(op: LoadState) -> None:
        """Fails like llama.cpp's engine, where what describes the cells ends with the first pages."""
        data = os.pread(op.fd, op.n_bytes + sum(size for _, size in op.checkpoints), op.offset)
        front = FRONT_PAGES * PAGE_BYTES
        found, front_hashes = hashes_of(data), hashes_of(data[:front])
        if op.hashes and found != op.hashes:
            if len(found) != len(op.hashes) or not op.hashes.startswith(front_hashes):
                raise ValueError("the state was altered")
            raise EngineError("the state was altered")

    def _change(self, op: KvOp) -> None:
        match op:
            case SaveCheckpoint():
                held = self._cache.get(op.seq_id, SequenceContent())
                full = len(self.checkpoints) >= self.info.max_checkpoints
                if op.checkpoint in self.checkpoints or not held.length or full:
                    raise EngineError(f"{op} of {held.length} tokens with {len(self.checkpoints)} others")
                self.checkpoints[op.checkpoint] = (held.length, held.digest(held.length))
            case CopyPrefix():
                self._check_seq(op.source)
                self._check_seq(op.target)
                source = self._cache.get(op.source, SequenceContent())
                if self._cache.get(op.target, SequenceContent()).length or op.length > source.length:
                    raise EngineError(f"{op} of {source.length} tokens")
                self._check_truncation(source, op.length, op.checkpoint)
                self._cache[op.target] = source.beginning(op.length)
            case Truncate():
                self._check_seq(op.seq_id)
                held = self._cache.get(op.seq_id, SequenceContent())
                self._check_truncation(held, op.length, op.checkpoint)
                self._cache[op.seq_id] = held.beginning(op.length)

    def _check_truncation(self, held: SequenceContent, length: int, checkpoint: int | None) -> None:
        """A memory that cannot be truncated goes back to a state that it had, and to no other."""
        if self.info.can_truncate or not 0 < length < held.length:
            return
        if checkpoint is None or self.checkpoints.get(checkpoint) != (length, held.digest(length)):
            raise EngineError(f"{held.length} tokens cannot be cut to {length} by {checkpoint} of {self.checkpoints}")

    def _compute(self, each: StepInput, adapters: int) -> list[int]:
        self._check_seq(each.seq_id)
        if len(each.samples) not in (0, 1, len(each.tokens)):
            raise EngineError(f"{len(each.samples)} samples for {len(each.tokens)} tokens")
        held = self._cache.setdefault(each.seq_id, SequenceContent())
        if each.position != held.length:
            raise EngineError(f"sequence {each.seq_id} holds {held.length} tokens, continued at {each.position}")
        held.read(np.asarray(each.tokens).tolist(), adapters)
        if held.length > self.info.n_ctx_seq:
            raise EngineError("no room in the KV cache")
        sampled = []
        allowed = self._allowed(each)
        if allowed is None:
            return [MASK_LATE] * len(each.samples)
        for n, (length, sample) in enumerate(enumerate(each.samples, held.length - len(each.samples) + 1)):
            ended = self.eog_after is not None and length >= self.eog_after
            banned = set() if sample.banned is None else set(np.asarray(sample.banned).tolist())
            token = held.next_token(length, sample, self.repeats)
            preferred = [EOG, token] if ended else [token]
            if sample.bias is not None and sample.bias.values.max() >= 50:
                preferred.insert(0, int(sample.bias.ids[sample.bias.values.argmax()]))
            if each.grammar is not None:
                banned |= {*np.flatnonzero(allowed[n] == -np.inf).tolist(), *range(FIRST_BYTE, N_VOCAB)}
                if len(banned) == N_VOCAB:
                    sampled.append(NO_TOKEN)
                    continue
                if EOG not in banned:  # an answer may end here, and so it does
                    preferred.insert(0, EOG)
                free = sorted({*range(N_VOCAB)} - banned - self._penalised(held, length, sample))
                preferred += free[token % len(free) :][:1] if free else []
            if sample.controller_mask is not None:
                row = None if self._masks_ready is None else self._masks_ready.rows.get(sample.controller_mask)
                if row is None or self.controller_masks is None:
                    sampled.append(MASK_LATE)
                    continue
                logits = np.zeros(N_VOCAB, np.float32)
                self.controller_masks.add_to(logits, row)
                if not np.isfinite(logits.max()):
                    sampled.append(NO_TOKEN)
                    continue
                banned |= set(np.flatnonzero(logits < logits.max() - 50).tolist())
                free = sorted({*range(N_VOCAB)} - banned)
                preferred += free[token % len(free) :][:1] if free else []
            sampled.append(chosen(preferred, banned | self._penalised(held, length, sample)))
            if sample.params.is_adaptive:
                if len(each.samples) > 1:
                    raise EngineError("mirostat samples one token a step")
                self._mus.append((each.seq_id, next_mu(sample.params, sampled[-1])))
        return sampled

    def _allowed(self, each: StepInput) -> np.ndarray | None:
        """Logits of 0 or -inf for each sample, by the grammar; ``None`` if the masks are late."""
        logits = np.zeros((len(each.samples), N_VOCAB), np.float32)
        if each.grammar is not None and each.samples:
            pending = self._matchers.begin([(each.seq_id, 0, each.grammar, each.tokens[-len(each.samples) :][1:])])
            filled = pending.wait(60_000)
            assert not filled.late
            for row, mask in filled.masks.items():
                mask.apply(logits[row])
            if self.late_grammar_masks:
                self.late_grammar_masks -= 1
                return None
            self._grammar_failures += filled.failures.items()
            self._forced += filled.forced.items()
        return logits

    def draft(self, inputs: Sequence[DraftInput], min_probability: float) -> Drafted:
        """Each draft is what the model would say greedily, but for errors.  Their probability is 1."""
        self.draft_inputs.append(inputs)
        if self._draft_errors is None:
            raise AssertionError("there is no draft model")
        failure, self.draft_failure = self.draft_failure, None
        if failure is not None:
            self.drafted.clear()
            return Drafted([Draft(each.seq_id, 0, ()) for each in inputs], failure=failure)
        drafts, n_tokens, calls = [], 0, 1
        for each in inputs:
            held = self.drafted.get(each.seq_id, SequenceContent())
            if held.length < each.position:
                self.drafted.pop(each.seq_id, None)
                drafts.append(Draft(each.seq_id, 0, ()))
                continue
            known = [*held.tokens[: each.position], *each.tokens]
            most = len(known) - bool(each.n_drafts)
            n = next((n for n in range(min(held.length, most)) if held.tokens[n] != known[n]), min(held.length, most))
            held = self.drafted[each.seq_id] = held.beginning(n)
            if n_tokens + len(known) - n > self.info.draft_batch:
                drafts.append(Draft(each.seq_id, n, ()))
                continue
            held.read(known[n:])
            n_tokens += len(known) - n
            if held.length + each.n_drafts > self.info.draft_ctx:
                raise AssertionError(f"{held.length} tokens and {each.n_drafts} drafts")
            tokens: list[int] = []
            while len(tokens) < each.n_drafts:
                if tokens:
                    held.read(tokens[-1:])
                token = held.next_token(held.length, SampleRequest(SamplingParams()), self.repeats)
                if self.eog_after is not None and held.length >= self.eog_after:
                    tokens.append(EOG)
                    break
                if self._draft_errors and held.digest(held.length) % self._draft_errors == 0:
                    token = 1 + token % (FIRST_BYTE - 1)
                tokens.append(token)
            calls = max(calls, len(tokens))
            drafts.append(Draft(each.seq_id, held.length, tokens))
        ms = self._draft_call_ms * (calls + n_tokens / 50)
        self._drafting_ms += ms
        return Drafted(drafts, ms, calls, n_tokens)

    def define_grammar(self, grammar: DefineGrammar) -> None:
        self._matchers.define(grammar.key, grammar.source, replaces=grammar.replaces)

    def _penalised(self, held: SequenceContent, length: int, sample: SampleRequest) -> set[int]:
        if sample.past is None:
            return set()
        past = sample.past.tokens.tolist()
        if past != held.before(length, len(past)):
            raise EngineError(f"a past of {past} where {held.before(length, len(past))} is held")
        return penalised_tokens(sample.params, past, sample.past.n_prompt)

    def _check_seq(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.info.n_seq_max:
            raise EngineError(f"sequence {seq_id}")

    def set_threads(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def used_cells(self) -> dict[int, int]:
        return {seq_id: held.length for seq_id, held in self._cache.items() if held.length}

    def distinct_cells(self) -> int:
        """Cells that hold a token; in a unified cache, copies share them."""
        cells = list(chain.from_iterable(held.cells for held in self._cache.values()))
        return len(set(cells)) if self.info.unified else len(cells)

    def reset(self) -> None:
        self._cache.clear()
        self.drafted.clear()
        self._texts.clear()
        self.checkpoints.clear()
        self.resets += 1

    def cut(self, seq_id: int, length: int) -> None:
        """Let a sequence hold its first ``length`` tokens only."""
        if seq_id in self._cache:
            self._cache[seq_id] = self._cache[seq_id].beginning(length)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._cache.clear()


class VirtualFlags(Interrupts):
    """Flags that are in no file."""

    def __init__(self) -> None:
        self.memory = bytearray(N_STEPS * FLAG_BYTES)


class VirtualLink:
    """Stands for ``EngineLink``: a step takes its simulated time on trio's clock.  It has no thread and no process."""

    pid = None

    def __init__(self, engine: FakeEngine, start_s: float = 0.0) -> None:
        self.engine = engine
        self._start_s = start_s
        self.ready = engine.describe()
        self.info = engine.info
        self.ended = trio.Event()
        self.reason = ""
        self._runner = StepRunner(engine)
        self._waiting: deque[tuple[Step, float]] = deque()
        self._answers: deque[tuple[float, Any]] = deque()
        self._free_at = -math.inf
        self._grammars = KnownGrammars()
        self._masks: MaskFile | None = None
        engine.controller_masks = None
        engine.interrupts = self._flags = VirtualFlags()
        self._begun: tuple[Step, float] | None = None
        """A step that waits for masks of controllers, and when it began."""
        self._gives_way: dict[int, int] = {}
        """What the sequences of the last step that began held before it, if it gives way."""
        self._revoked: list[int] = []
        """Steps behind it that were revoked; answered after it."""
        self._masks_ready: tuple[MasksReady, float] | None = None
        """The latest, and when it came."""
        self._wake = trio.Event()
        """Set when an answer may come earlier."""

    @property
    def is_usable(self) -> bool:
        return not self.reason

    def attach_masks(self, file: MaskFile) -> None:
        if file is not self._masks:
            self._masks = file
            self.engine.controller_masks = Masks(file)

    def masks_ready(self, number: int, rows: Mapping[int, int]) -> None:
        self._masks_ready = MasksReady(number, rows), trio.current_time()
        self._catch_up()
        self._wake.set()
        self._wake = trio.Event()

    def computing(self, wait_s: float) -> None:
        """See ``messages.StepCallbacks``."""

    def wait_for_masks(self, number: int, timeout_ms: float) -> MasksReady | None:
        """See ``messages.StepCallbacks``.  ``_catch_up`` has waited already."""
        return self._masks_ready[0] if self._masks_ready is not None and self._masks_ready[0].number == number else None

    def submit(self, step: Step) -> None:
        self._flags.clear(step.number)
        self._waiting.append((step, trio.current_time()))
        self._catch_up()

    def define_grammar(self, key: str, source: str) -> None:
        message = self._grammars.use(key, source, self.info.n_seq_max)
        if message is not None:
            self.engine.define_grammar(message)

    def set_threads(self, n_threads: int) -> None:
        self.engine.set_threads(n_threads)

    def end_passes(self, number: int) -> None:
        """See ``EngineLink``.  All passes of a step that has begun are computed already."""
        self._catch_up()
        self._flags.set(number)

    def revoke(self, number: int) -> None:
        self._catch_up()
        self._interrupt(number)
        for item in [item for item in self._waiting if item[0].number == number]:
            self._waiting.remove(item)
            self._revoked.append(number)
        if self._begun is None:
            self._report_revoked()

    def _interrupt(self, number: int) -> None:
        """End step ``number`` if it gives way and computes: what it has changed already did not happen."""
        now = trio.current_time()
        computing = [answer for at, answer in self._answers if at > now and isinstance(answer, StepOutput)]
        if not self._gives_way or not computing or computing[0].number != number:
            return
        for seq_id, position in self._gives_way.items():
            self.engine.cut(seq_id, position)
        self._runner = StepRunner(self.engine)  # what runs ahead of it is stale
        self._free_at = now
        self._answers = deque(
            (min(at, now), Revoked(number, began=True) if answer is computing[0] else answer)
            for at, answer in self._answers
        )
        self._wake.set()
        self._wake = trio.Event()

    def _report_revoked(self) -> None:
        at = max(self._free_at, trio.current_time())
        self._answers.extend((at, Revoked(number)) for number in self._revoked)
        self._revoked.clear()

    async def receive(self) -> list[Any]:
        self._catch_up()
        while not self._answers or self._answers[0][0] > trio.current_time():
            until = min([self._answers[0][0] if self._answers else math.inf, self._waits_until()])
            with trio.move_on_at(until):
                await self._wake.wait()
            self._catch_up()
        await trio.lowlevel.checkpoint()
        found = []
        while self._answers and self._answers[0][0] <= trio.current_time():
            answer = self._answers.popleft()[1]
            if isinstance(answer, EngineDied):
                self.die(str(answer))
                raise answer
            found.append(answer)
        return found

    async def compute(self, step: Step) -> StepOutput:
        self.submit(step)
        [answer] = await self.receive()
        if isinstance(answer, StepFailed):
            raise EngineError(answer.reason)
        assert isinstance(answer, StepOutput)
        return answer

    def die(self, reason: str) -> None:
        """The engine ends, with its KV cache."""
        self.reason = reason
        self._begun = None
        self._revoked.clear()
        self._waiting.clear()
        self._answers.clear()
        self.engine.reset()
        self.ended.set()

    def kill(self) -> None:
        if not self.reason:
            self.die("killed")
            self._answers.append((trio.current_time(), EngineDied("killed")))
            self._wake.set()
            self._wake = trio.Event()

    async def load(self, start: Start, on_progress: Any, should_continue: Any, hang_timeout_s: float) -> bool:
        await trio.sleep(self._start_s)
        if self.engine.fail_restarts:
            self.engine.fail_restarts -= 1
            raise LoadError("no memory for it")
        return True

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    def usage(self) -> dict[str, float]:
        return {}

    def _catch_up(self) -> None:
        """Begin all steps that should have begun by now."""
        while not self.reason:
            if self._begun is None:
                if not self._waiting or self._free_at > trio.current_time():
                    return
                step, submitted_at = self._waiting.popleft()
                began = max(self._free_at, submitted_at)
                if self._runner.is_stale(step):
                    self._answers.append((began, Revoked(step.number)))
                    continue
                self._begun = step, began
            step, began = self._begun
            waits_until = self._waits_until()
            ready, ready_at = self._masks_ready or (None, 0.0)
            if ready is not None and (ready.number != step.number or ready_at > waits_until):
                self._masks_ready = ready = None
            if ready is None and waits_until > trio.current_time():
                return
            self._begun = None
            inputs = chain.from_iterable(self._runner.inputs(step)) if step.gives_way else ()
            self._gives_way = {each.seq_id: each.position for each in inputs}
            answer: Any
            self.engine.cost_of_earlier_ms = self.engine.cost_of_last_ms = 0.0
            try:
                answer = self._runner.run(step, callbacks=self)
            except EngineError as error:
                answer = StepFailed(step.number, str(error))
                self.engine.reset()
            except EngineDied as death:
                answer = death
            self._free_at = began + (self.engine.cost_of_earlier_ms + self.engine.cost_of_last_ms) / 1e3
            if waits_until > -math.inf:
                self._free_at = max(self._free_at, waits_until if ready is None else ready_at)
            if isinstance(answer, StepOutput):
                answer.started_s, answer.ended_s = began, self._free_at
            self._answers.append((self._free_at, answer))
            self._report_revoked()
            if not isinstance(answer, StepOutput):
                self._answers.extend((self._free_at, Revoked(behind.number)) for behind, _ in self._waiting)
                self._waiting.clear()

    def _waits_until(self) -> float:
        """When the step that has begun gives up masks of controllers; -inf if it waits for none, or none has begun."""
        if self._begun is None:
            return math.inf
        step, began = self._begun
        inputs = [each for call in self._runner.inputs(step) for each in call]
        if not any(sample.controller_mask is not None for each in inputs for sample in each.samples):
            return -math.inf
        n_tokens, n_samples = (
            sum(map(len, each)) for each in zip(*[(x.tokens, x.samples) for x in inputs], strict=True)
        )
        return began + (self.engine.cost_ms(n_tokens - n_samples, n_samples) + step.mask_timeout_ms) / 1e3


class VirtualLauncher:
    """Stands for ``ProcessLauncher``.

    Args:
        start_s: simulated time of a start.
    """

    def __init__(self, engine: FakeEngine, start_s: float) -> None:
        self._engine = engine
        self._start_s = start_s

    def launch(self, model: str) -> VirtualLink:
        return VirtualLink(self._engine, self._start_s)


class VirtualEngine(SupervisedEngine):
    """The real supervisor over virtual links.

    Args:
        start_s: simulated time of a restart.
        settings: of the configuration's section ``engine``.
    """

    def __init__(self, engine: FakeEngine, *, start_s: float = 0.5, settings: config.Engine | None = None) -> None:
        self.engine = engine
        launcher, start = VirtualLauncher(engine, start_s), Start(Path("fake"), config.Model())
        super().__init__(launcher, start, VirtualLink(engine), settings or config.Engine())
