"""Controllers that nobody should run: what they do, where it is noticed, and what the error says.

Used on the runtime alone, driven from outside, and on the whole daemon.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import attrs
import wasmtime

from tests.support.wat_controllers import MID, POST, PRE, controller, host_function, printing, returning
from uma_trio.aici.runtime.signatures import ENV, EXPORTS, IMPORTS, WASI

Where = Literal["upload", "init", "pre", "mid", "post"]

LOOP: Final = "(loop $forever (br $forever))"
ROOM: Final = '(memory (export "memory") 4)'
"""Four pages, 256 KiB."""

CALLBACKS: Final = {
    "init": "aici_init",
    "create": "aici_create",
    "prompt": "aici_init_prompt",
    "pre": "aici_pre_process",
    "mid": "aici_mid_process",
    "post": "aici_post_process",
}
USUAL: Final = {
    "init": "",
    "create": "i32.const 7",
    "prompt": returning({}),
    "pre": returning(PRE),
    "mid": returning(MID),
}
USUAL["post"] = returning(POST)


@attrs.frozen
class HostileWasm:
    """A module, and the error that it gets."""

    name: str
    wasm: bytes = attrs.field(repr=False)
    where: Where
    """In which step the error comes."""
    error: str
    """A regular expression that the error contains."""
    is_slow: bool = False
    """Whether it ends by a limit of time."""

    def __str__(self) -> str:
        return self.name


def _where(callback: str) -> Where:
    return "init" if callback in ("init", "create", "prompt") else callback  # type: ignore[return-value]


# -- what is not a module, or cannot be used --------------------------------------------------------

GOOD: Final = controller()
NO_IMPORTS: Final = "\n".join(
    f'(func (export "{name}") {"(param i32)" * len(parameters)} {"(result i32) (i32.const 1)" * len(results)})'
    for name, (parameters, results) in EXPORTS.items()
)
MEMORY: Final = '(memory (export "memory") 1)'


def text_module(definitions: str) -> bytes:
    """A module of the text format, with the exports of a controller."""
    return bytes(wasmtime.wat2wasm(f"(module {definitions} {NO_IMPORTS})"))


def _leb(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def with_custom_section(wasm: bytes, name: bytes, content: bytes) -> bytes:
    """The module with one more section, which has no meaning."""
    body = _leb(len(name)) + name + content
    return wasm + b"\0" + _leb(len(body)) + body


def merging_blocks(n: int, targets: int) -> str:
    """A function for which a compiler needs time and memory far beyond its size: ``n`` variables meet in ``n`` blocks."""
    return (
        f"(func (param i32) (result i32) (local {'i32 ' * n}) (loop $l {'(block ' * n}"
        + "".join(f"(local.set {k} (i32.add (local.get {k}) (local.get {k // 2})))" for k in range(1, n))
        + f"(br_table {' '.join(str(k % n) for k in range(targets))} (local.get 0))"
        + "".join(
            f")(local.set {1 + k % (n - 1)} (i32.mul (local.get {1 + k * 7 % (n - 1)}) (i32.const {k})))"
            for k in range(n)
        )
        + "(br_if $l (local.get 1)))"
        + "".join(f"(local.get {k})" for k in range(1, n))
        + "(i32.add)" * (n - 2)
        + ")"
    )


def _other_signature(name: str) -> bytes:
    """A module that exports ``name`` with a type of its own."""
    parameters, results = EXPORTS[name]
    good = f'(func (export "{name}") {"(param i32)" * len(parameters)} {"(result i32) (i32.const 1)" * len(results)})'
    assert good in NO_IMPORTS
    rest = NO_IMPORTS.replace(good, f'(func (export "{name}") (param i64 f32))')
    return bytes(wasmtime.wat2wasm(f"(module {MEMORY} {rest})"))


def _refused() -> Iterator[HostileWasm]:
    def case(name: str, wasm: bytes, error: str) -> HostileWasm:
        return HostileWasm(name, wasm, "upload", error)

    yield case("no bytes", b"", "not Wasm")
    yield case("a text", b"not Wasm at all", "not Wasm")
    yield case("the text format", b"(module)", "not Wasm")
    yield case("a native program", b"\x7fELF" + bytes(100), "not Wasm")
    yield case("only the magic number", b"\0asm", "the module cannot be used")
    yield case("another version", b"\0asm\x02\0\0\0", "the module cannot be used")
    yield case("a component", b"\0asm\x0d\0\x01\0", "the module cannot be used")
    yield case("nothing", b"\0asm\x01\0\0\0", "does not export memory, aici_init, aici_create")
    for n in (9, len(GOOD) // 4, len(GOOD) // 2, len(GOOD) - 1):
        yield case(f"cut after {n} bytes", GOOD[:n], "the module cannot be used|does not export")
    yield case("bytes after the end", GOOD + b"\xff\xff", "the module cannot be used")
    yield case("a section of 4 GiB", GOOD + b"\0\xff\xff\xff\xff\x0f", "the module cannot be used")
    yield case("sections in another order", GOOD + GOOD[8:], "the module cannot be used")
    for name in EXPORTS:
        yield case(f"without {name}", controller(left_out=name), f"does not export {name}")
        yield case(f"{name} of another type", _other_signature(name), f"exports {name} with another type")
    yield case("without memory", text_module("(memory 1)"), "does not export memory")
    yield case("memory is a function", text_module('(func (export "memory"))'), "memory is not a memory")
    yield case(
        "memory is a global", text_module('(global (export "memory") i32 (i32.const 0))'), "memory is not a memory"
    )
    yield case(
        "aici_panic of another type", text_module(MEMORY + '(func (export "aici_panic") (param i32))'), "aici_panic"
    )
    yield case("an export twice", _twice(), "the module cannot be used")
    yield case("a name that the host uses", text_module(MEMORY + '(func (export "uma_trio.start"))'), "are taken")
    yield case("imported memory", text_module('(import "env" "memory" (memory 1))'), "is not a function")
    yield case("an imported table", text_module('(import "env" "t" (table 1 funcref))'), "is not a function")
    yield case("an imported global", text_module('(import "env" "g" (global i32))'), "is not a function")
    yield case("an unknown import module", text_module('(import "evil" "f" (func)) ' + MEMORY), "imports evil.f")
    yield case("an unknown function", text_module('(import "env" "aici_host_exec" (func)) ' + MEMORY), "aici_host_exec")
    socket = f'(import "{WASI}" "sock_open" (func (param i32 i32 i32) (result i32))) {MEMORY}'
    yield case("WASI's sockets", text_module(socket), "sock_open")
    other = f'(import "{ENV}" "aici_host_stop" (func (param i32))) {MEMORY}'
    yield case("an import of another type", text_module(other), "aici_host_stop with another type")
    vector = f'(import "{ENV}" "aici_host_stop" (func (param v128))) {MEMORY}'
    yield case("an import with a vector", text_module(vector), "aici_host_stop with another type")
    yield case("threads", text_module('(memory (export "memory") 1 1 shared)'), "the module cannot be used")
    yield case("two memories", text_module(MEMORY + "(memory 1)"), "multiple memories")
    yield case("memory of 64 bits", text_module('(memory (export "memory") i64 1)'), "the module cannot be used")
    yield case("tail calls", text_module(MEMORY + "(func $f (return_call $f))"), "the module cannot be used")
    yield case("references", text_module(MEMORY + "(func (param externref))"), "the module cannot be used")
    yield case("exceptions", text_module(MEMORY + "(tag)"), "the module cannot be used")
    yield case("relaxed SIMD", text_module(MEMORY + _RELAXED), "the module cannot be used")
    yield case("1 GiB of memory", text_module('(memory (export "memory") 16384)'), "1024 MiB of memory; at most 64")
    yield case("4 GiB of memory", text_module('(memory (export "memory") 65536)'), "4096 MiB of memory; at most 64")
    yield case(
        "1000 mutable globals", text_module(MEMORY + "(global (mut i32) (i32.const 0))" * 1000), "1000 mutable globals"
    )
    many = "".join(f'(func (export "f{n}"))' for n in range(5000))
    yield case("5000 exports", text_module(MEMORY + many), "exports 5007 things")
    yield case("three tables", text_module(MEMORY + "(table 1 funcref)" * 3), "the module cannot be used")
    yield case(
        "200,000 table elements",
        text_module(MEMORY + "(table 200000 funcref)"),
        "table minimum size of 200000 elements exceeds",
    )
    yield case(
        "data beyond the memory", text_module(MEMORY + '(data (i32.const 70000) "x")'), "instantiated: .*out of bounds"
    )
    yield case("60,000 variables", text_module(MEMORY + f"(func (local {'i32 ' * 60_000}))"), "too many locals")


_RELAXED: Final = "(func (param v128) (result v128) (i8x16.relaxed_swizzle (local.get 0) (local.get 0)))"


def _twice() -> bytes:
    """A module with two exports of one name, which the text format refuses: both are renamed from other names."""
    wasm = text_module(MEMORY + '(func (export "same-1")) (func (export "same-2"))')
    return wasm.replace(b"same-2", b"same-1")


REFUSED: Final = [*_refused()]
"""Refused at the upload.  ``compiles_too_long`` is another one, which takes ten seconds."""


def compiles_too_long() -> HostileWasm:
    wasm = text_module(MEMORY + merging_blocks(500, 10_000))
    return HostileWasm("a function that takes too long to compile", wasm, "upload", "takes longer than 10 s|memory")


# -- what the callbacks do ---------------------------------------------------------------------------

GROW: Final = "(loop $more (drop (memory.grow (i32.const 16))) (br $more))"
RECURSION: Final = "(func $deeper (call $deeper))"
STORE_TEXT: Final = "(i32.store8 (i32.const {at}) (i32.const {byte}))"


def _storing(data: bytes, at: int) -> str:
    return "".join(STORE_TEXT.format(at=at + n, byte=byte) for n, byte in enumerate(data))


def _in_each(name: str, body: str, error: str, more: str = "", *, is_slow: bool = False) -> Iterator[HostileWasm]:
    """The same in each callback; ``{callback}`` in the error is its name."""
    for callback, export in CALLBACKS.items():
        tail = USUAL[callback]
        wasm = controller(**{callback: f"{body} {tail}"}, more=more, memory=ROOM)
        yield HostileWasm(
            f"{name} in {export}",
            wasm,
            _where(callback),
            error.replace("{callback}", export),
            is_slow=is_slow,
        )


def started(body: str) -> bytes:
    """A controller whose start function does ``body``."""
    return controller(more=f"(func $begin {body}) (start $begin)", memory=ROOM)


def _bad_results() -> Iterator[HostileWasm]:
    """Results that are none."""
    texts = {
        "no JSON": "{",
        "nothing": "",
        "an array": "[]",
        "a number": "17",
        "only a NUL": "\0",
        "NaN": '{"num_forks": NaN}',
        "deep": '{"num_forks":' + "[" * 3000,
    }
    for callback in ("prompt", "pre", "mid", "post"):
        for name, text in texts.items():
            wasm = controller(**{callback: returning(text)}, memory=ROOM)
            error = f"{CALLBACKS[callback]} returned a wrong result"
            yield HostileWasm(f"{CALLBACKS[callback]} returns {name}", wasm, _where(callback), error)
        wasm = controller(**{callback: _storing(b'{"\xff":"\xc0"', 1024) + _RETURN_10}, memory=ROOM)
        yield HostileWasm(f"{CALLBACKS[callback]} returns no UTF-8", wasm, _where(callback), "a wrong result")
        wasm = controller(**{callback: ""}, memory=ROOM)
        yield HostileWasm(f"{CALLBACKS[callback]} returns nothing", wasm, _where(callback), "result not called")
    wrong_fields = {
        "pre": [
            {**PRE, "num_forks": -1},
            {**PRE, "num_forks": 2**32},
            {**PRE, "num_forks": 10**30},
            {**PRE, "num_forks": 1.5},
            {**PRE, "num_forks": None},
            {**PRE, "suspend": 1},
            {**PRE, "ff_tokens": [-1]},
            {**PRE, "ff_tokens": 3},
            {"suspend": False, "ff_tokens": []},
        ],
        "mid": [
            "Other",
            {"Splice": {"backtrack": -1, "ff_tokens": [1]}},
            {"Splice": {"backtrack": 10**20, "ff_tokens": [1]}},
            {"Splice": {"backtrack": 0, "ff_tokens": None}},
            {"Splice": None},
            {"Splice": {"backtrack": 0, "ff_tokens": [1]}, "SampleWithBias": {}},
            {},
        ],
        "post": [{"stop": 1}, {"stop": None}, {"stop": "true"}, {}],
    }
    for callback, results in wrong_fields.items():
        for result in results:
            text = json.dumps(result)
            wasm = controller(**{callback: returning(text)}, memory=ROOM)
            error = "wrong result|must return one of"
            yield HostileWasm(f"{CALLBACKS[callback]} returns {text}", wasm, _where(callback), error)
    tokens = returning({**PRE, "ff_tokens": [4_000_000_000]})
    yield HostileWasm("a token of no vocabulary", controller(pre=tokens), "pre", "ff_token out of range")
    rounds = controller(pre=returning({**PRE, "ff_tokens": [3]}))
    yield HostileWasm("tokens without end", rounds, "pre", "too many ff_tokens rounds")


_RETURN_10: Final = "(call $aici_host_return_process_result (i32.const 1024) (i32.const 10))"


def _calls() -> Iterator[HostileWasm]:
    """Wrong calls of the host, in pre."""

    def case(name: str, body: str, error: str, callback: str = "pre", more: str = "") -> HostileWasm:
        wasm = controller(**{callback: f"{body} {USUAL[callback]}"}, more=more, memory=ROOM)
        return HostileWasm(name, wasm, _where(callback), error)

    result = "(call $aici_host_return_process_result (i32.const {at}) (i32.const {size}))"
    beyond = "are not in the memory"
    yield case("a result beyond the memory", result.format(at=262143, size=2), beyond)
    yield case("a result around the end", result.format(at=-1, size=2), beyond)
    yield case("a result of 4 GiB", result.format(at=0, size=-1), "the result has 4294967295 bytes; at most")
    yield case("a result of 2 MiB", result.format(at=0, size=2 << 20), "the result has 2097152 bytes; at most")
    mask = "(call $aici_host_return_logit_bias (i32.const {at}))"
    yield case("a mask in pre", mask.format(at=0), "a mask can be returned in mid_process only")
    yield case("a mask in post", mask.format(at=0), "a mask can be returned in mid_process only", "post")
    yield case("a mask in init", mask.format(at=0), "a mask can be returned in mid_process only", "init")
    yield case("a mask beyond the memory", mask.format(at=262144), beyond, "mid")
    yield case("a mask at -1", mask.format(at=-1), beyond, "mid")
    read = "(drop (call $aici_host_read_blob (i32.const {blob}) (i32.const {at}) (i32.const {size})))"
    yield case("an unknown blob", read.format(blob=99, at=0, size=10), "invalid blob id 99")
    yield case("blob -1", read.format(blob=-1, at=0, size=10), "invalid blob id 4294967295")
    yield case("the trie beyond the memory", read.format(blob=100, at=262140, size=100), beyond)
    store = "(drop (call $aici_host_storage_cmd (i32.const {at}) (i32.const {size})))"
    yield case("a storage command beyond the memory", store.format(at=262144, size=1), beyond)
    yield case("a storage command of 4 GiB", store.format(at=0, size=-1), "the storage command has 4294967295 bytes")
    for name, text in {
        "no JSON": "{",
        "an unknown one": '{"Delete":{"name":"a"}}',
        "two": '{"ReadVar":{"name":"a"},"WriteVar":{"name":"a","value":"","op":"Set"}}',
        "no hexadecimal digits": '{"WriteVar":{"name":"a","value":"xy","op":"Set"}}',
        "an unknown operation": '{"WriteVar":{"name":"a","value":"","op":"Drop"}}',
        "a name that is not a text": '{"ReadVar":{"name":3}}',
    }.items():
        body = _storing(text.encode(), 8192) + store.format(at=8192, size=len(text))
        yield case(f"a storage command: {name}", body, "storage command: ")
    write = "(drop (call $fd_write (i32.const 1) (i32.const {at}) (i32.const {n}) (i32.const 0)))"
    yield case("output from beyond the memory", write.format(at=262144, n=1), beyond)
    yield case("output of a billion parts", write.format(at=0, n=1 << 30), "fd_write of 1073741824 buffers; at most")
    huge = "(i32.store (i32.const 0) (i32.const -16)) (i32.store (i32.const 4) (i32.const -1))"
    yield case("output of 4 GiB", huge + write.format(at=0, n=1), beyond)
    yield case("aici_host_stop", "(call $aici_host_stop)", re.escape("*** aici_host_stop()"))
    yield case("proc_exit", "(call $proc_exit (i32.const 3))", "proc_exit: 3")
    panic = '(func (export "aici_panic") {})'
    bad_blob = read.format(blob=99, at=0, size=10)
    yield case("a trap in aici_panic", bad_blob, "invalid blob id 99", more=panic.format("unreachable"))
    yield case("an error in aici_panic", bad_blob, "invalid blob id 99", more=panic.format(bad_blob))
    deep = panic.format("(call $deeper)") + RECURSION
    yield case("endless recursion in aici_panic", bad_blob, "invalid blob id 99", more=deep)
    # variables without end: "a" grows by 32 KiB in each round
    command = '{"WriteVar":{"op":"Append","name":"a","value":"'
    text = _storing(command.encode(), 8192)
    at, size = 8192 + len(command), 64 << 10
    text += f"(memory.fill (i32.const {at}) (i32.const 48) (i32.const {size})){_storing(b'}}', at + size + 1)}"
    text += f"(i32.store8 (i32.const {at + size}) (i32.const 34))"
    append = store.format(at=8192, size=len(command) + size + 3)
    yield case("variables without end", text + f"(loop $more {append} (br $more))", "the variables of a request")


TRAPS: Final = {
    "unreachable": ("unreachable", "unreachable"),
    "a division by zero": ("(drop (i32.div_u (i32.const 1) (i32.const 0)))", "divide by zero"),
    "a read beyond the memory": ("(drop (i32.load (i32.const -4)))", "out of bounds memory access"),
    "a call of nothing": ("(call_indirect $none (type $nothing) (i32.const 0))", "uninitialized element"),
    "endless recursion": ("(call $deeper)", "call stack exhausted"),
    "no end of memory": (GROW, "out of memory"),
}
_MORE: Final = f"(type $nothing (func)) (table $none 1 funcref) {RECURSION}"


def _traps() -> Iterator[HostileWasm]:
    for name, (body, error) in TRAPS.items():
        yield from _in_each(name, body, "{callback}: .*" + error, more=_MORE)
    yield HostileWasm(
        "a trap in the start function", started("unreachable"), "init", "the start function: .*unreachable"
    )


def _loops() -> Iterator[HostileWasm]:
    yield from _in_each("a loop", LOOP, "timeout: {callback} took too long", is_slow=True)
    start = started(LOOP)
    yield HostileWasm("a loop in the start function", start, "init", "timeout: the start function took", is_slow=True)
    call = "(loop $forever (drop (call $aici_host_eos_token)) (br $forever))"
    for callback in ("pre", "mid", "post"):
        error = f"timeout: {CALLBACKS[callback]} took too long"
        printed = f"(loop $forever {printing('again and again')} (br $forever))"
        for name, body in (("calls", call), ("output", printed)):
            yield HostileWasm(
                f"{name} without end in {CALLBACKS[callback]}",
                controller(**{callback: body}),
                _where(callback),
                error,
                is_slow=True,
            )
    panic = f'(func (export "aici_panic") {LOOP})'
    bad_blob = "(drop (call $aici_host_read_blob (i32.const 99) (i32.const 0) (i32.const 0)))"
    yield HostileWasm(
        "a loop in aici_panic", controller(pre=bad_blob, more=panic), "pre", "invalid blob id", is_slow=True
    )


FAILING: Final = [*_traps(), *_bad_results(), *_calls()]
"""Fail at once."""
LOOPING: Final = [*_loops()]
"""Fail after a limit of time."""


# -- calls with all kinds of numbers -----------------------------------------------------------------

NUMBERS: Final = (0, 1, 4, 1024, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
"""Around the ends of a memory of 256 KiB and of the address space."""
_DIGITS: Final = "0123456789ab"


def caller(module: str, function: str) -> bytes:
    """A controller that calls a function of the host in mid; each digit of its argument chooses one of ``NUMBERS``."""
    parameters, results = IMPORTS[module][function]
    table = 512
    values = "".join(f"(i64.store (i32.const {table + 8 * n}) (i64.const {value}))" for n, value in enumerate(NUMBERS))
    digits = [f"(i32.load8_u (i32.const {256 + n}))" for n in range(len(parameters))]
    loads = []
    for kind, digit in zip(parameters, digits, strict=True):
        index = f"(i32.sub {digit} (select (i32.const 87) (i32.const 48) (i32.ge_u {digit} (i32.const 97))))"
        load = f"(i64.load (i32.add (i32.const {table}) (i32.mul (i32.const 8) {index})))"
        loads.append(load if kind == "I" else f"(i32.wrap_i64 {load})")
    call = f"(call ${function} {' '.join(loads)})"
    call = f"(drop {call})" if results else call
    read = "(drop (call $aici_host_read_blob (call $aici_host_module_arg) (i32.const 256) (i32.const 16)))"
    return controller(mid=values + read + call + returning(MID), memory=ROOM)


def arguments(module: str, function: str, n: int) -> list[str]:
    """Arguments for ``caller``: all combinations, or ``n`` of them."""
    n_parameters = len(IMPORTS[module][function][0])
    if len(_DIGITS) ** n_parameters <= n:
        return ["".join(each) for each in itertools.product(_DIGITS, repeat=n_parameters)]
    rng = random.Random(function)
    return ["".join(rng.choices(_DIGITS, k=n_parameters)) for _ in range(n)]


def importing(functions: Sequence[tuple[str, str]]) -> str:
    """Imports, in the text format."""
    return "".join(host_function(module, name) for module, name in functions)
