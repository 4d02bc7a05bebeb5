"""What the daemon and an engine say to each other: plain data, as MessagePack over a socket pair.

The daemon sends a ``Start``, then ``Step`` and ``Revoke``.  The engine answers with ``LoadProgress`` and ``Ready`` (or
``LoadFailed``), then with one ``StepOutput``, ``StepFailed`` or ``Revoked`` for each step, in the order of the steps.
No message holds a function, a pointer or a view, so the engine can live in a process of its own.

A message is framed by its length (``<I``).  File descriptors travel with the message that names them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

import attrs
import msgspec
import numpy as np

from uma_trio import config
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.attention import AttentionScan
from uma_trio.engine_link.defaults import SMALL_BATCH
from uma_trio.engine_link.devices import Devices
from uma_trio.engine_link.grammar_state import GrammarState
from uma_trio.engine_link.interrupts import Interrupts
from uma_trio.engine_link.kv_ops import KvOp
from uma_trio.engine_link.masks import Masks
from uma_trio.engine_link.media import MediaRows
from uma_trio.engine_link.sampling import Bias, Past, SamplingParams, TokenLogprobs
from uma_trio.errors import ErrorWithRemedy
from uma_trio.models.purpose import Purpose
from uma_trio.models.sizes import ModelSizes

DROPPED: Final = -2
"""In place of a sampled token: the sequence had ended in the step before, so the engine left it out."""

MASK_LATE: Final = -3
"""In place of a sampled token: its mask was not ready in time, so nothing was sampled.  The input was computed."""


MAX_EMBEDDING_SEQUENCES: Final = 16
"""Texts in one call."""


class EngineError(Exception):
    """A step failed.  What the KV cache holds is unknown: ``reset`` the engine before the next step."""


class StepInterrupted(Exception):
    """A step that gives way was interrupted.  Its KV operations are done; its sequences hold what they held before it."""


class EngineDied(Exception):
    """The engine has ended without being asked to; says how, and what it wrote last."""


NO_MEMORY: Final = re.compile(
    r"insufficient memory|unable to allocate|failed to allocate|out of memory|cannot mmap|mmap failed|bad_alloc", re.I
)
"""How llama.cpp and its backends say that there was not enough memory."""


class LoadError(ErrorWithRemedy):
    """The engine cannot load its model.

    Args:
        is_about_memory: with a smaller choice of settings it may be possible.
    """

    def __init__(self, reason: str, remedy: str = "", *, is_about_memory: bool = False) -> None:
        super().__init__(reason, remedy)
        self.is_about_memory = is_about_memory


@attrs.frozen
class PromptPart:
    """A stretch of a prompt's text."""

    text: str
    parse_special: bool = True
    """Control tokens spelled out in the text are parsed as such; otherwise they are ordinary characters."""


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of the model.  Its number is its place in ``Start.adapters``."""

    name: str
    """For requests."""
    path: Path
    """A GGUF file."""
    scale: float = 1.0
    """Scale for requests that give none."""
    fingerprint: str
    """SHA-256 of the file.  A file with another content is not loaded."""
    size_bytes: int = 0
    rank: int = 0
    """The largest of its matrices."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes while a model is loaded."""

    name: str
    """File name without its folder."""
    description: str
    """llama.cpp's own words: architecture, size, quantization."""
    n_vocab: int
    n_ctx: int
    """Cells of the KV cache."""
    n_ctx_seq: int
    """Cells that one sequence can have."""
    n_ctx_train: int
    """Context length that the model was trained with, in tokens."""
    n_batch: int
    """Tokens of one ``llama_decode`` call, at most."""
    n_ubatch: int = 0
    """Tokens that one pass over the model computes, at most."""
    n_seq_max: int
    """Sequence ids are ``0`` to ``n_seq_max - 1``."""
    eog_ids: tuple[int, ...]
    """Tokens that end a generation."""
    size_bytes: int
    n_params: int
    unified: bool = True
    """Unified KV: all sequences share the cells, and a copy between them is bookkeeping."""
    attention_scan: AttentionScan = AttentionScan.SEQUENCE
    records_calls: bool = False
    """The device records a call that is like the one before, to repeat it with less work (CUDA graphs)."""
    compiles_shaders: bool = False
    """The device compiles what a call needs when it is first needed (Vulkan, Metal)."""
    fills_gaps: bool = False
    """With per-sequence KV, llama.cpp computes rows together only if their sequence ids are consecutive.  Where ids are
    missing in a call of decodes, the engine adds a row for each of them, and removes its token right after the call."""
    can_truncate: bool = True
    """The last tokens of a sequence can be removed.  Not in a recurrent memory, and not in a sliding-window memory with
    unified KV, where other sequences take the cells behind the window."""
    state_can_truncate: bool = True
    """The same for a state that was loaded from a file: for a sliding window it holds the last window only."""
    exact_rows: int = 0
    """So many rows of one sequence in one call give the very logits that they give in a call each; 0: no number does."""
    max_rows: int = 0
    """Most rows of one sequence in one call; 0: any number.  With ``reproducible`` as many as are exact."""
    max_checkpoints: int = 0
    """Checkpoints of recurrent states that memory allows; 0 where sequences can be truncated."""
    kv_bytes_per_token: float = 0.0
    """In the KV cache, over all layers."""
    kv_mem_limited: bool = False
    """``kv_mem_limit_mb`` made ``n_ctx`` smaller."""
    n_layer: int = 0
    n_embd: int = 0
    n_embd_out: int = 0
    """Width of an embedding."""
    purpose: Purpose = "generate"
    """A model that does not generate computes whole texts: each one is in one step."""
    pooling: str = ""
    """How the tokens of a text become one vector or score; empty for a model that generates."""
    can_embed: bool = False
    """Whether it gives embeddings."""
    embedding_ctx: int = 0
    """Tokens of one text to embed, at most."""
    embedding_batch: int = 0
    """Tokens of one chunk of texts to embed, at most."""
    draft_model: str | None = None
    """File name of the draft model, if there is one."""
    draft_ctx: int = 0
    """Tokens that the draft model can know of one sequence."""
    draft_batch: int = 0
    """Tokens of ``Step.drafts``, at most."""
    draft_call_ms: float = 0.0
    """Time of one call of the draft model with one token."""
    draft_token_ms: float = 0.0
    """Time of one more token in a call of the draft model."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of the memory that holds the weights; ``None`` where it was not measured."""
    n_threads: int = 1
    """Compute threads where no other engine computes."""
    spare_cores: int = 1
    """Cores that steps leave to others."""
    adapters: tuple[AdapterFile, ...] = ()
    """LoRA adapters that steps can name, by their numbers."""

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of one request together, at most."""
        return min(self.n_ctx_seq, self.n_ctx_train)

    @property
    def served_name(self) -> str:
        """What clients see, unless the configuration names it."""
        return self.name.removesuffix(".gguf")


# -- from the daemon -------------------------------------------------------------------------------


class Start(msgspec.Struct, array_like=True, tag="start", frozen=True):
    """Load a model.  The first message, sent once."""

    path: Path
    """A GGUF file."""
    settings: config.Model
    cache_dir: Path | None = None
    """Where measurements are kept; ``None``: the user's cache folder."""
    sizes: ModelSizes | None = None
    """Sizes of the model; without them the settings are taken as they are, whether they fit or not."""
    draft_sizes: ModelSizes | None = None
    """Sizes of the draft model."""
    min_batch: int = SMALL_BATCH
    """Tokens that a batch must have at least."""
    layouts: tuple[str, ...] = ()
    """Names of the layouts to choose from; empty for all."""
    attempt: int = 0
    """How often loading has failed because memory was short; each time less is taken."""
    adapters: tuple[AdapterFile, ...] = ()
    """Checked before they are sent."""
    purpose: Purpose = "generate"
    """What the model is for."""
    target_itl_ms: float = config.DEFAULT_TARGET_ITL_MS
    """Target for the inter-token latency of a stream; the layout of the KV cache depends on it."""
    projector: Path | None = None
    """The file that pictures are encoded with, in another process; its memory must be free too."""
    library_log_level: int = logging.DEBUG
    """The daemon logs only what libllama says at this level and above.  A load has hundreds of lines below the usual one."""


class SampleRequest(msgspec.Struct, array_like=True, gc=False):
    """How to sample one token."""

    params: SamplingParams
    n_before: int = 0
    """Tokens that were sampled for this answer before; with the seed it decides the random number."""
    banned: np.ndarray | None = None
    """Token ids that must not be sampled, ``[n]`` int32."""
    bias: Bias | None = None
    """Added to the logits."""
    past: Past | None = None
    """What penalties look at: the tokens that end where the sampled one goes."""
    logprobs: int | None = None
    """Also report the log-probability of the token and of this many most likely ones."""
    controller_mask: int | None = None
    """Wait for the masks of controllers before sampling, and add the one of this key to the logits; see ``MasksReady``."""
    breakers: Sequence[str] = ()
    """Texts that end a repetition, for DRY."""


class StepInput(msgspec.Struct, array_like=True, gc=False):
    """Tokens of one sequence for one step, consecutive in the sequence and in the batch."""

    seq_id: int
    position: int
    """Position of the first token: how many tokens the sequence holds."""
    tokens: Sequence[int]
    """At least one."""
    samples: Sequence[SampleRequest] = ()
    """One for what follows each of the last ``len(samples)`` tokens: none inside a prompt, one at its end and while
    decoding, one for each token where all but the first are draft tokens.  Before the next step, the worker removes draft
    tokens that were not sampled, and what is behind them."""
    stop_ids: Sequence[int] = ()
    """Besides the model's own end tokens, these end the sequence; see ``Continued``."""
    grammar: GrammarState | None = None
    """Only tokens that it allows are sampled; its answer ends before the first sample."""
    adapters: Scales = ()
    """LoRA adapters that all of its tokens are computed with."""
    media: Sequence[MediaRows] = ()
    """Tokens that are rows of pictures or sound instead, in order and without overlap.  Such an input has one sample at
    most, and no draft tokens."""


class EmbeddingInput(msgspec.Struct, array_like=True, gc=False):
    """Tokens of one text to embed, consecutive in the text and in the batch.

    A text whose last tokens are not in the step goes on in the next step with texts to embed.  Only one may do so.
    """

    seq_id: int
    """In the context for embeddings, from 0 to ``MAX_EMBEDDING_SEQUENCES - 1``; the same in all steps of the text."""
    position: int
    """Position of the first token."""
    tokens: Sequence[int]
    """At least one."""
    length: int
    """Tokens of the whole text."""

    @property
    def is_last(self) -> bool:
        """Whether the text ends with these tokens."""
        return self.position + len(self.tokens) == self.length


class DraftInput(msgspec.Struct, array_like=True, gc=False):
    """What the draft model computes of one sequence."""

    seq_id: int
    position: int
    """Tokens of the sequence that the draft model has certainly computed, by the latest ``Draft``."""
    tokens: Sequence[int]
    """The tokens after these: all others that are known, or the first of them.  The draft model keeps the tokens of this
    list that it holds already, removes all other tokens after ``position``, and computes the rest of the list.  If the
    sequence goes on from the step before, the tokens that this step samples come last; see ``Continued``."""
    n_drafts: int = 0
    """Most draft tokens to propose after ``tokens``; none follows a token that ends the answer.  The step verifies them with
    the sequence's last token.  0 while tokens are missing."""
    temperature: float = 0.0
    """Temperature of the sequence; 0 is greedy.  At a high temperature drafts are less likely to be right."""


class Draft(msgspec.Struct, array_like=True, gc=False):
    """What the draft model answers to a ``DraftInput``."""

    seq_id: int
    n_held: int
    """Tokens of the sequence that the draft model holds, drafts included; 0 if they are lost."""
    tokens: Sequence[int]
    """Draft tokens: each is the most likely one."""


class Drafted(msgspec.Struct, array_like=True, gc=False):
    """What the draft model did in a step."""

    drafts: Sequence[Draft] = ()
    """One for each ``DraftInput``, in order; none for sequences that the step before has ended."""
    ms: float = 0.0
    """Time of the draft model; no other duration includes it."""
    calls: int = 0
    """Consecutive calls of ``llama_decode``."""
    n_tokens: int = 0
    """Tokens of the inputs that the draft model computed."""
    failure: str | None = None
    """Why there are no drafts.  Nothing else is lost."""


Continued: TypeAlias = int
"""A sequence id in place of a ``StepInput``: the sequence goes on from the step before, which sampled for it.

The input is the last token that the sequence got there, at the next position, sampled in the same way.  If one of its
tokens has ended the sequence, the engine leaves the input out and reports ``DROPPED``.  No token ends a sequence with the
mask of a controller here: the controller does."""


Input = TypeVar("Input")


class Step(msgspec.Struct, Generic[Input], array_like=True, tag="step"):
    """One tick: changes of the KV cache first, then what is computed.

    An engine computes a ``Step[StepInput]``.  The worker makes it of what the daemon sends.
    """

    ops: Sequence[KvOp] = ()
    """In order."""
    calls: Sequence[Sequence[Input]] = ()
    """One ``llama_decode`` call each, in order.  A sequence is in at most one of them.  No call is empty or has more than
    ``n_batch`` tokens."""
    number: int = 0
    """Rises from step to step."""
    follows: int = 0
    """Number of the step that it runs ahead of.  If the last step that was computed is another one, or failed, this one
    is revoked.  0: none."""
    look_ahead: bool = False
    """Report what grammars force after the sampled tokens; see ``StepOutput.forced``."""
    mask_timeout_ms: float = 0.0
    """How long sampling waits for masks, counted from the end of the computation."""
    embeddings: Sequence[EmbeddingInput] = ()
    """Texts to embed, in one call before the others; at most ``embedding_batch`` tokens."""
    drafts: Sequence[DraftInput] = ()
    """What the draft model computes before the calls; at most ``draft_batch`` tokens.  A sequence for which it may propose
    tokens is in the calls with its last token and one sample."""
    min_draft_probability: float = 0.0
    """A draft ends before the token at which the probability that all of it is right falls below this."""
    embedding_adapters: Scales = ()
    """The adapters of the texts to embed.  A text that goes on has those of its first chunk."""
    gives_way: bool = False
    """May be interrupted; see ``Interrupts``.  It has no texts to embed, no draft tokens and no copy of a state, and its
    sequences can be truncated."""
    n_passes: int = 1
    """How often the calls are computed, each time with the tokens of the time before (multi-step decoding).  If more than once,
    each input has one sample, and the step has no operation, mask or draft.  The output has ``n_passes`` tokens for each
    input, one after another, ``DROPPED`` after one that ends its sequence.  A step whose flag (``Interrupts``) is set
    ends after the pass that computes, or after its first one."""
    repeats: bool = False
    """Set by the worker: the calls are those of the step before, and each input goes on with the token that it got there.  So an
    engine may use what it has prepared for that step."""


class DefineGrammar(msgspec.Struct, array_like=True, tag="grammar"):
    """A grammar that later steps name by its key."""

    key: str
    source: str
    replaces: str | None = None
    """Key of a grammar that the engine may forget."""


class Revoke(msgspec.Struct, array_like=True, tag="revoke"):
    """Withdraw step ``number`` if it has not begun; answered with ``Revoked`` then, and ignored otherwise.

    A step that gives way is withdrawn by its flag, also after it has begun.
    """

    number: int


class SetThreads(msgspec.Struct, array_like=True, tag="threads"):
    """Compute with this many threads from the next step on, because other engines compute as well."""

    n_threads: int


class AttachInterrupts(msgspec.Struct, array_like=True, tag="interrupts"):
    """Map the file whose descriptor comes with this message: flags of steps that give way."""


class AttachMasks(msgspec.Struct, array_like=True, tag="attach"):
    """Map the file whose descriptor comes with this message, in place of an earlier one; see ``masks.MaskFile``."""

    n_rows: int
    n_vocab: int


class MasksReady(msgspec.Struct, array_like=True, tag="masks"):
    """The masks of controllers for step ``number`` are in shared memory."""

    number: int
    rows: Mapping[int, int]
    """Where each one is: ``SampleRequest.controller_mask`` -> row; see ``engine_link.masks``.  Samples of other keys get
    ``MASK_LATE``."""


# -- from the engine -------------------------------------------------------------------------------


class Opening(msgspec.Struct, array_like=True, tag="opening"):
    """The code of a library is about to run.  That may hang, for example while a driver does."""

    path: Path


DOES_NOT_OPEN: Final = "check the driver of its device, or remove the file, or the package that it belongs to"
"""What to do about a library that hangs."""


class LoadProgress(msgspec.Struct, array_like=True, tag="loading"):
    """Share of the weights that is loaded, in [0, 1]."""

    progress: float


class LayoutReport(msgspec.Struct):
    """How the KV cache is laid out, and why; for people."""

    name: str
    reason: str
    measured: dict[str, str] = {}
    is_saved: bool = False
    """A new measurement was saved for later starts."""
    rule: str = ""
    """See ``LayoutChoice.rule``."""


class FitReport(msgspec.Struct, frozen=True):
    """How a model was fitted, for people."""

    choice: str
    why: str
    free: dict[str, int] = {}
    """Bytes that were free before the load, by memory."""
    predicted: dict[str, int] = {}
    """Bytes that the model was expected to take."""
    taken: dict[str, int] = {}
    """Bytes that were taken when it was loaded; of the machine's memory only what no file backs."""
    encoder_waits: bool = False
    """There was no room for the encoder of pictures next to the model, so it starts with the first of them."""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The model is loaded and steps can be sent."""

    info: ModelInfo
    layout: LayoutReport
    devices: Devices
    environment: str
    """Everything but the model that decides what a step costs: library, devices, threads, layout."""
    state_format: str
    """Everything but the model that decides what the bytes of a saved state mean."""
    settings: config.Model | None = None
    """With which the model was loaded: nothing is left to choose."""
    fit: FitReport | None = None
    """How they were chosen; ``None`` if ``fit`` is off."""


class LoadFailed(msgspec.Struct, array_like=True, tag="failed"):
    """The model cannot be loaded."""

    reason: str
    remedy: str = ""
    is_about_memory: bool = False


def of_first_pass(values: Sequence[Any]) -> Any:
    """What only the first of several passes has: KV operations come before it, and a step with anything else has one."""
    return values[0]


def by_input(missing: Any) -> Callable[[Sequence[Sequence[Any]]], Sequence[Any]]:
    """Make a join of lists with an element for each sample request: all of the first request, then those of the next.

    Args:
        missing: stands for each element of a pass without a list.
    """

    def join(values: Sequence[Sequence[Any]]) -> Sequence[Any]:
        if not any(values):
            return ()
        if not all(values):
            none = (missing,) * max(map(len, values))
            values = [value or none for value in values]
        return tuple(chain.from_iterable(zip(*values, strict=True)))

    return join


class StepOutput(msgspec.Struct, array_like=True, tag="output"):
    """What a step computed.

    Each field says how those of several passes become one: with a function of the values of all passes.
    """

    tokens: Annotated[tuple[int, ...], by_input(DROPPED)] = ()
    """One for each sample request, in the order of the inputs; ``NO_TOKEN``, ``DROPPED`` or ``MASK_LATE`` where there is
    none."""
    number: Annotated[int, of_first_pass] = 0
    decode_ms: Annotated[float, sum] = 0.0
    sample_ms: Annotated[float, sum] = 0.0
    started_s: Annotated[float, of_first_pass] = 0.0
    """``time.perf_counter()`` of the engine when it took the step up."""
    ended_s: Annotated[float, max] = 0.0
    """When it was done.  From one step's end to the next one's start is the host gap."""
    copied_logits_rows: Annotated[int, sum] = 0
    """Rows of logits that were copied before they were read."""
    scores: Annotated[Sequence[TokenLogprobs | None], by_input(None)] = ()
    """One for each sample request, ``None`` where it was not asked for; empty where no request asked."""
    copied_ms: Annotated[float, of_first_pass] = 0.0
    """Time for saving and loading states; not part of ``decode_ms``."""
    saved_bytes: Annotated[int, of_first_pass] = 0
    """Size of the states that were saved, checkpoints included."""
    refused: Annotated[Sequence[tuple[int, str]], of_first_pass] = ()
    """States that were not saved or not loaded: sequence and reason.  A refused load leaves the sequence empty."""
    mask_wait_ms: Annotated[float | None, of_first_pass] = None
    """How much of ``sample_ms`` was waiting for masks of grammars; ``None`` where there were none."""
    forced: Annotated[Sequence[tuple[int, Sequence[int]]], of_first_pass] = ()
    """Sequences whose grammar allows only these tokens after the sampled one."""
    grammar_failures: Annotated[Sequence[tuple[int, str]], of_first_pass] = ()
    """Sequences whose grammar cannot go on, and the reason; they have ``NO_TOKEN`` in place of a token."""
    mus: Annotated[Sequence[tuple[int, float]], of_first_pass] = ()
    """Sequences that mirostat has sampled for, and ``SamplingParams.mu`` for their next tokens."""
    state_sizes: Annotated[Sequence[tuple[int, Sequence[int]]], of_first_pass] = ()
    """Answers to ``MeasureState``: sequence, then the bytes of its state and of each checkpoint (0: no such one)."""
    embeddings: Annotated[Sequence[np.ndarray], of_first_pass] = ()
    """One for each text that ended, in order: ``[n_embd_out]`` float32, of length 1; of a model that ranks ``[1]``, the
    score."""
    embedding_ms: Annotated[float, of_first_pass] = 0.0
    """Time for texts to embed; not part of ``decode_ms``."""
    embedding_bytes: Annotated[int, of_first_pass] = 0
    """Memory of the context for embeddings."""
    embedding_failure: Annotated[str | None, of_first_pass] = None
    """Why there are no embeddings.  All texts of the step and the one that goes on are lost; nothing else is."""
    drafted: Annotated[Drafted | None, of_first_pass] = None
    """What the draft model did.  A sequence with drafts has one token for each of them besides its own."""
    verify_ms: Annotated[float, of_first_pass] = 0.0
    """How much of ``copied_ms`` was waiting until a state was verified."""
    n_passes: Annotated[int, sum] = 1
    """How many passes were computed.  The times are those of all of them."""


def joins(output: type[msgspec.Struct]) -> dict[str, Callable[[Sequence[Any]], Any]]:
    """The function of each field that joins those of several passes.

    Raises:
        TypeError: a field has none.
    """
    functions = {}
    for field in msgspec.structs.fields(output):
        join, *others = getattr(field.type, "__metadata__", (None,))
        if join is None or others:
            raise TypeError(f"{output.__name__}.{field.name} does not say how those of several passes are joined")
        functions[field.name] = join
    return functions


JOINS: Final = {name: join for name, join in joins(StepOutput).items() if join is not of_first_pass}
"""How the fields of ``StepOutput`` are joined that not only the first pass has."""


class StepFailed(msgspec.Struct, array_like=True, tag="step_failed"):
    """A step failed, and the engine has a new and empty KV cache.  Steps after it are revoked."""

    number: int
    reason: str


class Revoked(msgspec.Struct, array_like=True, tag="revoked"):
    """Step ``number`` was withdrawn."""

    number: int
    began: bool = False
    """It was interrupted: its KV operations are done, and nothing else.  Otherwise nothing is done."""


SubmittedStep: TypeAlias = Step[StepInput | Continued]
FromDaemon: TypeAlias = (
    Start | SubmittedStep | DefineGrammar | Revoke | AttachInterrupts | AttachMasks | MasksReady | SetThreads
)
StepAnswer: TypeAlias = StepOutput | StepFailed | Revoked
"""What comes after ``Ready``: one for each step, in order."""
FromEngine: TypeAlias = Opening | LoadProgress | Ready | LoadFailed | StepAnswer


class StepCallbacks(Protocol):
    """What an engine calls during a step."""

    def computing(self, wait_s: float) -> None:
        """The device computes: send and take in what does not concern this call.

        Args:
            wait_s: how long to wait for a message; 0 where the device has finished already.
        """

    def wait_for_masks(self, number: int, timeout_ms: float) -> MasksReady | None:
        """Block until the masks of controllers for step ``number`` are there; ``None`` if the time is over before."""


class Engine(Protocol):
    """A loaded model that computes steps.  Blocking; one call at a time, always from the same thread."""

    @property
    def info(self) -> ModelInfo: ...

    is_async: bool
    """``llama_decode`` returns while the device still computes, as on a GPU."""
    controller_masks: Masks | None
    """Masks of controllers, in shared memory; attached by the worker."""
    interrupts: Interrupts | None
    """Flags of steps that give way; attached by the worker."""

    def step(self, step: Step[StepInput], callbacks: StepCallbacks | None = None) -> StepOutput:
        """Compute one step.  Blocks for as long as it computes, without the GIL.

        Args:
            callbacks: get their turns while the device computes, and know when masks are ready.

        Raises:
            EngineError: what the KV cache holds is unknown afterwards.
            StepInterrupted: its flag was set.
        """

    def draft(self, inputs: Sequence[DraftInput], min_probability: float) -> Drafted:
        """Let the draft model compute, if there is one.  Blocks.  Raises nothing: without drafts, steps go on."""

    def define_grammar(self, grammar: DefineGrammar) -> None:
        """Make a grammar known to later steps.  Does not block."""

    def set_threads(self, n_threads: int) -> None:
        """Compute with this many threads from the next step on, at least one."""

    def used_cells(self) -> dict[int, int]:
        """Tokens that the KV cache holds, by sequence; empty sequences are left out."""

    def reset(self) -> None:
        """Start again with an empty KV cache and no checkpoints, on a new context.

        Raises:
            EngineError: that failed as well.
        """

    def abort(self) -> None:
        """Cut the running step and all later ones short where the device can.  From any thread; for good."""

    def close(self) -> None:
        """Free everything.  Calling it again does nothing."""


# -- bytes -----------------------------------------------------------------------------------------

HEADER_BYTES: Final = 4
MAX_FDS: Final = 16
"""File descriptors that go with one byte of a message, at most; a message may have more."""


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} does not go over the engine link")


def _decode_other(wanted: type, value: Any) -> Any:
    if wanted is Path:
        return Path(value)
    dtype, data = value
    return np.frombuffer(data, dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoders: Final[Mapping[str, msgspec.msgpack.Decoder[Any]]] = {
    "daemon": msgspec.msgpack.Decoder(FromDaemon, dec_hook=_decode_other),
    "engine": msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_other),
}


def encode(message: FromDaemon | FromEngine) -> bytes:
    """One framed message."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class Decoder:
    """Bytes to messages.

    Args:
        sender: whose messages these are.
    """

    def __init__(self, sender: Literal["daemon", "engine"]) -> None:
        self._decoder = _decoders[sender]
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes.

        Raises:
            msgspec.DecodeError, msgspec.ValidationError: the other side does not speak this protocol.
        """
        buffer = self._buffer
        buffer += data
        messages = []
        at = 0
        while len(buffer) - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(buffer[at : at + HEADER_BYTES], "little")
            if end > len(buffer):
                break
            messages.append(self._decoder.decode(memoryview(buffer)[at + HEADER_BYTES : end]))
            at = end
        if at:
            del buffer[:at]
        return messages
