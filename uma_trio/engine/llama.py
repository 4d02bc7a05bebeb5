"""The engine over llama.cpp: one model, one context, all sequences in one batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Literal

import attrs
import msgspec

import llama_abi
from uma_trio import config
from uma_trio.engine.adapter_calls import split_by_adapters
from uma_trio.engine.bandwidth import memory_bytes_per_s
from uma_trio.engine.call import NOTHING_SAMPLED, Call, SampledCall
from uma_trio.engine.call_masks import CallMasks, constrained, masks_of, states_after
from uma_trio.engine.draft import Drafter
from uma_trio.engine.embedding import NOTHING_EMBEDDED, Embedder
from uma_trio.engine.fillers import add_decodes, add_filled, company, is_decode, missing_ids
from uma_trio.engine.inspect import devices_of_model
from uma_trio.engine.kv_operations import NO_OUTCOME, KvOperations
from uma_trio.engine.layout import (
    LayoutCache,
    LayoutChoice,
    max_checkpoints,
)
from uma_trio.engine.layout_choice import (
    EXACT_ROWS,
    attention_scan,
    check_memory,
    choose_layout,
    compiles_shaders,
    context_options,
    exact_rows,
    layout_candidates,
    shape_of,
    threads_of_one_row,
)
from uma_trio.engine.loaded_adapters import LoadedAdapters
from uma_trio.engine.matchers import Matchers
from uma_trio.engine.media_calls import split_by_media
from uma_trio.engine.placement import compute_environment, open_library, place
from uma_trio.engine.positions import Positions
from uma_trio.engine.row_check import check_rows
from uma_trio.engine.sampling.dry import Breakers
from uma_trio.engine.sampling.logprobs import compute_logprobs
from uma_trio.engine.sampling.plan import Rows
from uma_trio.engine.sampling_threads import SamplingThreads
from uma_trio.engine.step_results import StepResults
from uma_trio.engine_link.defaults import with_defaults
from uma_trio.engine_link.devices import Devices
from uma_trio.engine_link.interrupts import Interrupts
from uma_trio.engine_link.masks import Masks
from uma_trio.engine_link.messages import (
    MASK_LATE,
    AdapterFile,
    DefineGrammar,
    Draft,
    Drafted,
    DraftInput,
    EngineError,
    FitReport,
    LayoutReport,
    ModelInfo,
    Ready,
    Step,
    StepCallbacks,
    StepInput,
    StepInterrupted,
    StepOutput,
)
from uma_trio.engine_link.sampling import TokenLogprobs
from uma_trio.processes.machine import free_memory_bytes, machine_memory_bytes, spare_cores
from uma_trio.tokenizer.tokenizer import Tokenizer

READ_SHARE: Final = 0.5
"""The engine waits for the next message of the daemon for this fraction of the time that a GPU is expected to compute."""

MAX_BREAKERS: Final = 64
"""Sets of sequence breakers that are remembered as tokens."""


def breakers_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """Texts that end a repetition, for DRY."""

    def encode(text: str) -> list[int]:
        return [*map(int, tokenizer.encode(text, add_special=False, parse_special=False, continues=True))]

    return Breakers(texts, lambda token: tokenizer.tokens_to_bytes([token])[0], encode)


class LlamaEngine:
    """A loaded model with its context.  See ``messages.Engine`` for the contract.

    Args:
        path: a GGUF file.
        settings: memory and compute.
        on_progress: called with the loaded share in [0, 1]; answering False gives loading up.
        layout_cache: remembers how the memory was laid out; without it that is never measured, and decided by rule.
        layouts: names of the layouts that there is memory for; ``None`` for all of them.
        adapters: checked GGUF files.

    Raises:
        EngineError: the file of an adapter has changed.
        llama_abi.LlamaError: the file cannot be loaded, or there is not the memory for it.
        llama_abi.LibraryError: no libllama to load it with.
    """

    def __init__(
        self,
        path: Path,
        settings: config.Model,
        on_progress: Callable[[float], bool] | None = None,
        layout_cache: LayoutCache | None = None,
        adapters: Sequence[AdapterFile] = (),
        *,
        layouts: Collection[str] | None = None,
        target_itl_ms: float = config.DEFAULT_TARGET_ITL_MS,
    ) -> None:
        self._settings = with_defaults(settings)
        self.fit: FitReport | None = None
        """How the settings were chosen; set by the caller that chose them."""
        self.controller_masks: Masks | None = None
        self._device_times: dict[bool, tuple[float, int]] = {}
        """Seconds that a GPU took for the last call that only decoded and for the last other one, and the rows of each."""
        self._repeatable: Call | None = None
        """The call of the last step, if it had one alone and the batch still has its rows.  A step that ``repeats`` goes on
        with it; each step takes it away when it begins, and only one that is complete leaves another."""
        self._positions = Positions()
        self.interrupts: Interrupts | None = None
        self._abort = llama_abi.AbortFlag()
        self._interrupt: llama_abi.AbortFlag | None = None
        """The flag of the running step, if it gives way."""
        with contextlib.ExitStack() as stack:
            self._load(stack, path, on_progress, adapters, layout_cache, layouts, target_itl_ms)
            self._open_parts(stack)
            self._info = self._describe_model(path)
            if settings.reproducible:
                check_rows(self._context, EXACT_ROWS)
            self._kv_operations = KvOperations(
                unified=self._info.unified, n_threads=self._info.spare_cores, positions=self._positions
            )
            stack.callback(self._kv_operations.close)
            self._owned = stack.pop_all()

    def _load(
        self,
        stack: contextlib.ExitStack,
        path: Path,
        on_progress: Callable[[float], bool] | None,
        adapters: Sequence[AdapterFile],
        layout_cache: LayoutCache | None,
        layouts: Collection[str] | None,
        target_itl_ms: float,
    ) -> None:
        """The weights, the adapters and the context, in the layout that suits this machine."""
        settings = self._settings
        library = open_library(settings)
        self._place = place(settings, library)
        if settings.reproducible and self._place.on_gpu:
            raise EngineError("reproducible is for a CPU: set devices to none")
        began = time.perf_counter()
        self._model = stack.enter_context(
            llama_abi.Model(
                library,
                path,
                n_gpu_layers=settings.gpu_layers,
                placement=self._place.options,
                use_mmap=settings.mmap,
                plain_kernels=settings.reproducible,
                on_progress=on_progress,
            )
        )
        loaded_s = time.perf_counter() - began
        self._shape = shape_of(self._model, settings)
        self._adapters = LoadedAdapters(self._model, adapters, on_gpu=self._place.on_gpu)
        stack.callback(self._adapters.close)
        layouts_by_rule = layout_candidates(self._model, self._place, self._shape, settings, target_itl_ms)
        self._default_layout = layouts_by_rule[0]
        self._choice = choose_layout(
            self._model,
            self._place,
            self._shape,
            settings,
            layout_cache,
            layouts_by_rule,
            layouts,
            target_itl_ms=target_itl_ms,
            loaded_s=loaded_s,
        )
        self._context = self._open()
        stack.callback(lambda: self._context.close())  # ``reset`` replaces it

    def _open_parts(self, stack: contextlib.ExitStack) -> None:
        """What computes with the model and the context; ``stack`` closes it."""
        settings = self._settings
        in_order = self._options.kv_unified and not (self._model.is_recurrent or self._model.is_hybrid)
        self._rows_in_order = self._context.n_ubatch if in_order else None
        """How many rows of a call llama.cpp computes together and in their order; ``None``: this depends on the call."""
        self._context.set_abort_flag(self._abort)
        self._batch = llama_abi.Batch(self._context.n_batch)
        self._row_batch: llama_abi.Batch | None = None
        """For rows of pictures and sound; made when the first ones come."""
        # with adapters llama.cpp waits for the device in each call
        self.is_async = self._place.on_gpu and not self._adapters.files
        self.tokenizer = Tokenizer(self._model.vocab)
        self._breakers = functools.lru_cache(MAX_BREAKERS)(functools.partial(breakers_of, self.tokenizer))
        self._spare_cores = spare_cores(self._options.n_threads_batch, on_gpu=self._place.on_gpu)
        self._matchers = Matchers(
            lambda: self.tokenizer.grammar_vocabulary(self._model.vocab.eog_ids),
            self._model.vocab.n_tokens,
            n_threads=self._spare_cores,
        )
        stack.callback(self._matchers.close)
        # while tokens are sampled nothing computes, so a CPU's threads are free
        self._sampling = SamplingThreads(self._spare_cores if self._place.on_gpu else self._options.n_threads_batch)
        stack.callback(self._sampling.close)
        self._embedder = Embedder(
            self._model,
            self._adapters,
            self._options,
            self._abort,
            kv_bytes_per_token=self._shape.kv_bytes_per_token,
            max_tokens=settings.embedding_ctx,
            free_bytes=None if self._place.on_gpu else free_memory_bytes,
        )
        stack.callback(self._embedder.close)
        self._drafter: Drafter | None = None
        if settings.draft_model is not None:
            self._drafter = Drafter(
                self._model,
                Path(settings.draft_model),
                self._options,
                self._abort,
                gpu_layers=settings.gpu_layers,
                placement=self._place.without_overrides.options,
                use_mmap=settings.mmap,
                compiles=compiles_shaders(self._place),
            )
            stack.callback(self._drafter.close)
        self.chat_template = self._model.chat_template

    def _describe_model(self, path: Path) -> ModelInfo:
        settings = self._settings
        recurrent, windowed = self._model.is_recurrent or self._model.is_hybrid, self._model.n_swa > 0
        return ModelInfo(
            name=settings.alias or path.name,
            description=described(self._model.description, self._model.n_params),
            n_vocab=self._model.vocab.n_tokens,
            n_ctx=self._context.n_ctx,
            n_ctx_seq=self._context.n_ctx_seq,
            n_ctx_train=self._model.n_ctx_train,
            n_batch=self._context.n_batch,
            n_ubatch=self._context.n_ubatch,
            n_seq_max=self._context.n_seq_max,
            eog_ids=tuple(self._model.vocab.eog_ids),
            size_bytes=self._model.size_bytes,
            n_params=self._model.n_params,
            unified=self._options.kv_unified,
            attention_scan=attention_scan(self._options, self._place.names),
            records_calls=any(name.startswith("CUDA") for name in self._place.names),
            compiles_shaders=compiles_shaders(self._place),
            fills_gaps=not (self._options.kv_unified or recurrent or windowed)
            and self._context.n_seq_max <= self._context.n_ubatch,
            can_truncate=not recurrent and not (windowed and self._options.kv_unified),
            state_can_truncate=not recurrent and not windowed,
            exact_rows=exact_rows(
                self._options,
                on_gpu=self._place.on_gpu,
                bits_per_weight=8 * self._model.size_bytes / max(1, self._model.n_params),
            ),
            max_rows=EXACT_ROWS if settings.reproducible else 0,
            max_checkpoints=self._most_checkpoints() if recurrent and not windowed else 0,
            kv_bytes_per_token=self._shape.kv_bytes_per_token,
            kv_mem_limited=self._choice.layout.is_kv_mem_limited,
            n_layer=self._model.n_layer,
            n_embd=self._model.n_embd,
            n_embd_out=self._model.n_embd_out,
            can_embed=self._embedder.pooling is not None and self._context.is_causal,
            embedding_ctx=self._embedder.max_tokens,
            embedding_batch=self._embedder.n_batch,
            **({} if self._drafter is None else self._drafter.info()),
            n_threads=self._options.n_threads_batch,
            spare_cores=self._spare_cores,
            adapters=self._adapters.files,
        )

    def _most_checkpoints(self) -> int:
        """By the size of one, which every sequence that holds something has."""
        self._batch.clear()
        self._batch.add([0], pos=0, seq=0)
        self._context.decode(self._batch)
        n_bytes = self._context.state_size(0, flags=llama_abi.PARTIAL_ONLY)
        self._context.clear()
        return max_checkpoints(n_bytes, n_sequences=self._context.n_seq_max, memory_bytes=machine_memory_bytes())

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def layout_choice(self) -> LayoutChoice:
        """How the memory is laid out, and why."""
        return self._choice

    def _open(self) -> llama_abi.Context:
        """A context in the layout that was chosen, or in the rule's, if there is no room for that."""
        self._options = context_options(self._settings, self._choice.layout)
        try:
            return self._adapters.open_context(self._options)
        except llama_abi.LlamaError:
            rule = self._default_layout
            if rule == self._choice.layout:
                check_memory(self._model, self._place, self._shape, rule.n_ctx, failed=True)
                raise
            self._choice = attrs.evolve(self._choice, layout=rule, why="no room")
            self._options = context_options(self._settings, rule)
            return self._adapters.open_context(self._options)

    def measure_memory(self) -> None:
        """Find out what the memory can move, where the weights are in the machine's own; some 50 ms at most.

        Best effort: without room for what is copied, or for a thread, it stays unknown.
        """
        if not self._place.on_gpu:
            with contextlib.suppress(MemoryError, RuntimeError):
                bandwidth = memory_bytes_per_s(self._options.n_threads_batch, self._info.size_bytes)
                self._info = msgspec.structs.replace(self._info, memory_bytes_per_s=bandwidth)

    def describe(self) -> Ready:
        """Return the report to the daemon that the model is loaded."""
        library, options, choice = self._model.library, self._options, self._choice
        return Ready(
            info=self._info,
            layout=LayoutReport(
                name=choice.layout.name,
                reason=choice.why,
                measured={trial.layout.name: str(trial) for trial in choice.measured},
                is_saved=choice.is_saved,
                rule=choice.rule,
            ),
            devices=self.devices(),
            settings=self._settings,
            fit=self.fit,
            environment=repr(
                (
                    *compute_environment(library, self._place, self._settings),
                    attrs.evolve(options, n_ctx=0),
                    self._settings.reproducible,
                )
            ),
            state_format=repr(
                (
                    library.stamp.pin,
                    library.backend,
                    options.type_k,
                    options.type_v,
                    options.kv_unified,
                    options.flash_attn,
                    self._settings.reproducible,
                )
            ),
        )

    def devices(self) -> Devices:
        """What the model computes on, with the memory that is free now."""
        drafter = () if self._drafter is None else self._drafter.buffers
        buffers = (*self._model.buffers, *self._context.buffers, *drafter)
        return devices_of_model(self._place, self._model, self._settings, buffers)

    def step(self, step: Step[StepInput], callbacks: StepCallbacks | None = None) -> StepOutput:
        """See ``messages.Engine``."""
        try:
            if step.gives_way and self.interrupts is not None:
                return self._interruptible(step, self.interrupts, callbacks)
            return self._step(step, callbacks)
        except (EngineError, StepInterrupted):
            raise
        except Exception as error:  # refused by the ABI layer, or a defect: the context is not to be trusted
            raise EngineError(f"{type(error).__name__}: {error}") from error

    def _interruptible(
        self, step: Step[StepInput], interrupts: Interrupts, callbacks: StepCallbacks | None
    ) -> StepOutput:
        """Compute a step that gives way."""
        self._interrupt = llama_abi.AbortFlag(interrupts.memory, interrupts.offset(step.number))
        self._context.set_abort_flag(self._interrupt)
        try:
            return self._step(step, callbacks)
        except StepInterrupted:
            for step_input in itertools.chain.from_iterable(step.calls):
                if not self._context.seq_remove(step_input.seq_id, step_input.position, -1):
                    raise EngineError(f"the memory cannot remove the end of sequence {step_input.seq_id}") from None
            raise
        finally:
            self._interrupt = None
            self._context.set_abort_flag(self._abort)

    def _step(self, step: Step[StepInput], callbacks: StepCallbacks | None) -> StepOutput:
        started = time.perf_counter()
        embedded = (
            self._embedder.embed(step.embeddings, step.embedding_adapters) if step.embeddings else NOTHING_EMBEDDED
        )
        outcome = self._kv_operations.apply(step.ops, self._context) if step.ops else NO_OUTCOME
        results = StepResults(step.number, started, embedded, outcome)
        repeatable, self._repeatable = self._repeatable, None
        repeated = repeatable if step.repeats else None
        calls = self._divided(step.calls) if repeated is None else step.calls
        unread: list[Sequence[StepInput]] = []
        """Calls that the device still computes."""
        launched = 0.0
        for number, planned in enumerate(calls, start=1):
            call = repeated or Call(self._positions.place(planned))
            inputs, samples = call.inputs, call.samples
            wanted = constrained(inputs) if repeated is None else []
            # A CPU computes within the call.  A GPU computes after it, and must not wait for the threads to begin; but the
            # call comes back late from rows of a prompt, for which no kernel has been recorded.
            begins = bool(wanted) and (not self.is_async or not all(map(is_decode, inputs)))
            pending = self._matchers.begin(wanted) if begins else None
            came_back = self._launch(inputs) if repeated is None else self._launch_again(step.calls[0])
            launched = launched if unread else came_back
            unread.append(inputs)
            if self.is_async and not samples and number < len(calls):
                continue
            if wanted and pending is None:
                pending = self._matchers.begin(wanted)
            self._wait(launched, unread, callbacks)
            unread.clear()
            if len(calls) == 1 and self._can_repeat(call):
                self._repeatable = call
            decoded, sampled = time.perf_counter(), NOTHING_SAMPLED
            masks = masks_of(call, pending, step, self.controller_masks, callbacks)
            if samples:
                sampled = self._sample(call, masks)
            forced = None
            if wanted and step.look_ahead:
                forced = self._matchers.forced_after(states_after(inputs, sampled.tokens, self._info.eog_ids))
            results.add(call, sampled, decoded, None if masks is None else masks.filled, forced)
        return results.output()

    def _divided(self, calls: Sequence[Sequence[StepInput]]) -> list[Sequence[StepInput]]:
        """The calls of ``llama_decode`` that ``calls`` take, in their order."""
        parts = [part for call in calls for part in split_by_media(call)]
        if self._adapters.files:
            fills = self._fillers
            parts = [part for call in parts for part in split_by_adapters(call, self._rows_in_order, fills)]
        return _without_samples_first(parts) if self.is_async else parts

    def _launch(self, inputs: Sequence[StepInput]) -> float:
        """Call ``llama_decode``; returns when it came back."""
        if inputs[0].media:
            return self._launch_rows(inputs[0])
        batch = self._batch
        batch.clear()
        fillers = self._fillers(inputs)
        rows = inputs
        if fillers:
            rows = add_filled(batch, inputs, fillers)
        else:
            for are_decodes, group in itertools.groupby(inputs, is_decode):
                if are_decodes:
                    add_decodes(batch, [*group])
                else:
                    for step_input in group:
                        _add(batch, step_input)
        self._adapters.apply_by_row(self._context, ((row.adapters, len(row.tokens)) for row in rows))
        try:
            code = self._context.decode(batch)
        finally:  # a device may still compute: it takes the cells in the order of the calls
            removed = [self._context.seq_remove(*filler) for filler in fillers.items()]
        if not all(removed):
            raise EngineError("the model's memory cannot remove the last token of a sequence")
        return self._launched(code)

    def _can_repeat(self, call: Call) -> bool:
        """Whether the batch has a row for each input of ``call``, and no filler rows; and whether that would stay so."""
        return self._batch.n_tokens == len(call.inputs) and not self._settings.reproducible

    def _launch_again(self, inputs: Sequence[StepInput]) -> float:
        """Call ``llama_decode`` with the next token of each row of the batch; returns when it came back."""
        self._batch.go_on([step_input.tokens[0] for step_input in inputs])
        self._adapters.apply_by_row(self._context, ((step_input.adapters, 1) for step_input in inputs))
        return self._launched(self._context.decode(self._batch))

    def _launch_rows(self, step_input: StepInput) -> float:
        """Call ``llama_decode`` with rows of a picture or of sound; returns when it came back."""
        width = self._model.n_embd_inp
        batch = self._row_batch = self._row_batch or llama_abi.Batch(self._context.n_batch, width)
        batch.clear()
        [rows] = step_input.media
        batch.add_rows(
            rows.read(width),
            pos=step_input.position,
            seq=step_input.seq_id,
            logits="last" if step_input.samples else "none",
            columns=rows.columns,
            first=rows.row,
        )
        self._adapters.apply_by_row(self._context, [(step_input.adapters, rows.n)])
        if rows.is_causal:
            return self._launched(self._context.decode(batch))
        with self._context.attending_to_all():
            return self._launched(self._context.decode(batch))

    def _launched(self, code: int) -> float:
        """When ``llama_decode`` has come back with ``code``: now."""
        if code:
            self._context.synchronize()
            if code == llama_abi.ABORTED and self._interrupt is not None and not self._abort.is_set():
                raise StepInterrupted
            raise EngineError({1: "no room in the KV cache", 2: "aborted"}.get(code, f"llama_decode returned {code}"))
        return time.perf_counter()

    def _fillers(self, inputs: Sequence[StepInput]) -> dict[int, int]:
        """Filler rows of a call: their positions by sequence id.  Empty if none is needed, or one has no room."""
        if not self._info.fills_gaps:
            return {}
        ids = missing_ids(inputs)
        if self._settings.reproducible and self._options.n_threads_batch > 1:
            ids = ids or company(inputs, self._info.n_seq_max)
        fillers = {seq_id: self._context.seq_pos_max(seq_id) + 1 for seq_id in ids}
        return fillers if all(position < self._info.max_request_tokens for position in fillers.values()) else {}

    def _wait(self, launched: float, calls: Sequence[Sequence[StepInput]], callbacks: StepCallbacks | None) -> None:
        """Wait for the device, which computes ``calls`` since ``launched``.

        The daemon may send its next message only when it has this step's answer.  So the wait for it is shorter than this
        call is expected to take: after a long prompt, a decode would be complete long before.
        """
        n_tokens = [len(step_input.tokens) for inputs in calls for step_input in inputs]
        decodes, rows = max(n_tokens, default=1) == 1, max(1, sum(n_tokens))
        if callbacks is not None:
            seconds, rows_then = self._device_times.get(decodes, (0.0, rows))
            expected_s = seconds * min(1.0, rows / rows_then) if self.is_async else 0.0
            callbacks.computing(READ_SHARE * expected_s)
        self._context.synchronize()
        self._device_times[decodes] = time.perf_counter() - launched, rows

    def _sample(self, call: Call, masks: CallMasks | None) -> SampledCall:
        """Sample what ``call`` wants."""
        samples = call.samples
        logits = self._context.logits(len(samples)).array
        rows = Rows(call.params, [request.n_before for request in samples])
        if call.are_plain and masks is None:
            sampled = self._sampling.sample(logits, rows)
            return SampledCall(sampled.tolist(), (), {}, self._sampling.copied_logits_rows)
        with_logprobs = [row for row, sample in enumerate(samples) if sample.logprobs is not None]
        raw = logits[with_logprobs] if with_logprobs else None  # sampling overwrites the logits
        late = [] if masks is None else masks.wait(logits)
        if masks is not None and masks.filled is not None:
            rows.grammar_masks = [masks.filled.masks.get(row) for row in range(len(samples))]
        mus: dict[int, float] = {}
        rows.banned = [sample.banned for sample in samples]
        rows.biases = [sample.bias for sample in samples]
        rows.pasts = [sample.past for sample in samples]
        rows.breakers = [
            self._breakers(tuple(request.breakers)) if request.params.dry_window else None for request in samples
        ]
        sampled = self._sampling.sample(logits, rows, mus)
        sampled[late] = MASK_LATE
        for row in late:
            mus.pop(row, None)
        scores: list[TokenLogprobs | None] = []
        if raw is not None:
            scores = [None] * len(samples)
            wanted = [samples[row].logprobs or 0 for row in with_logprobs]
            scores_of_rows = compute_logprobs(raw, sampled[with_logprobs], wanted)
            for row, score in zip(with_logprobs, scores_of_rows, strict=True):
                scores[row] = score
        return SampledCall(sampled.tolist(), scores, mus, self._sampling.copied_logits_rows + len(with_logprobs))

    def draft(self, inputs: Sequence[DraftInput], min_probability: float) -> Drafted:
        if self._drafter is None:
            return Drafted(
                [Draft(draft_input.seq_id, 0, ()) for draft_input in inputs], failure="there is no draft model"
            )
        return self._drafter.draft(inputs, min_probability)

    def define_grammar(self, grammar: DefineGrammar) -> None:
        self._matchers.define(grammar.key, grammar.source, replaces=grammar.replaces)

    def set_threads(self, n_threads: int) -> None:
        of_one_row = threads_of_one_row(self._settings, n_threads)
        self._options = attrs.evolve(self._options, n_threads=of_one_row, n_threads_batch=n_threads)
        self._context.set_threads(of_one_row, n_threads)
        self._embedder.set_threads(n_threads)
        if self._drafter is not None:
            self._drafter.set_threads(n_threads)

    def used_cells(self) -> dict[int, int]:
        ends = {seq_id: self._context.seq_pos_max(seq_id) for seq_id in range(self._info.n_seq_max)}
        return {seq_id: end + 1 for seq_id, end in ends.items() if end >= 0}

    def reset(self) -> None:
        self._context.close()
        self._kv_operations.reset()
        try:
            self._context = self._adapters.open_context(self._options)
            if self._drafter is not None:
                self._drafter.reset()
        except llama_abi.LlamaError as error:
            raise EngineError(str(error)) from error
        self._context.set_abort_flag(self._abort)

    def abort(self) -> None:
        self._abort.set()
        if (interrupt := self._interrupt) is not None:
            interrupt.set()

    def close(self) -> None:
        self._owned.close()


def _without_samples_first(calls: list[Sequence[StepInput]]) -> list[Sequence[StepInput]]:
    """``calls`` in an order in which the device need not wait between those that nobody samples from."""
    seq_ids = [step_input.seq_id for inputs in calls for step_input in inputs]
    if len(calls) < 2 or len({*seq_ids}) < len(seq_ids):  # a sequence's rows keep their order
        return calls
    return sorted(calls, key=lambda inputs: any(step_input.samples for step_input in inputs))


def _add(batch: llama_abi.Batch, step_input: StepInput) -> None:
    n, wanted = len(step_input.tokens), len(step_input.samples)
    if 1 < wanted < n:
        raise EngineError(f"{wanted} samples for {n} tokens: one, or one each")
    logits: Literal["none", "last", "all"] = "none" if not wanted else "last" if wanted == 1 else "all"
    batch.add(step_input.tokens, pos=step_input.position, seq=step_input.seq_id, logits=logits)


def described(description: str, n_params: int) -> str:
    """llama.cpp's description of a model, with the number of weights where llama.cpp has no name for its size."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if (n_units := n_params / factor) >= 1:
            return description.replace("?B", f"{n_units:.1f}{unit}" if n_units < 10 else f"{n_units:.0f}{unit}")
    return description.replace("?B", str(n_params))
