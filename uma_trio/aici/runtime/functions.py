"""Makes functions of Python importable by Wasm.

wasmtime's own ``Linker.define_func`` keeps the exception of a function in one variable for all threads, so one controller
could get the error of another.  Here each stays with its guest.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import wasmtime
from wasmtime import _ffi as ffi

from uma_trio.aici.runtime.guest import Guest
from uma_trio.aici.runtime.signatures import IMPORTS, Signature
from uma_trio.aici.runtime.turns import HostTurns, Turn

WITHOUT_TURNS: Final = frozenset({"constraint_new"})
"""What waits for a thread of its own, and would hold up others that wait for their turn."""

_TYPES: Final = {"i": wasmtime.ValType.i32, "I": wasmtime.ValType.i64}
_FIELDS: Final = {"i": ("i32", 0xFFFFFFFF), "I": ("i64", 0xFFFFFFFFFFFFFFFF)}
_TRAP_TEXT: Final = b"stopped by the host"
_NO_FINALIZER: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(0)


class HostFunctions:
    """Everything that modules may import.  Thread-safe; used by all instances.

    Args:
        functions: for each import module, what ``IMPORTS`` names.  A function gets the guest that calls it, and its
            arguments as unsigned numbers.  An exception ends the call, and becomes the guest's ``failure``.
        turns: which calls into controllers may use the functions.
    """

    def __init__(
        self,
        engine: wasmtime.Engine,
        functions: Mapping[str, Mapping[str, Callable[..., int | None]]],
        turns: HostTurns,
    ) -> None:
        self._turns = turns
        self._linker = wasmtime.Linker(engine)
        self._current = threading.local()
        self._kept = [
            self._define(module, name, signature, functions[module][name])
            for module, signatures in IMPORTS.items()
            for name, signature in signatures.items()
        ]

    def link(self, module: wasmtime.Module) -> wasmtime.InstancePre:
        """The module with its imports resolved.

        Raises:
            wasmtime.WasmtimeError: it imports something else.
        """
        return self._linker.instantiate_pre(module)

    @contextlib.contextmanager
    def serving(self, guest: Guest) -> Iterator[None]:
        """Let the functions work on ``guest`` when this thread runs Wasm, until its deadline."""
        current = self._current
        with self._turns.call(guest.deadline) as turn:
            current.guest, current.turn = guest, turn
            try:
                yield
            finally:
                current.guest = None

    def _define(self, module: str, name: str, signature: Signature, function: Callable[..., int | None]) -> Any:
        parameters, results = signature
        ty = wasmtime.FuncType([_TYPES[letter]() for letter in parameters], [_TYPES[letter]() for letter in results])
        callback = ffi.wasmtime_func_unchecked_callback_t(self._callback(name, function, signature))
        module_name, function_name = module.encode(), name.encode()
        error = ffi.wasmtime_linker_define_func_unchecked(
            self._linker.ptr(),
            ctypes.create_string_buffer(module_name),
            len(module_name),
            ctypes.create_string_buffer(function_name),
            len(function_name),
            ty.ptr(),
            callback,
            None,
            _NO_FINALIZER,
        )
        assert not error
        return callback

    def _callback(self, name: str, function: Callable[..., int | None], signature: Signature) -> Callable[..., int]:
        current, turns, cpu_s = self._current, self._turns, self._turns.cpu_s
        has_turns = name not in WITHOUT_TURNS
        fields = tuple((n, *_FIELDS[letter]) for n, letter in enumerate(signature[0]))
        has_result = bool(signature[1])

        def run(_data: Any, _caller: Any, values: Any, _n_values: int) -> int:
            guest: Guest = current.guest
            turn: Turn = current.turn
            try:
                if has_turns:
                    turns.enter(turn)
                began = cpu_s()
                try:
                    result = function(guest, *[getattr(values[n], field) & bits for n, field, bits in fields])
                finally:
                    turns.leave(turn, cpu_s() - began)
                if has_result:
                    values[0].i32 = result
            except BaseException as error:  # noqa: BLE001  (no exception may pass through Wasm; the caller gets this one)
                guest.fail(error)
                return _new_trap()
            return 0

        return run


def _new_trap() -> int:
    text = ctypes.create_string_buffer(_TRAP_TEXT)
    address: int = ctypes.cast(ffi.wasmtime_trap_new(text, len(_TRAP_TEXT)), ctypes.c_void_p).value or 0
    return address
