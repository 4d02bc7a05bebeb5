"""The engine over llama.cpp: one model, one context, all sequences in one batch."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import attrs

import llama_abi
from uma_trio import config, sampling
from uma_trio.engine.bandwidth import memory_bytes_per_s
from uma_trio.engine.cores import default_threads, spare_cores
from uma_trio.engine.kv_size import kv_bytes_per_token
from uma_trio.engine.layout import (
    CELLS_AT_A_TIME,
    Choice,
    Choices,
    Layout,
    NoRoom,
    Shape,
    candidates,
    checkpoints,
    machine_memory_bytes,
)
from uma_trio.engine.layout_trial import try_layouts
from uma_trio.engine.records import (
    Copy,
    Draw,
    EngineError,
    Feed,
    Forget,
    Load,
    Mark,
    ModelFacts,
    Remove,
    Save,
    Score,
    Step,
    StepResult,
)
from uma_trio.engine.tokenizer import Tokenizer

LOAD_ERRORS = (llama_abi.LlamaError, llama_abi.LibraryError, NoRoom)
"""What opening an engine raises: about the model, or about the library."""

SHARE_OF_LOADING = 0.1
"""Of the time that loading the weights took: what measuring layouts may always take."""

PROBE_TOKENS = 32
"""In one batch of the context that measures how large a token's keys and values are; as few as may be configured."""


class LlamaEngine:
    """A loaded model with its context.  See ``records.Engine`` for the contract.

    Args:
        path: a GGUF file.
        settings: memory and compute.
        on_progress: called with the loaded share in [0, 1]; answering False gives loading up.
        choices: remembers how the memory was laid out; without it that is never measured, and decided by rule.

    Raises:
        llama_abi.LlamaError: the file cannot be loaded, or there is not the memory for it.
        llama_abi.LibraryError: no libllama to load it with.
    """

    def __init__(
        self,
        path: Path,
        settings: config.Model,
        on_progress: Callable[[float], bool] | None = None,
        choices: Choices | None = None,
    ) -> None:
        library = llama_abi.load(settings.llama_dir)
        began = time.perf_counter()
        self._model = llama_abi.Model(
            library, path, n_gpu_layers=settings.gpu_layers, use_mmap=settings.mmap, on_progress=on_progress
        )
        self._settings = settings
        try:
            loaded_s = time.perf_counter() - began
            self._shape = _shape(self._model, settings)
            self._choice = _choice(self._model, self._shape, settings, choices, loaded_s=loaded_s)
            self._context = self._open()
        except BaseException:
            self._model.close()
            raise
        self._abort = llama_abi.AbortFlag()
        self._context.set_abort_flag(self._abort)
        self._batch = llama_abi.Batch(self._context.n_batch)
        self._marks: dict[int, bytearray] = {}
        self.tokenizer = Tokenizer(self._model.vocab)
        self.chat_template = self._model.chat_template
        recurrent, windowed = self._model.is_recurrent or self._model.is_hybrid, self._model.n_swa > 0
        self._facts = ModelFacts(
            name=path.name,
            description=self._model.description,
            n_vocab=self._model.vocab.n_tokens,
            n_ctx=self._context.n_ctx,
            n_ctx_seq=self._context.n_ctx_seq,
            n_ctx_train=self._model.n_ctx_train,
            n_batch=self._context.n_batch,
            n_seq_max=self._context.n_seq_max,
            eog_ids=tuple(self._model.vocab.eog_ids),
            size_bytes=self._model.size_bytes,
            n_params=self._model.n_params,
            unified=self._options.kv_unified,
            pads=not self._options.kv_unified and self._options.flash_attn == "off",  # that skips what is masked
            rewinds=not recurrent and not (windowed and self._options.kv_unified),
            states_rewind=not recurrent and not windowed,
            checkpoints=self._most_checkpoints() if recurrent and not windowed else 0,
            kv_bytes_per_token=self._shape.kv_bytes_per_token,
            n_layer=self._model.n_layer,
            n_embd=self._model.n_embd,
            spare_cores=spare_cores(self._options.n_threads, on_gpu=_has_gpu(library, settings)),
        )

    def _most_checkpoints(self) -> int:
        """By the size of one, which every sequence that holds something has."""
        self._batch.clear()
        self._batch.add([0], pos=0, seq=0)
        self._context.decode(self._batch)
        n_bytes = self._context.state_size(0, flags=llama_abi.PARTIAL_ONLY)
        self._context.clear()
        return checkpoints(n_bytes, n_sequences=self._context.n_seq_max, memory_bytes=machine_memory_bytes())

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def layout_choice(self) -> Choice:
        """How the memory is laid out, and why."""
        return self._choice

    def _open(self) -> llama_abi.Context:
        """A context in the layout that was chosen, or in the rule's, if there is no room for that."""
        self._options = _context_options(self._settings, self._choice.layout)
        try:
            return llama_abi.Context(self._model, self._options)
        except llama_abi.LlamaError:
            rule = _candidates(self._model, self._shape, self._settings)[0]
            if rule == self._choice.layout:
                raise
            self._choice = attrs.evolve(self._choice, layout=rule, why="no room")
            self._options = _context_options(self._settings, rule)
            return llama_abi.Context(self._model, self._options)

    def measure_memory(self) -> None:
        """Find out what the memory can move, where the weights are in the machine's own; some 50 ms."""
        if not _has_gpu(self._model.library, self._settings):
            bandwidth = memory_bytes_per_s(self._options.n_threads)
            self._facts = attrs.evolve(self._facts, memory_bytes_per_s=bandwidth)

    @property
    def circumstances(self) -> tuple[object, ...]:
        """All but the model that decides what a step costs."""
        return (*_surroundings(self._model.library, self._settings), self._options)

    @property
    def state_layout(self) -> tuple[object, ...]:
        """All but the model that decides what the bytes of a sequence's state mean."""
        stamp, options = self._model.library.stamp, self._options
        return stamp.pin, stamp.backend, options.type_k, options.type_v, options.kv_unified, options.flash_attn

    def step(self, step: Step) -> StepResult:
        try:
            return self._step(step)
        except EngineError:
            raise
        except Exception as error:  # refused by the ABI layer, or a defect: the context is not to be trusted
            raise EngineError(f"{type(error).__name__}: {error}", fatal=True) from error

    def _step(self, step: Step) -> StepResult:
        started = began = time.perf_counter()
        copied_ms, marked_ms, saved_bytes = 0.0, 0.0, 0
        refused: list[tuple[int, str]] = []
        for edit in step.edits:
            if isinstance(edit, Save | Load):
                at = time.perf_counter()
                saved_bytes += self._copy_state(edit, refused)
                copied_ms += 1e3 * (time.perf_counter() - at)
            elif isinstance(edit, Mark):
                at = time.perf_counter()
                self._mark(edit)
                marked_ms += 1e3 * (time.perf_counter() - at)
            elif isinstance(edit, Forget):
                self._marks.pop(edit.mark, None)
            else:
                self._edit(edit)
        tokens: list[int] = []
        scores: list[Score | None] = []
        copied = 0
        decode_ms = -copied_ms - marked_ms
        sample_ms = 0.0
        for feeds in step.batches:
            self._decode(feeds)
            decoded = time.perf_counter()
            draws = [draw for feed in feeds for draw in feed.draws]
            drawn, scored = self._draw(draws)
            tokens += drawn
            scores += scored or [None] * len(drawn)
            ended = time.perf_counter()
            copied += sampling.copied_rows([draw.params for draw in draws], self._facts.n_vocab)
            copied += sum([draw.logprobs is not None for draw in draws])
            decode_ms += 1e3 * (decoded - began)
            sample_ms += 1e3 * (ended - decoded)
            began = ended
        told = scores if any(score is not None for score in scores) else ()
        ended = time.perf_counter()
        return StepResult(
            tuple(tokens), decode_ms, sample_ms, started, ended, copied, told, copied_ms, saved_bytes, refused
        )

    def _copy_state(self, edit: Save | Load, refused: list[tuple[int, str]]) -> int:
        """Bytes that were saved."""
        try:
            if isinstance(edit, Save):
                n_bytes = self._context.save_state_into(edit.seq_id, edit.into)
                return n_bytes + self._write_marks(edit, n_bytes, refused)
            self._context.load_state_from(edit.seq_id, edit.state)
            held = self._context.seq_pos_max(edit.seq_id) + 1
            if held != edit.length:
                self._context.seq_remove(edit.seq_id)
                refused.append((edit.seq_id, f"the state has {held} tokens instead of {edit.length}"))
                return 0
            self._marks.update({mark: bytearray(state) for mark, state in edit.marks})
        except llama_abi.LlamaError as error:
            refused.append((edit.seq_id, str(error)))
        return 0

    def _write_marks(self, edit: Save, n_bytes: int, refused: list[tuple[int, str]]) -> int:
        """Checkpoints behind a state of ``n_bytes``; what they have."""
        if edit.marks and n_bytes != memoryview(edit.into).nbytes:
            refused.append((edit.seq_id, f"the state has {n_bytes} bytes, and its checkpoints would not follow it"))
            return 0
        for mark, into in edit.marks:
            view, state = memoryview(into).cast("B"), self._marks.get(mark, b"")
            if not state or len(view) != len(state):
                refused.append((edit.seq_id, f"checkpoint {mark} has {len(state)} bytes, the buffer {len(view)}"))
                return 0
            view[:] = state
        return sum([memoryview(into).nbytes for _, into in edit.marks])

    def state_bytes(self, seq_id: int) -> int:
        return self._context.state_size(seq_id)

    def mark_bytes(self, mark: int) -> int:
        return len(self._marks.get(mark, b""))

    def _mark(self, edit: Mark) -> None:
        state = bytearray(self._context.state_size(edit.seq_id, flags=llama_abi.PARTIAL_ONLY))
        self._context.save_state_into(edit.seq_id, state, flags=llama_abi.PARTIAL_ONLY)
        self._marks[edit.mark] = state

    def _edit(self, edit: Remove | Copy) -> None:
        context = self._context
        if isinstance(edit, Remove):
            self._cut(edit.seq_id, edit.start, edit.mark)
        elif self._facts.unified and edit.mark is None:
            context.seq_copy(edit.source, edit.target, 0, edit.length)
        else:  # between streams llama.cpp copies as a whole, and a recurrent state is that of the whole
            context.seq_copy(edit.source, edit.target)
            self._cut(edit.target, edit.length, edit.mark)

    def _cut(self, seq_id: int, start: int, mark: int | None) -> None:
        """First the state and then the tail: before that a recurrent memory refuses."""
        if mark is not None:
            self._context.load_state_from(seq_id, self._marks[mark], flags=llama_abi.PARTIAL_ONLY)
        if not self._context.seq_remove(seq_id, start or -1):
            raise EngineError(f"the model's memory cannot forget the end of sequence {seq_id}", fatal=True)

    def _decode(self, feeds: Sequence[Feed]) -> None:
        batch = self._batch
        batch.clear()
        at = 0
        while at < len(feeds):
            if single := list(itertools.takewhile(_is_single, feeds[at:] if at else feeds)):
                batch.add_decodes(
                    [feed.tokens[0] for feed in single],
                    positions=[feed.pos for feed in single],
                    seqs=[feed.seq_id for feed in single],
                )
                at += len(single)
            else:
                _add(batch, feeds[at])
                at += 1
        code = self._context.decode(batch)
        self._context.synchronize()
        if code:
            raise EngineError({1: "no room in the KV cache", 2: "aborted"}.get(code, f"code {code}"), fatal=False)

    def _draw(self, draws: Sequence[Draw]) -> tuple[list[int], list[Score | None]]:
        """A token for each of ``draws``, and its score where one is wanted; no scores where none is."""
        if not draws:
            return [], []
        logits = self._context.logits(len(draws)).array
        told = [row for row, draw in enumerate(draws) if draw.logprobs is not None]
        raw = logits[told] if told else None  # sampling writes to them
        drawn = sampling.sample(
            logits,
            [draw.params for draw in draws],
            [draw.step for draw in draws],
            [draw.mask for draw in draws],
            [draw.bias for draw in draws],
            [draw.past for draw in draws],
        )
        scores: list[Score | None] = []
        if raw is not None:
            scores = [None] * len(draws)
            found = sampling.logprobs(raw, drawn[told], [draws[row].logprobs or 0 for row in told])
            for row, score in zip(told, found, strict=True):
                scores[row] = score
        tokens: list[int] = drawn.tolist()
        return tokens, scores

    def used_cells(self) -> dict[int, int]:
        ends = {seq_id: self._context.seq_pos_max(seq_id) for seq_id in range(self._facts.n_seq_max)}
        return {seq_id: end + 1 for seq_id, end in ends.items() if end >= 0}

    def reset(self) -> None:
        self._context.close()
        self._marks.clear()
        try:
            self._context = llama_abi.Context(self._model, self._options)
        except llama_abi.LlamaError as error:
            raise EngineError(str(error), fatal=True) from error
        self._context.set_abort_flag(self._abort)

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        self._context.close()
        self._model.close()


def _is_single(feed: Feed) -> bool:
    """One token whose logits are wanted, as of a stream."""
    return len(feed.tokens) == 1 == len(feed.draws)


def _add(batch: llama_abi.Batch, feed: Feed) -> None:
    n, wanted = len(feed.tokens), len(feed.draws)
    if 1 < wanted < n:
        raise EngineError(f"{wanted} draws for {n} tokens: one, or one each", fatal=True)
    logits: Literal["none", "last", "all"] = "none" if not wanted else "last" if wanted == 1 else "all"
    batch.add(feed.tokens, pos=feed.pos, seq=feed.seq_id, logits=logits)


@contextlib.contextmanager
def open_tokenizer(path: Path, llama_dir: Path | None = None) -> Iterator[Tokenizer]:
    """The tokenizer of a GGUF alone, without its weights.

    Raises:
        llama_abi.LlamaError, llama_abi.LibraryError: see ``LlamaEngine``.
    """
    with llama_abi.Model(llama_abi.load(llama_dir), path, vocab_only=True) as model:
        yield Tokenizer(model.vocab)


def _shape(model: llama_abi.Model, settings: config.Model) -> Shape:
    alone = attrs.evolve(settings, parallel=1, batch_tokens=PROBE_TOKENS)
    layout = Layout(n_ctx=CELLS_AT_A_TIME, unified=True, flash_attn=settings.flash_attn, n_ubatch=PROBE_TOKENS)
    n_bytes = kv_bytes_per_token(model, settings, _context_options(alone, layout))
    return Shape(n_ctx_train=model.n_ctx_train, kv_bytes_per_token=n_bytes)


def _has_gpu(library: llama_abi.Library, settings: config.Model) -> bool:
    """Layers of the model are on one."""
    gpus = (llama_abi.DeviceType.GPU, llama_abi.DeviceType.IGPU)
    return settings.gpu_layers != 0 and any(device.type in gpus for device in library.devices())


def _surroundings(library: llama_abi.Library, settings: config.Model) -> tuple[object, ...]:
    """What computes, and with what."""
    devices = tuple((device.name, device.description) for device in library.devices())
    return library.stamp.pin, library.stamp.backend, devices, os.cpu_count(), settings.gpu_layers


def _candidates(model: llama_abi.Model, shape: Shape, settings: config.Model) -> tuple[Layout, ...]:
    return candidates(
        shape,
        settings,
        on_gpu=_has_gpu(model.library, settings),
        memory_bytes=machine_memory_bytes(),
        windowed=model.n_swa > 0,
    )


def _choice(
    model: llama_abi.Model, shape: Shape, settings: config.Model, choices: Choices | None, *, loaded_s: float
) -> Choice:
    """How to lay the memory out: as before under these circumstances, else as is measured now.

    Args:
        loaded_s: what loading the weights took; a tenth of it may always go to measuring.
    """
    layouts = _candidates(model, shape, settings)
    if len(layouts) == 1:
        return Choice(layout=layouts[0], why="only one")
    if choices is None or settings.layout_trial_s == 0:
        return Choice(layout=layouts[0], why="by rule")
    facts = (*_surroundings(model.library, settings), *(_context_options(settings, each) for each in layouts))
    known = choices.recall(facts)
    for each in layouts:
        if each.name == known:
            return Choice(layout=each, why="measured before")
    budget_s = max(settings.layout_trial_s, SHARE_OF_LOADING * loaded_s)
    found = try_layouts(model, layouts, lambda each: _context_options(settings, each), budget_s=budget_s)
    if found.why == "measured":
        choices.keep(facts, found)
    return found


def _context_options(settings: config.Model, layout: Layout) -> llama_abi.ContextOptions:
    threads = settings.threads or default_threads()
    return llama_abi.ContextOptions(
        n_ctx=layout.n_ctx,
        n_batch=settings.batch_tokens,
        n_ubatch=layout.n_ubatch,
        n_seq_max=settings.parallel,
        n_threads=threads,
        n_threads_batch=threads,
        kv_unified=layout.unified,
        flash_attn=layout.flash_attn,
        type_k=settings.type_k,
        type_v=settings.type_v,
    )
