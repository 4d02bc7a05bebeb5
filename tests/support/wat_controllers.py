"""Small controllers in Wasm's text format, and a vocabulary for them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import wasmtime

from uma_trio.aici.runtime.signatures import EXPORTS, IMPORTS

_TYPES = {"i": "i32", "I": "i64"}

EMPTY = {}
PRE = {"num_forks": 1, "suspend": False, "ff_tokens": []}
MID = {"SampleWithBias": {}}
POST = {"stop": False}


@attrs.frozen
class Words:
    """A vocabulary: every byte, some words, and EOS, which has no bytes, as the last token."""

    words: Sequence[bytes] = (b"the", b"then", b" a", b"the")
    n_more: int = 0
    """Tokens that are not in any text of the tests, to make it larger."""

    @property
    def tokens(self) -> list[bytes]:
        return [bytes([n]) for n in range(256)] + [*self.words] + [b"~%d" % n for n in range(self.n_more)] + [b""]

    @property
    def n_vocab(self) -> int:
        return 256 + len(self.words) + self.n_more + 1

    @property
    def eos(self) -> int:
        return self.n_vocab - 1

    def token_bytes(self, token: int) -> bytes:
        return self.tokens[token]

    def tokenize(self, text: bytes) -> list[int]:
        return list(text.decode("utf-8", "replace").encode())

    def tokenize_prompt(self, text: str) -> list[int]:
        return self.tokenize(text.encode())


def host_function(module: str, name: str) -> str:
    """Import it as ``$name``."""
    parameters, results = IMPORTS[module][name]
    types = " ".join(f"(param {_TYPES[each]})" for each in parameters) + "".join(
        f"(result {_TYPES[each]})" for each in results
    )
    return f'(import "{module}" "{name}" (func ${name} {types}))'


def returning(result: object, at: int = 1024) -> str:
    """Instructions that return JSON.  They write it at ``at``."""
    text = (result if isinstance(result, str) else json.dumps(result)).encode()
    store = "".join(f"(i32.store8 (i32.const {at + n}) (i32.const {byte}))" for n, byte in enumerate(text))
    return store + f"(call $aici_host_return_process_result (i32.const {at}) (i32.const {len(text)}))"


def controller(
    *,
    init: str = "",
    create: str = "i32.const 7",
    prompt: str = returning(EMPTY),
    pre: str = returning(PRE),
    mid: str = returning(MID),
    post: str = returning(POST),
    more: str = "",
    memory: str = '(memory (export "memory") 1)',
    left_out: str = "",
) -> bytes:
    """A module whose callbacks have these instructions.

    Args:
        more: other definitions.
        left_out: an export that is missing.
    """
    bodies = dict(zip(EXPORTS, (init, create, prompt, pre, mid, post), strict=True))
    functions = []
    for name, (parameters, results) in EXPORTS.items():
        export = "" if name == left_out else f'(export "{name}")'
        types = " ".join(["(param $handle i32)"] * len(parameters) + ["(result i32)"] * len(results))
        functions.append(f"(func {export} {types} (local $n i32) {bodies[name]})")
    imports = "".join(host_function(module, name) for module, names in IMPORTS.items() for name in names)
    return bytes(wasmtime.wat2wasm(f"(module {imports} {memory} {more} {' '.join(functions)})"))


def printing(text: str, at: int = 4096) -> str:
    """Instructions that print ``text`` on stdout."""
    data = text.encode()
    store = "".join(f"(i32.store8 (i32.const {at + 16 + n}) (i32.const {byte}))" for n, byte in enumerate(data))
    return (
        store
        + f"(i32.store (i32.const {at}) (i32.const {at + 16})) (i32.store (i32.const {at + 4}) (i32.const {len(data)}))"
        + f"(drop (call $fd_write (i32.const 1) (i32.const {at}) (i32.const 1) (i32.const {at + 8})))"
    )
