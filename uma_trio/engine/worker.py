"""The engine's side of the link: one loop that reads messages, computes steps and answers.

The worker is single-threaded.  It reads the socket when it has nothing to compute, while a GPU computes, and where a flag
(``Interrupts``) says that the next step may have been revoked.  So a ``Revoke`` takes effect until its step begins; a step
that computes is ended by its flag.

Source: docs/design/engine-process.md.
"""

from __future__ import annotations

import array
import logging
import math
import os
import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from uma_trio.engine.last_step import LastStep, following_request
from uma_trio.engine_link.interrupts import Interrupts
from uma_trio.engine_link.kv_ops import KvOp, LoadState, SaveState
from uma_trio.engine_link.masks import MaskFile, Masks
from uma_trio.engine_link.messages import (
    DROPPED,
    JOINS,
    MAX_FDS,
    AttachInterrupts,
    AttachMasks,
    Decoder,
    DefineGrammar,
    DraftInput,
    Engine,
    EngineError,
    FromDaemon,
    FromEngine,
    LoadError,
    LoadFailed,
    LoadProgress,
    MasksReady,
    Opening,
    Ready,
    Revoke,
    Revoked,
    SetThreads,
    Start,
    Step,
    StepFailed,
    StepInput,
    StepInterrupted,
    StepOutput,
    SubmittedStep,
    encode,
)
from uma_trio.engine_link.sampling import TokenLogprobs

log = logging.getLogger("uma_trio.engine")

READ_BYTES: Final = 1 << 16
STEPS_TO_RECORD: Final = 2
"""Steps with the same decodes after which a device has a recording of them."""
FDS_BYTES: Final = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class LoadedEngine(Engine, Protocol):
    """What the worker needs beyond ``Engine``."""

    def describe(self) -> Ready: ...


OpenEngine = Callable[[Start, Callable[[float], bool]], LoadedEngine]
"""Loads a model; blocks, and raises ``LoadError``.  It calls the function with the loaded share, 0 to 1; ``False`` ends the load."""


class StepRunner:
    """Computes steps in order.  Completes a run-ahead step with what the step before has sampled.

    Args:
        engine: used from one thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._nothing_left = LastStep(frozenset(engine.info.eog_ids))
        self._last = self._nothing_left

    def is_stale(self, step: SubmittedStep) -> bool:
        """Whether ``step`` ran ahead of a step that was not the last one, or that failed: it cannot be computed."""
        return step.follows not in (0, self._last.number)

    def run(self, step: SubmittedStep, **options: Any) -> StepOutput:
        """Compute ``step``, which is not stale.  Blocks until it is complete.

        Args:
            options: for ``Engine.step``.

        Returns:
            The output, with ``DROPPED`` for each sequence that ended before.

        Raises:
            EngineError, StepInterrupted: as for ``_run_once``.
        """
        output = self._run_once(step, **options)
        if step.n_passes == 1:
            return output
        ids = [[item.seq_id if isinstance(item, StepInput) else item for item in inputs] for inputs in step.calls]
        following: SubmittedStep = Step((), ids, step.number)
        outputs, flags = [output], self._engine.interrupts
        while len(outputs) < step.n_passes and not (flags is not None and flags.is_set(step.number)):
            if not self._last.calls and not any(map(self._last.next_input, chain.from_iterable(ids))):
                break
            outputs.append(self._run_once(following, **options))
        return _joined(outputs, step.n_passes)

    def _run_once(self, step: SubmittedStep, **options: Any) -> StepOutput:
        """Compute the calls of ``step`` once.

        Args:
            options: for ``Engine.step``.

        Returns:
            The output, with ``DROPPED`` for each sequence that ended in the step before.

        Raises:
            EngineError: the step failed, and it is unknown what the KV cache holds.
            StepInterrupted: its flag was set.  Steps that run ahead of it are stale.
        """
        last = self._last
        repeats = bool(last.calls) and step.calls == last.ids and not step.drafts
        calls = last.calls if repeats else self.inputs(step)
        kept = calls if repeats else [inputs for inputs in calls if inputs]
        dropped = not repeats and [*map(len, calls)] != [*map(len, step.calls)]
        drafted = None
        if step.drafts:
            drafted = self._engine.draft(self._draft_inputs(step), step.min_draft_probability)
            drafts = {draft.seq_id: draft.tokens for draft in drafted.drafts if draft.tokens}
            kept = [
                [_with_drafts(step_input, drafts.get(step_input.seq_id, ())) for step_input in inputs]
                for inputs in kept
            ]
        ops = [*last.rejected, *step.ops] if last.rejected else step.ops
        self._last = self._nothing_left
        runnable: Step[StepInput] = Step(
            ops, kept, step.number, 0, step.look_ahead, step.mask_timeout_ms, step.embeddings
        )
        runnable.embedding_adapters, runnable.gives_way = step.embedding_adapters, step.gives_way
        runnable.repeats = repeats
        output = self._engine.step(runnable, **options)
        if drafted is not None:
            output.drafted = drafted
            output.started_s -= drafted.ms / 1e3
        self._last = last.followed_by(step.number, kept, output)
        return self._with_dropped(step, kept, output) if dropped else output

    def inputs(self, step: SubmittedStep) -> Sequence[Sequence[StepInput]]:
        """The inputs of each call of ``step``, without sequences that ended in the step before."""
        return [
            [
                known
                for item in inputs
                if (known := item if isinstance(item, StepInput) else self._last.next_input(item))
            ]
            for inputs in step.calls
        ]

    def _draft_inputs(self, step: SubmittedStep) -> list[DraftInput]:
        """The inputs of the draft model.  Those of continued sequences get the tokens of the last step."""
        goes_on = {item for inputs in step.calls for item in inputs if not isinstance(item, StepInput)}
        draft_inputs = []
        for draft_input in step.drafts:
            if draft_input.seq_id not in goes_on:
                draft_inputs.append(draft_input)
            elif self._last.next_input(draft_input.seq_id) is not None:
                tokens = [*draft_input.tokens, *self._last.tokens_of(draft_input.seq_id)]
                draft_inputs.append(
                    DraftInput(
                        draft_input.seq_id, draft_input.position, tokens, draft_input.n_drafts, draft_input.temperature
                    )
                )
        return draft_inputs

    @staticmethod
    def _with_dropped(step: SubmittedStep, kept: Sequence[Sequence[StepInput]], output: StepOutput) -> StepOutput:
        """``output`` of the inputs ``kept``, with ``DROPPED`` in the places of the other inputs of ``step``."""
        ran = {step_input.seq_id: len(step_input.samples) for inputs in kept for step_input in inputs}
        sampled = iter(zip(output.tokens, output.scores or [None] * len(output.tokens), strict=True))
        both: list[tuple[int, TokenLogprobs | None]] = []
        for item in chain.from_iterable(step.calls):
            seq_id = item.seq_id if isinstance(item, StepInput) else item
            both += [next(sampled) for _ in range(ran[seq_id])] if seq_id in ran else [(DROPPED, None)]
        scores = [score for _, score in both] if output.scores else ()
        return msgspec.structs.replace(output, tokens=tuple([token for token, _ in both]), scores=scores)


def _joined(outputs: Sequence[StepOutput], n_passes: int) -> StepOutput:
    """The output of a step whose calls were computed once for each of ``outputs``, and were to be ``n_passes`` times."""
    each_time = [*outputs, *[StepOutput(n_passes=0)] * (n_passes - len(outputs))]
    joined = {name: join([getattr(output, name) for output in each_time]) for name, join in JOINS.items()}
    return msgspec.structs.replace(outputs[0], **joined)


def _with_drafts(step_input: StepInput, drafts: Sequence[int]) -> StepInput:
    """``step_input`` with draft tokens after its own, and a sample for each of them."""
    if not drafts:
        return step_input
    samples = [*step_input.samples]
    for token in drafts:
        samples.append(following_request(samples[-1], [token]))
    return msgspec.structs.replace(step_input, tokens=[*step_input.tokens, *drafts], samples=samples)


def _decodes(step: SubmittedStep) -> tuple[int, ...]:
    """The rows of each call of ``step``, if all of them go on with a sequence by one token; otherwise empty."""
    if [item for inputs in step.calls for item in inputs if isinstance(item, StepInput) and len(item.tokens) != 1]:
        return ()
    return tuple(map(len, step.calls))


class Worker:
    """Serves one daemon.

    Args:
        sock: a blocking stream socket that is connected to the daemon.  The worker closes it when it ends.
        open_engine: loads the model that ``Start`` names.
    """

    def __init__(self, sock: socket.socket, open_engine: OpenEngine) -> None:
        self._sock = sock
        self._open_engine = open_engine
        self._decoder = Decoder("daemon")
        self._fds: deque[int] = deque()
        """Received, and not yet taken by the message that they belong to."""
        self._fds_of: defaultdict[int, list[int]] = defaultdict(list)
        """Open descriptors of steps, by their numbers."""
        self._start: Start | None = None
        self._masks_ready: MasksReady | None = None
        """The latest message that the masks of controllers for a step are written."""
        self._steps: deque[SubmittedStep] = deque()
        self._revoked: list[Revoked] = []
        self._unsent: list[FromEngine] = []
        """Answers that are sent when the next step has been launched, so that the device does not wait for the socket.  Only a
        step that CUDA repeats from a recording delays them: to launch all kernels of a 7B model takes 4 to 6 ms."""
        self._last_decodes: tuple[int, ...] = ()
        self._n_alike = 0
        """Steps in a row that had ``_last_decodes``."""
        self._closed = False
        """Whether the daemon has closed its end."""
        self.engine: LoadedEngine | None = None

    def run(self) -> None:
        """Serve until the daemon closes its end.  Blocks.  Closes the socket and the engine."""
        try:
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon has ended, and nobody else waits for an answer
        except EngineError as error:
            log.error("the engine cannot go on: %s", error)
        finally:
            for fd in self._fds:
                os.close(fd)
            self._sock.close()
            if self.engine is not None:
                self.engine.close()

    def _serve(self) -> None:
        while self._start is None:
            self._read(wait=True)
            if self._closed:
                return
        logging.getLogger("llama_abi").setLevel(self._start.library_log_level)
        try:
            self.engine = engine = self._open_engine(self._start, self._report_progress)
        except LoadError as error:
            self._send(LoadFailed(error.reason, error.remedy, error.is_about_memory))
            return
        self._send(engine.describe())
        runner = StepRunner(engine)
        while True:
            if not self._steps:  # otherwise the socket was read when the last step was complete
                self._read(wait=True)
                self._answer()
            if self._steps:
                self._compute(runner, engine, self._steps.popleft())
            elif self._closed:
                return

    def _report_progress(self, share: float) -> bool:
        self._send(LoadProgress(share))
        self._read(wait=False)
        return not self._closed

    def report_opening(self, path: Path) -> None:
        """Tell the daemon that the code of the library ``path`` is about to run."""
        self._send(Opening(path))

    def _compute(self, runner: StepRunner, engine: LoadedEngine, step: SubmittedStep) -> None:
        """Compute one step and answer.  After a failure the engine is reset, and the steps that wait are revoked."""
        if runner.is_stale(step):
            self._close_fds_of(step)
            self._answer(Revoked(step.number))
            return
        decodes = _decodes(step)
        self._n_alike = (self._n_alike if decodes == self._last_decodes else 0) + step.n_passes
        self._last_decodes = decodes
        try:
            output = runner.run(step, callbacks=self)
        except StepInterrupted:
            self._read(wait=False)
            self._answer(Revoked(step.number, began=True))
            return
        except EngineError as error:
            engine.reset()
            self._read(wait=False)
            for waiting in self._steps:
                self._revoked.append(Revoked(waiting.number))
                self._close_fds_of(waiting)
            self._steps.clear()
            self._answer(StepFailed(step.number, str(error)))
            return
        finally:
            self._close_fds_of(step)
        if not self._steps or self._may_be_revoked(self._steps[0]):
            self._read(wait=False)
        self._answer(output)

    def _may_be_revoked(self, step: SubmittedStep) -> bool:
        """Whether a ``Revoke`` of ``step`` may have been sent: the daemon sets its flag before.  To read the socket takes longer."""
        assert self.engine is not None
        flags = self.engine.interrupts
        return flags is None or flags.is_set(step.number)

    def _answer(self, *before: FromEngine) -> None:
        """Send ``before``, and then ``Revoked`` for each withdrawn step whose turn has come, in one write.

        The write may be delayed: see ``_unsent``.
        """
        waiting = self._steps[0].number if self._steps else math.inf
        turn = [revoked for revoked in self._revoked if revoked.number < waiting]
        self._revoked = [revoked for revoked in self._revoked if revoked.number > waiting]
        self._unsent += [*before, *turn]
        if not (self._steps and self.engine is not None and self.engine.is_async and self._is_recorded(self._steps[0])):
            self._flush()

    def _is_recorded(self, step: SubmittedStep) -> bool:
        """Whether CUDA has a recording of ``step``: it records the second of two calls that are alike."""
        return self._n_alike >= STEPS_TO_RECORD and bool(self._last_decodes) and _decodes(step) == self._last_decodes

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._sock.sendall(b"".join([encode(message) for message in unsent]))

    def _send(self, message: FromEngine) -> None:
        self._sock.sendall(encode(message))

    # -- called by the engine during a step -----------------------------------------------------

    def computing(self, wait_s: float) -> None:
        """See ``messages.StepCallbacks``."""
        self._flush()
        if wait_s and not self._steps:
            select.select([self._sock], [], [], wait_s)
        self._read()

    def wait_for_masks(self, number: int, timeout_ms: float) -> MasksReady | None:
        """See ``messages.StepCallbacks``."""
        deadline = time.monotonic() + timeout_ms / 1e3
        while True:
            ready = self._masks_ready
            if ready is not None and ready.number == number:
                return ready
            left_s = deadline - time.monotonic()
            if self._closed or left_s <= 0 or not select.select([self._sock], [], [], left_s)[0]:
                return None
            self._read()

    # -- reading --------------------------------------------------------------------------------

    def _read(self, *, wait: bool = False) -> None:
        """Read and handle what the daemon has sent; with ``wait``, block until there is something."""
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, FDS_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                self._closed = True
                return
            for message in self._decoder.feed(data):
                self._accept(message)
            wait = False

    def _accept(self, message: FromDaemon) -> None:
        match message:
            case Step():
                self._take_fds(message)
                self._steps.append(message)
            case Revoke():
                for step in [step for step in self._steps if step.number == message.number]:
                    self._steps.remove(step)
                    self._close_fds_of(step)
                    self._revoked.append(Revoked(step.number))
            case Start():
                self._start = message
            case DefineGrammar():
                assert self.engine is not None
                self.engine.define_grammar(message)
            case AttachInterrupts():
                self._attach_interrupts(self._fds.popleft())
            case AttachMasks():
                self._attach_masks(MaskFile(self._fds.popleft(), message.n_rows, message.n_vocab))
            case SetThreads():
                assert self.engine is not None
                self.engine.set_threads(message.n_threads)
            case MasksReady():
                self._masks_ready = message

    def _attach_interrupts(self, fd: int) -> None:
        """Map the flags.  If that fails, no step gives way."""
        assert self.engine is not None
        try:
            self.engine.interrupts = Interrupts(fd)
        except (OSError, ValueError) as error:
            log.error("the flags of steps cannot be mapped: %s", error)
        finally:
            os.close(fd)

    def _attach_masks(self, file: MaskFile) -> None:
        """Map the masks.  If that fails, all samples that wait for a mask get ``MASK_LATE``."""
        assert self.engine is not None
        self.engine.controller_masks = None
        try:
            self.engine.controller_masks = Masks(file)
        except (OSError, ValueError) as error:
            log.error("the masks cannot be mapped: %s", error)
        finally:
            os.close(file.fd)

    def _take_fds(self, step: SubmittedStep) -> None:
        """Give each part of ``step`` that came with a file descriptor the number that this has here."""
        step.ops = [self._with_fd(op, step.number) for op in step.ops]
        if self._fds:
            chunks = [item for inputs in step.calls for item in inputs if isinstance(item, StepInput)]
            for rows in chain.from_iterable([chunk.media for chunk in chunks]):
                rows.fd = self._take_fd(step.number)

    def _with_fd(self, op: KvOp, number: int) -> KvOp:
        return msgspec.structs.replace(op, fd=self._take_fd(number)) if isinstance(op, SaveState | LoadState) else op

    def _take_fd(self, number: int) -> int:
        self._fds_of[number].append(self._fds.popleft())
        return self._fds_of[number][-1]

    def _close_fds_of(self, step: SubmittedStep) -> None:
        for fd in self._fds_of.pop(step.number, ()):
            os.close(fd)
