"""Compiles modules: in a child process, because a module from anywhere may take all memory and minutes.

The child gets and leaves files, since its pipes carry JSON.  The files are in memory where the system can do that, so
that a full disk stops no compilation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import psutil
import wasmtime
from wasmtime import _ffi as ffi

from uma_trio.aici.runtime.binary import NotReadable
from uma_trio.aici.runtime.instrument import instrument
from uma_trio.aici.runtime.interface import TURN_SECONDS, BadModule, CannotCompile
from uma_trio.aici.runtime.signatures import check_interface
from uma_trio.processes.interpreter import python_module
from uma_trio.processes.sandbox import LAST, CannotStart, Interrupted, NoAnswer, Sandbox, limit_memory

MAX_WASM_BYTES: Final = 128 << 20
STACK_BYTES: Final = 512 << 10
"""Stack of a controller."""
MAX_TABLES: Final = 2
MAX_TABLE_ELEMENTS: Final = 100_000
MAX_ERROR_CHARS: Final = 1000
BUSY_SECONDS: Final = 50.0
"""Longest wait for a module on a busy machine, where a compiler gets what others leave.  A daemon waits for ``SIDE_S``."""

N_THREADS: Final = 4
ADDRESS_BYTES: Final = 512 << 20
"""Address space that is only reserved: stacks and arenas of the threads."""


def make_engine() -> wasmtime.Engine:
    """An engine as all modules are compiled for."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    config.max_wasm_stack = STACK_BYTES
    config.cranelift_opt_level = "speed"
    config.wasm_simd = True
    config.wasm_bulk_memory = True
    config.wasm_multi_value = True
    config.wasm_relaxed_simd = False
    config.wasm_threads = False
    config.wasm_tail_call = False
    config.wasm_multi_memory = False
    config.wasm_memory64 = False
    config.wasm_function_references = False
    config.wasm_gc = False
    config.wasm_exceptions = False
    config.wasm_component_model = False
    ffi.wasmtime_config_wasm_component_model_async_set(config.ptr(), False)  # it needs reference types
    ffi.wasmtime_config_concurrency_support_set(config.ptr(), False)
    config.wasm_reference_types = False
    return wasmtime.Engine(config)


def new_store(engine: wasmtime.Engine, max_memory_bytes: int) -> wasmtime.Store:
    """A store for one controller, with its limits of space.  Code in it traps until it gets a deadline."""
    store = wasmtime.Store(engine)
    store.set_limits(
        memory_size=max_memory_bytes, table_elements=MAX_TABLE_ELEMENTS, instances=1, tables=MAX_TABLES, memories=1
    )
    return store


class Compiler:
    """Compiles one module after the other.  Thread-safe.

    Args:
        seconds: longest wait for one; ``BUSY_SECONDS`` while the machine is busy.
        memory_mb: for one.
        max_memory_mb: linear memory that a module may begin with.
    """

    def __init__(self, seconds: float, memory_mb: int, max_memory_mb: int) -> None:
        setup = {"memory_bytes": memory_mb << 20, "max_memory_bytes": max_memory_mb << 20}
        self._sandbox = Sandbox(python_module(__name__), lambda: setup, seconds, BUSY_SECONDS)
        self._turn = threading.Lock()

    def compile(self, wasm: bytes) -> bytes:
        """Machine code.  Blocks.

        Raises:
            BadModule: it cannot be a controller; says why.
            CannotCompile: not the module's fault; it may succeed later.
            OSError: no room for a temporary file.
        """
        if not wasm.startswith(b"\0asm"):
            raise BadModule("this is not Wasm: it does not begin with \\0asm")
        if len(wasm) > MAX_WASM_BYTES:
            raise BadModule(f"the module has {len(wasm)} bytes; at most {MAX_WASM_BYTES}")
        if not self._turn.acquire(timeout=TURN_SECONDS):
            raise CannotCompile("other modules are being compiled; try again later")
        try:
            return self._compile(wasm)
        finally:
            self._turn.release()

    def _compile(self, wasm: bytes) -> bytes:
        with _file_for_child() as (source, source_path), _file_for_child() as (compiled, compiled_path):
            try:
                source.write(wasm)
                source.flush()
            except OSError as error:
                raise OSError(error.errno, f"the module cannot be written for the compiler: {error.strerror}") from None
            try:
                answer = self._sandbox.ask({"source": source_path, "compiled": compiled_path})
            except CannotStart as error:
                raise CannotCompile(f"the process that compiles modules cannot start: {error}; try again") from None
            except Interrupted as error:
                raise CannotCompile(f"the module could not be compiled: {error}; try again") from None
            except NoAnswer as error:
                raise BadModule(f"the module cannot be compiled: {error}") from None
            if "not_written" in answer:
                raise OSError(f"the machine code cannot be written: {answer['not_written']}")
            if "error" in answer:
                raise BadModule(answer["error"])
            return compiled.read()

    def close(self) -> None:
        """Kill a compilation that goes on."""
        self._sandbox.stop()


@contextlib.contextmanager
def _file_for_child() -> Iterator[tuple[IO[bytes], str]]:
    """A temporary file, and the path by which a child can open it."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("uma-trio-wasm"), "w+b") as file:
            yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix="uma-trio-wasm-") as named:
            yield named.file, named.name


def compile_module(wasm: bytes, engine: wasmtime.Engine, max_memory_bytes: int) -> bytes:
    """Machine code of a controller, without limits of time and memory.

    Raises:
        BadModule: it cannot be one; says why.
    """
    try:
        wasmtime.Module.validate(engine, wasm)
        check_interface(wasm, max_memory_bytes)
        return bytes(wasmtime.Module(engine, instrument(wasm)).serialize())
    except (wasmtime.WasmtimeError, NotReadable) as error:
        raise BadModule(f"the module cannot be used: {short(str(error))}") from None


def short(error: str) -> str:
    """A message of wasmtime on one line."""
    return re.sub(r"\s+", " ", error).strip()[:MAX_ERROR_CHARS]


# -- the child ------------------------------------------------------------------------------------


def main() -> None:
    """Serve the runtime at the other end of stdin and stdout."""
    lines = map(json.loads, sys.stdin.buffer)
    setup = next(lines)
    os.nice(5)  # calls of controllers come first
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what Rust says as it dies is no log record
    os.environ["RAYON_NUM_THREADS"] = str(N_THREADS)  # of the compiler
    engine = make_engine()
    limit_memory(psutil.Process().memory_info().vms + setup["memory_bytes"] + ADDRESS_BYTES)
    _send({})
    for question in lines:
        try:
            compiled = compile_module(Path(question["source"]).read_bytes(), engine, setup["max_memory_bytes"])
            Path(question["compiled"]).write_bytes(compiled)
            _send({LAST: True})
        except BadModule as error:
            _send({"error": str(error), LAST: True})
        except OSError as error:
            _send({"not_written": error.strerror, LAST: True})
        except MemoryError:
            _send({"error": "the module cannot be compiled: it takes too much memory", LAST: True})
        except Exception as error:  # noqa: BLE001  (the sender of the module gets the reason)
            _send({"error": f"the module cannot be compiled: {error!r}"[:MAX_ERROR_CHARS], LAST: True})


def _send(answer: object) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
