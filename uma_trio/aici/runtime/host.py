"""Runs Wasm: one engine for the process, with everything that all controllers share."""

from __future__ import annotations

import functools
import math

import attrs
import wasmtime

from uma_trio.aici.runtime.compiler import Compiler, make_engine, new_store, short
from uma_trio.aici.runtime.constraints import Constraints
from uma_trio.aici.runtime.controller import Controller
from uma_trio.aici.runtime.env import FUNCTIONS, WASI_FUNCTIONS
from uma_trio.aici.runtime.epochs import Epochs
from uma_trio.aici.runtime.functions import HostFunctions
from uma_trio.aici.runtime.guest import BLOB_ARGUMENT, Guest
from uma_trio.aici.runtime.interface import BadModule, Limits, Vocabulary
from uma_trio.aici.runtime.signatures import CONSTRAINT, ENV, WASI
from uma_trio.aici.runtime.token_trie import build_trie
from uma_trio.aici.runtime.turns import HostTurns
from uma_trio.aici.runtime.variables import MemoryPool, Variables
from uma_trio.grammar import vocabulary as grammar_vocabulary


@attrs.frozen(eq=False)
class Module:
    """Compiled code, ready to be instantiated."""

    code: wasmtime.Module
    linked: wasmtime.InstancePre


class WasmHost:
    """Runs Wasm; one in a process.  Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits, turns: HostTurns | None = None) -> None:
        self._vocabulary = vocabulary
        self._max_memory_bytes = limits.max_memory_mb << 20
        self._pool = MemoryPool(limits.max_total_memory_mb << 20)
        self._trie = build_trie([vocabulary.token_bytes(n) for n in range(vocabulary.n_vocab)], vocabulary.eos)
        self._engine = make_engine()
        self._epochs = Epochs(self._engine)
        self._new_compiler = functools.partial(
            Compiler, limits.max_compile_s, limits.max_compile_memory_mb, limits.max_memory_mb
        )
        self._compiler = self._new_compiler()
        self._constraints = Constraints(lambda: _for_constraints(vocabulary))
        self._functions = HostFunctions(
            self._engine,
            {ENV: FUNCTIONS, WASI: WASI_FUNCTIONS, CONSTRAINT: self._constraints.functions},
            turns or HostTurns(),
        )

    def prepare(self) -> None:
        """Do what the first constraint needs.  Blocks for half a second once."""
        self._constraints.prepare()

    def compile(self, wasm: bytes, *, is_ours: bool = False) -> bytes:
        """Machine code for ``load``.  May take seconds.

        Args:
            is_ours: the module comes with uma-trio, and does not wait for those that others upload.

        Raises:
            BadModule: no Wasm, exports are missing, imports are unknown, too large, or it takes too long.
            CannotCompile: not the module's fault; it may succeed later.
            OSError: no room for temporary files.
        """
        compiled = (self._new_compiler() if is_ours else self._compiler).compile(wasm)
        self._check_instance(compiled)
        return compiled

    def _check_instance(self, compiled: bytes) -> None:
        """Make an instance, of which nothing runs: its data must be in its memory, and its tables must be small."""
        store = new_store(self._engine, self._max_memory_bytes)
        try:
            with self._epochs.until(store, math.inf):
                self._functions.link(wasmtime.Module.deserialize(self._engine, compiled)).instantiate(store)
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            raise BadModule(f"the module cannot be instantiated: {short(str(error))}") from None
        finally:
            store.close()

    def load(self, compiled: bytes) -> Module:
        """Raises ``ValueError`` if the code was compiled for something else, such as another version."""
        try:
            code = wasmtime.Module.deserialize(self._engine, compiled)
            linked = self._functions.link(code)
        except wasmtime.WasmtimeError as error:
            raise ValueError(f"the module was compiled for something else: {error}") from None
        if any(imported.module == CONSTRAINT for imported in code.imports):
            self.prepare()
        return Module(code, linked)

    def instantiate(self, module: Module, argument: str, variables: Variables) -> Controller:
        """A controller, not started."""
        guest = self._new_guest(variables)
        guest.blobs[BLOB_ARGUMENT] = argument.encode("utf-8", "replace")
        return Controller(module.linked, guest, self._epochs, self._functions, self._new_guest, self._pool)

    def close(self) -> None:
        self._compiler.close()
        self._constraints.close()
        self._epochs.close()

    def _new_guest(self, variables: Variables) -> Guest:
        store = new_store(self._engine, self._max_memory_bytes)
        vocabulary = self._vocabulary
        return Guest(store, vocabulary.n_vocab, vocabulary.eos, self._trie, vocabulary.tokenize, variables)


def _for_constraints(vocabulary: Vocabulary) -> grammar_vocabulary.Vocabulary:
    tokens = [vocabulary.token_bytes(n) for n in range(vocabulary.n_vocab)]
    return grammar_vocabulary.Vocabulary(
        tokens=tokens,
        control_ids=[token for token, text in enumerate(tokens) if not text],
        end_ids=[vocabulary.eos],
        bos_id=None,
        encode=lambda text: [*vocabulary.tokenize(text.encode("utf-8", "replace"))],
    )
