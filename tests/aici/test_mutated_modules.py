"""Modules with damage of all kinds: refused with a reason, or run within their limits.

The thorough profile tries 20,000 of them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
import wasmtime
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from tests.support.hostile_wasm import GOOD, GROW, ROOM, started
from tests.support.profile import amount
from tests.support.wat_controllers import MID, POST, PRE, Words, controller, printing, returning
from uma_trio.aici.controllers import shipped
from uma_trio.aici.runtime.compiler import compile_module, make_engine
from uma_trio.aici.runtime.controller import Controller
from uma_trio.aici.runtime.host import WasmHost
from uma_trio.aici.runtime.instrument import NotReadable, instrument
from uma_trio.aici.runtime.interface import ALLOWED, DISALLOWED, BadModule, ControllerError, ControllerTimeout, Limits
from uma_trio.aici.runtime.variables import Variables

MAX_MEMORY: Final = 16
EXAMPLES: Final = amount(quick=100, thorough=20_000)

MANY_THINGS: Final = controller(
    more="""
      (type $unary (func (param i32) (result i32)))
      (global $i (mut i32) (i32.const 3)) (global $I (mut i64) (i64.const -3)) (global $f (mut f64) (f64.const 1.5))
      (global $constant i32 (i32.const 40000))
      (table $functions 4 8 funcref) (elem (i32.const 1) $double $grow)
      (data (i32.const 300) "some text") (data $passive "more text")
      (func $double (type $unary) (i32.mul (local.get 0) (i32.const 2)))
      (func $grow (type $unary) (memory.grow (local.get 0)))
      (func $choose (param i32) (result i32)
        (block $c (block $b (block $a (br_table $a $b $c (local.get 0)))
          (return (call_indirect (type $unary) (i32.const 9) (i32.const 1)))) (return (i32.const 5)))
        (i32.trunc_sat_f64_s (global.get $f)))
      (func $vector (result i32)
        (i8x16.extract_lane_s 3 (i8x16.add (v128.const i32x4 1 2 3 4) (v128.load (i32.const 300)))))
      (func $many (export "many") (result i32 i64) (i32.const 1) (i64.const 2))
      (func (export "shuffle") (param v128 v128) (result v128) (i8x16.swizzle (local.get 0) (local.get 1)))
    """,
    pre="""
      (memory.init $passive (i32.const 500) (i32.const 0) (i32.const 4)) (data.drop $passive)
      (memory.copy (i32.const 600) (i32.const 500) (i32.const 4)) (memory.fill (i32.const 700) (i32.const 1) (i32.const 9))
      (global.set $i (i32.add (call $choose (i32.const 1)) (call $vector)))
      (global.set $I (i64.extend_i32_u (call $choose (i32.const 0))))
      (global.set $f (f64.add (global.get $f) (f64.promote_f32 (f32.const 0.5))))
      (drop (call_indirect (type $unary) (i32.const 1) (i32.const 2)))
      (call $many) drop drop
      (loop $l (br_if $l (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 20))))
      (drop (memory.grow (i32.const 2)))
    """
    + returning(PRE),
    mid="(i32.store (i32.const 2000) (i32.const 77)) (call $aici_host_return_logit_bias (i32.const 2000))"
    + returning(MID),
    post=printing("post") + returning(POST),
    memory=ROOM,
)
BASES: Final = {"good": GOOD, "many": MANY_THINGS, "growing": started(GROW)}
BASES.update((name, shipped()[name]) for name in ("yesno", "uppercase"))

ALIKE: Final = (range(0x6A, 0x79), range(0x46, 0x50), range(0x28, 0x36), range(0x7C, 0x8B), range(0x20, 0x25))
"""Instructions that can take each other's place: arithmetic, comparisons, loads, variables."""


RARE: Final = ("flip", "replace", "delete", "repeat", "cut", "swap", "zero")
COMMON: Final = ("instruction", "number")
"""These leave most modules valid."""


def mutated(wasm: bytes, seed: int, n: int) -> bytes:
    """The module with ``n`` changes.  They are spread evenly, unlike what hypothesis would choose itself."""
    data, rng = bytearray(wasm), random.Random(seed)
    for _ in range(n):
        at, value = rng.randrange(len(data)), rng.randrange(256)
        end = at + rng.randrange(1, 64)
        match rng.choice(RARE if rng.random() < 0.2 else COMMON):
            case "flip":
                data[at] ^= 1 << value % 8
            case "replace":
                data[at] = value
            case "instruction":
                at = _next(data, at)
                group = next((group for group in ALIKE if data[at] in group), range(data[at], data[at] + 1))
                data[at] = group[value % len(group)]
            case "number":  # keeps the length of a LEB128 number
                data[at] = data[at] & 0x80 | value & 0x7F
            case "delete":
                del data[at:end]
            case "repeat":
                data[at:at] = data[at:end]
            case "cut":
                del data[max(8, at) :]
            case "swap":
                data[at:end] = data[at:end][::-1]
            case "zero":
                data[at:end] = bytes(len(data[at:end]))
        if len(data) < 8:
            break
    return bytes(data)


def _next(data: bytearray, at: int) -> int:
    """Where the next byte is that may be one of ``ALIKE``."""
    for n in range(len(data)):
        if any(data[(at + n) % len(data)] in group for group in ALIKE):
            return (at + n) % len(data)
    return at


@pytest.fixture(scope="module")
def host() -> Iterator[WasmHost]:
    found = WasmHost(Words(), Limits(max_memory_mb=MAX_MEMORY))
    yield found
    found.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[wasmtime.Engine]:
    found = make_engine()
    yield found
    found.close()


@given(st.sampled_from([*BASES]), st.integers(0, 2**64 - 1), st.integers(1, 5))
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@example("good", 0, 0)
@example("many", 0, 0)
@example("growing", 0, 0)
@example("yesno", 0, 0)
@example("uppercase", 0, 0)
def test_mutated_modules(host: WasmHost, engine: wasmtime.Engine, name: str, seed: int, n: int) -> None:
    wasm = mutated(BASES[name], seed, n)
    if is_valid(engine, wasm) and (changed := instrumented(wasm)) is not None:
        event("valid")
        assert is_valid(engine, changed), "the changes have broken it"
    try:
        compiled = compile_module(wasm, engine, MAX_MEMORY << 20)
    except BadModule as error:
        assert n, "it was good"
        said = str(error)
        event("refused")
    else:
        said = ended(host.instantiate(host.load(compiled), "text", Variables()))
    assert len(said) < 5000


def ended(controller: Controller) -> str:
    """Runs a controller; returns the error with which it ended."""
    said = ""
    try:
        run(controller)
        event("ran")
    except (ControllerError, ControllerTimeout) as error:
        said = str(error)
        assert said
        event("failed")
    assert len(controller.take_logs().encode()) <= 3 * (64 << 10)
    controller.close()
    return said


def is_valid(engine: wasmtime.Engine, wasm: bytes) -> bool:
    try:
        wasmtime.Module.validate(engine, wasm)
    except wasmtime.WasmtimeError:
        return False
    return True


def instrumented(wasm: bytes) -> bytes | None:
    try:
        return instrument(wasm)
    except NotReadable:
        return None


def run(controller: Controller) -> None:
    """All callbacks.  A fork does the same as its parent."""
    controller.start([1, 2], deadline=soon())
    controller.assign(3)
    controller.pre_process(deadline=soon())
    try:
        fork = controller.fork(3)
    except ControllerError as error:
        assert "it cannot be forked" in str(error)  # noqa: PT017
        step(controller)
        return
    with contextlib.closing(fork):
        (action, row), (of_fork, row_of_fork) = step(controller), step(fork)
    if ControllerTimeout not in (action, of_fork):  # the machine may be busy in one of the two
        assert action == of_fork
        assert np.array_equal(row, row_of_fork)


def step(controller: Controller) -> tuple[object, np.ndarray]:
    """What a controller wants in mid, and the biases."""
    row = np.full(Words().n_vocab, np.nan, np.float32)
    action: object
    try:
        action = controller.mid_process([3], row, deadline=soon())
        controller.post_process([5], 0, deadline=soon())
    except (ControllerError, ControllerTimeout) as error:
        action = type(error)
    assert set(np.unique(row)) <= {ALLOWED, DISALLOWED}
    return action, row


def soon() -> float:
    """Long enough for what ends, on a busy machine."""
    return time.monotonic() + 0.5
