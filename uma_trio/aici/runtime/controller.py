"""One instance of a module: its callbacks, their arguments and results, and copies of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import wasmtime
from msgspec import UNSET

from uma_trio.aici.runtime.epochs import Epochs
from uma_trio.aici.runtime.functions import HostFunctions
from uma_trio.aici.runtime.guest import BLOB_CALL, Fatal, Guest, GuestMemory, Stopped
from uma_trio.aici.runtime.instrument import GLOBAL, NOT_COPIED, OUT_OF_MEMORY, START
from uma_trio.aici.runtime.interface import (
    ALLOWED,
    DISALLOWED,
    PREVIOUS_ERROR,
    ControllerError,
    ControllerTimeout,
    MidAction,
    Row,
    Sample,
    Splice,
    StopSequence,
    StorageCommand,
)
from uma_trio.aici.runtime.turns import OutOfTime
from uma_trio.aici.runtime.variables import MemoryPool, Variables
from uma_trio.aici_link.messages import PreResult

log = logging.getLogger(__name__)

MAX_ERROR_CHARS: Final = 4000

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
T = TypeVar("T")


MAX_NAMES: Final = 8
MAX_NAME_CHARACTERS: Final = 64
"""What the daemon learns of the variables that a controller waits for."""


class _Empty(msgspec.Struct, frozen=True):
    """``{}``."""


class _PreResult(msgspec.Struct, frozen=True):
    num_forks: Number
    suspend: bool
    ff_tokens: list[Number]
    waits_for: list[str] = []


class _Splice(msgspec.Struct, frozen=True):
    backtrack: Number
    ff_tokens: list[Number]


class _MidResult(msgspec.Struct, frozen=True):
    """Exactly one field is set."""

    SampleWithBias: _Empty | None = None
    Splice: _Splice | None = None


class _PostResult(msgspec.Struct, frozen=True):
    stop: bool


_EMPTY: Final = msgspec.json.Decoder(_Empty)
_PRE: Final = msgspec.json.Decoder(_PreResult)
_MID: Final = msgspec.json.Decoder(_MidResult | Literal["Stop"])
_POST: Final = msgspec.json.Decoder(_PostResult)


class Controller:
    """One instance of a module.

    Not thread-safe: one thread at a time.  Different controllers run in different threads at once.  Deadlines are times
    of ``time.monotonic()``.  Every method that runs the controller raises ``ControllerError`` or ``ControllerTimeout``.

    Args:
        module: with its imports resolved.
        guest: of a new store.
        new_guest: makes one for a fork.
        pool: counts the memory of the instance.
    """

    def __init__(
        self,
        module: wasmtime.InstancePre,
        guest: Guest,
        epochs: Epochs,
        functions: HostFunctions,
        new_guest: Callable[[Variables], Guest],
        pool: MemoryPool,
    ) -> None:
        self._module = module
        self._guest = guest
        self._epochs = epochs
        self._functions = functions
        self._new_guest = new_guest
        self._pool = pool
        self._handle = 0
        self._n_bytes = 0
        """Memory of the instance, as it is counted."""
        self._exports: Any = {}
        self._failed = False

    def start(self, prompt: Sequence[int], *, deadline: float) -> None:
        """Call its start function, ``aici_init``, ``aici_create`` and ``aici_init_prompt``.  Comes first, once."""
        self._instantiate(deadline)
        if START in self._exports:
            self._run(START, deadline)
        self._run("aici_init", deadline)
        self._handle = self._run("aici_create", deadline)
        self._call("aici_init_prompt", {"prompt": prompt}, _EMPTY, deadline)

    def assign(self, sequence_id: int) -> None:
        """Set the id that the controller sees as its own."""
        self._guest.sequence_id = sequence_id

    def pre_process(self, *, deadline: float) -> PreResult:
        """How the sequence begins a step: suspended, forked, or with tokens to append."""
        result = self._call("aici_pre_process", {}, _PRE, deadline)
        if result.ff_tokens and (result.suspend or result.num_forks != 1):
            raise self._wrong("with ff_tokens, pre_process must return num_forks 1 and suspend false")
        if result.suspend and result.num_forks != 1:
            raise self._wrong("with suspend, pre_process must return num_forks 1")
        self._check_tokens(result.ff_tokens)
        names = [name[:MAX_NAME_CHARACTERS] for name in result.waits_for[:MAX_NAMES]] if result.suspend else []
        return PreResult(result.suspend, result.num_forks, result.ff_tokens, names or UNSET)

    def mid_process(self, fork_group: Sequence[int], row: Row, *, deadline: float) -> MidAction:
        """Fills ``row``: ``ALLOWED`` for tokens that may come next, ``DISALLOWED`` for all others."""
        guest = self._guest
        guest.row, guest.row_is_written = row, False
        try:
            result = self._call("aici_mid_process", {"fork_group": fork_group}, _MID, deadline)
            action = self._action(result)
        except (ControllerError, ControllerTimeout):
            row[:] = DISALLOWED
            raise
        finally:
            guest.row = None
        if isinstance(action, Sample):
            if not guest.row_is_written:
                row[:] = DISALLOWED
        elif isinstance(action, Splice) and action.n_removed:
            row[:] = ALLOWED
        else:
            row[:] = DISALLOWED
            row[action.ff_tokens[0] if isinstance(action, Splice) else guest.eos] = ALLOWED
        return action

    def post_process(self, tokens: Sequence[int], backtrack: int, *, deadline: float) -> bool:
        """Whether to stop."""
        return self._call("aici_post_process", {"tokens": tokens, "backtrack": backtrack}, _POST, deadline).stop

    def fork(self, sequence_id: int) -> Controller:
        """A copy: a fresh instance with the memory, globals and tables of this one."""
        if self._failed:
            raise ControllerError(PREVIOUS_ERROR)
        if NOT_COPIED in self._exports:
            raise ControllerError("it cannot be forked: it changes its tables, or has a global of the type v128")
        guest = self._guest
        self._check_memory()
        copy = Controller(
            self._module, self._new_guest(guest.variables), self._epochs, self._functions, self._new_guest, self._pool
        )
        try:
            copy._instantiate(math.inf)
            copy._handle = self._handle
            copy._copy_state(self)
            copy._count_memory()
        except BaseException:
            copy.close()
            raise
        copy._guest.sequence_id = sequence_id
        copy._guest.blobs = dict(guest.blobs)
        copy._guest.constraints = {number: constraint.copy() for number, constraint in guest.constraints.items()}
        copy._guest.n_constraints_made = guest.n_constraints_made
        return copy

    @property
    def is_evicted(self) -> bool:
        """Whether every later call fails, because its request has too much of the memory of all."""
        return self._pool.is_evicted(self._guest.variables)

    def take_logs(self) -> str:
        """What was printed since the last time."""
        return self._guest.logs.take()

    def take_storage(self) -> list[StorageCommand]:
        """Writes of variables since the last time."""
        commands, self._guest.storage = self._guest.storage, []
        return commands

    def close(self) -> None:
        """Free the instance.  Every later call fails with ``PREVIOUS_ERROR``; closing it again is a no-op."""
        self._failed = True
        self._exports = {}
        self._guest.panic = None
        self._guest.constraints.clear()
        self._guest.store.close()
        self._pool.count(self._guest.variables, -self._n_bytes)
        self._n_bytes = 0

    def _instantiate(self, deadline: float) -> None:
        guest = self._guest
        try:
            with self._epochs.until(guest.store, deadline):
                self._exports = self._module.instantiate(guest.store).exports(guest.store)
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            self._fail()
            raise ControllerError(f"the module cannot be instantiated: {_short(str(error))}") from None
        guest.instance_memory = GuestMemory(guest.store, self._exports["memory"])
        guest.panic = self._exports.get("aici_panic")

    def _copy_state(self, original: Controller) -> None:
        """Take over memory and globals of another instance of the same module."""
        old, new = original._guest, self._guest
        new.memory.copy_from(old.memory)
        for name, exported in original._exports.items():
            if name.startswith(GLOBAL):
                self._exports[name].set_value(new.store, exported.value(old.store))

    def _call(self, name: str, argument: object, decoder: msgspec.json.Decoder[T], deadline: float) -> T:
        """The result of a callback.

        Raises:
            ControllerError: it failed, or returned something wrong.
            ControllerTimeout: it was stopped at ``deadline``.
        """
        guest = self._guest
        guest.blobs[BLOB_CALL] = msgspec.json.encode(argument)
        guest.result = None
        guest.n_storage_bytes = 0
        self._run(name, deadline, self._handle)
        result, guest.result = guest.result, None
        if result is None:
            raise self._wrong(f"{name}: aici_host_return_process_result not called")
        try:
            return decoder.decode(result)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._wrong(f"{name} returned a wrong result: {error}") from None

    def _run(self, name: str, deadline: float, *arguments: int) -> Any:
        if self._failed:
            raise ControllerError(PREVIOUS_ERROR)
        self._check_memory()
        guest = self._guest
        guest.failure, guest.deadline = None, deadline
        try:
            with self._functions.serving(guest), self._epochs.until(guest.store, deadline):
                result = self._exports[name](guest.store, *arguments)
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            raise self._explained(error, name) from None
        self._count_memory()
        return result

    def _count_memory(self) -> None:
        n_bytes = self._guest.memory.n_bytes
        if n_bytes != self._n_bytes:
            self._pool.count(self._guest.variables, n_bytes - self._n_bytes)
            self._n_bytes = n_bytes

    def _check_memory(self) -> None:
        if self.is_evicted:
            raise self._wrong(
                f"out of memory: all controllers together have more than {self._pool.max_bytes >> 20} MiB, "
                "and those of this request the most"
            )

    def _explained(self, error: wasmtime.Trap | wasmtime.WasmtimeError, name: str) -> Exception:
        """The error of a call that did not return.  Closes the instance."""
        failure = self._guest.failure
        is_out_of_memory = OUT_OF_MEMORY in self._exports and self._exports[OUT_OF_MEMORY].value(self._guest.store)
        self._fail()
        if isinstance(failure, OutOfTime):
            return ControllerTimeout(str(failure))
        if isinstance(failure, Fatal | Stopped):
            return ControllerError(str(failure))
        if isinstance(failure, Exception):
            log.error("a function of the host failed", exc_info=failure)
            return ControllerError(f"internal error: {failure!r}")
        if failure is not None:  # such as KeyboardInterrupt
            raise failure
        code = _code_of(error)
        if code is wasmtime.TrapCode.INTERRUPT:
            return ControllerTimeout(f"{_function_text(name)} took too long")
        if code is wasmtime.TrapCode.STACK_OVERFLOW:
            return ControllerError(f"{_function_text(name)}: call stack exhausted: its calls are nested too deeply")
        if is_out_of_memory:
            return ControllerError(f"{name}: out of memory: it needs more than a controller may have")
        return ControllerError(f"{_function_text(name)}: {_short(str(error))}")

    def _action(self, result: _MidResult | str) -> MidAction:
        if isinstance(result, str):
            return StopSequence()
        if (result.SampleWithBias is None) == (result.Splice is None):
            raise self._wrong("aici_mid_process must return one of Stop, SampleWithBias and Splice")
        if result.Splice is None:
            return Sample()
        splice = Splice(result.Splice.backtrack, result.Splice.ff_tokens)
        self._check_tokens(splice.ff_tokens)
        if not splice.n_removed and not splice.ff_tokens:
            raise self._wrong("empty splice: without backtrack there must be ff_tokens")
        return splice

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if tokens and (wrong := max(tokens)) >= self._guest.n_vocab:
            raise self._wrong(f"ff_token out of range: {wrong} is not in [0, {self._guest.n_vocab})")

    def _wrong(self, reason: str) -> ControllerError:
        """The error of a call that returned something wrong.  Closes the instance."""
        self._fail()
        return ControllerError(reason)

    def _fail(self) -> None:
        self._guest.logs.keeps_first = True
        self.close()


def _function_text(name: str) -> str:
    return "the start function" if name == START else name


def _code_of(error: wasmtime.Trap | wasmtime.WasmtimeError) -> wasmtime.TrapCode | None:
    try:
        return error.trap_code if isinstance(error, wasmtime.Trap) else None
    except ValueError:  # a code that this version of the library does not name
        return None


def _short(error: str) -> str:
    return error.strip()[:MAX_ERROR_CHARS]
