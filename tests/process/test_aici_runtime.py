"""The runtime of controllers in a process of its own, as the scheduler sees it: it passes the contract of the fake one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support import real_daemon
from tests.support.documents import ROOT
from tests.support.profile import thorough
from tests.support.runtime_contract import *  # noqa: F403
from tests.support.runtime_contract import SCRIPTS
from tests.support.wat_controllers import MID, PRE, controller, returning
from uma_trio.aici_link.messages import Auth, MidOp, PostOp, PreOp
from uma_trio.config import Aici
from uma_trio.daemon.aici import link
from uma_trio.daemon.aici.link import RuntimeStart
from uma_trio.daemon.aici.supervisor import SupervisedRuntime
from uma_trio.errors import ControllerFailed, ControllerNotFound, ControllerUnavailable
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.vocabulary import vocabulary

pytestmark = [
    pytest.mark.skipif(real_daemon.missing() is not None, reason=str(real_daemon.missing())),
    pytest.mark.usefixtures("forked_children"),
]

ADMIN = Auth("tests", is_admin=True)
N_ROWS = 8


async def test_tags_of_controllers_that_come_with_uma_trio_stay_theirs(runtime):
    tags = {each.tag: each.module_id for each in await runtime.get_tags(ADMIN)}
    with pytest.raises(ControllerFailed, match="jsctrl is a controller that comes with uma-trio; choose another tag"):
        await runtime.set_tags(tags["yesno"], ["mine", "jsctrl"], ADMIN)
    assert {each.tag: each.module_id for each in await runtime.get_tags(ADMIN)} == tags


async def test_a_folder_that_cannot_be_used_takes_only_uploads_away(nursery: trio.Nursery, tmp_path: Path) -> None:
    (folder := tmp_path / "aici").write_text("no folder")
    start = runtime_start(folder)
    runtime = SupervisedRuntime(start, max_tokens=1 << 16)
    nursery.start_soon(runtime.run)
    await runtime.instantiate("one", "jsctrl", "start(async () => {})", [1])
    with pytest.raises(ControllerUnavailable, match="cannot be"):
        await runtime.make_module(modules(start.n_vocab)["everything"], ADMIN)
    folder.unlink()
    module_id = (await runtime.make_module(modules(start.n_vocab)["everything"], ADMIN)).module_id
    await runtime.instantiate("two", module_id, None, [1], ADMIN)
    assert runtime.restarts == 0


async def test_a_runtime_of_another_make_gets_shipped_controllers_when_it_can_take_them(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    script = ROOT / "tests" / "support" / "other_runtime.py"
    program = tmp_path / "aicirt"
    program.write_text(f'#!/bin/sh\nFAILING_UPLOADS=3 exec "{sys.executable}" "{script}" "$@"\n')
    program.chmod(0o700)
    runtime = SupervisedRuntime(runtime_start(tmp_path, executable=program), max_tokens=1 << 16)
    nursery.start_soon(runtime.run)
    await runtime.instantiate("one", "digits", [5], [1])
    assert [each.tag for each in await runtime.get_tags()] == []
    with pytest.raises(ControllerNotFound):  # its one controller is digits, but the upload has worked
        await runtime.instantiate("two", "jsctrl", "", [1])
    assert [(each.tag, each.updated_by) for each in await runtime.get_tags()] == [("jsctrl", "uma-trio")]
    assert runtime.restarts == 0


# -- a runtime that breaks the protocol -------------------------------------------------------------


@pytest.fixture
def breaking(nursery: trio.Nursery, tmp_path: Path) -> Callable[[str, str], SupervisedRuntime]:
    """Makes a runtime of another make whose answers to one operation are wrong."""

    def make(op: str, how: str) -> SupervisedRuntime:
        script = ROOT / "tests" / "support" / "other_runtime.py"
        program = tmp_path / "aicirt"
        program.write_text(f'#!/bin/sh\nBREAKS="{op}:{how}" exec "{sys.executable}" "{script}" "$@"\n')
        program.chmod(0o700)
        runtime = SupervisedRuntime(runtime_start(tmp_path, executable=program, init_ms=100), max_tokens=1 << 16)
        nursery.start_soon(runtime.run)
        return runtime

    return make


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", "not an answer of an AICI runtime"),
        ("nonsense", "not an answer of an AICI runtime"),
        ("wrong data", "not an answer of an AICI runtime"),
        ("wrong type", "its type is 'maybe'"),
        ("too long", "it writes a message of 4294967280 bytes"),
    ],
)
async def test_a_step_whose_answer_is_wrong_ends_the_runtime(breaking, how: str, reason: str) -> None:
    runtime = breaking("mid_process", how)
    for restarts in range(2):  # the next one serves again, up to the same step
        await runtime.instantiate("one", "digits", [5], [1])
        before = runtime.post_pre([], [PreOp(1, "one")], [])
        assert await before.wait(60), "the runtime hangs"
        assert not before.failure
        assert (runtime.generation, runtime.restarts) == (restarts + 1, restarts)
        step = runtime.mid([MidOp(1)])
        assert await step.wait(60), "the runtime hangs"
        assert reason in step.failure
        while runtime.restarts == restarts:
            await trio.sleep(0.01)
        assert reason in runtime.reason


async def test_a_step_that_the_runtime_refuses_fails_alone(breaking) -> None:
    runtime = breaking("mid_process", "an error")
    await runtime.instantiate("one", "digits", [5], [1])
    for _ in range(2):
        step = runtime.mid([MidOp(1)])
        assert await step.wait(60)
        assert step.failure == "no idea"
    assert runtime.restarts == 0


async def test_an_answer_that_nobody_has_asked_for_ends_the_runtime(breaking) -> None:
    runtime = breaking("mid_process", "twice")
    await runtime.instantiate("one", "digits", [5], [1])
    before = runtime.post_pre([], [PreOp(1, "one")], [])
    assert await before.wait(60)
    step = runtime.mid([MidOp(1)])
    assert await step.wait(60)
    assert not step.failure, "the first answer is right"
    while runtime.is_usable:
        await trio.sleep(0.01)
    assert runtime.reason == "it answers what nobody has asked"


@pytest.mark.parametrize(
    ("op", "how", "reason"),
    [
        ("ping", "an error", "no idea"),
        ("ping", "wrong data", "not an answer of an AICI runtime"),
        ("tokens", "no words", "it has 0 tokens"),
    ],
)
async def test_a_runtime_that_breaks_the_handshake_is_not_used(breaking, op: str, how: str, reason: str) -> None:
    runtime = breaking(op, how)
    with pytest.raises(ControllerUnavailable, match=reason):
        await runtime.instantiate("one", "digits", [5], [1])
    assert not runtime.is_usable


@pytest.mark.parametrize("how", ["wrong data", "wrong type", "an error"])
async def test_a_call_whose_answer_is_wrong_fails_alone(breaking, how: str) -> None:
    runtime = breaking("instantiate", how)
    for _ in range(2):
        with pytest.raises(ControllerUnavailable, match=r"not an answer of an AICI runtime|no idea"):
            await runtime.instantiate("one", "digits", [5], [1])
    assert (runtime.is_usable, runtime.restarts) == (True, 0)


async def test_an_answer_to_a_call_of_nobody_is_passed_over(breaking) -> None:
    runtime = breaking("instantiate", "a stranger")
    await runtime.instantiate("one", "digits", [5], [1])
    await runtime.instantiate("two", "digits", [5], [1])
    assert runtime.restarts == 0


async def test_a_call_whose_answer_cannot_be_read_waits_for_the_watchdog(breaking, monkeypatch) -> None:
    """The rest of the side channel goes on meanwhile: nobody knows which call it was."""
    runtime = breaking("instantiate", "cut")
    await runtime.get_tags()
    monkeypatch.setattr(link, "SIDE_S", 1.0)
    monkeypatch.setattr(link, "HANG_S", 1.0)
    with pytest.raises(ControllerUnavailable, match="no answer for"):
        await runtime.instantiate("one", "digits", [5], [1])


async def test_a_message_that_does_not_fit_ends_the_runtime(breaking) -> None:
    runtime = breaking("", "")
    await runtime.instantiate("one", "digits", [5], [1])
    step = runtime.post_pre([PostOp(1, [123456789] * 4_000_000)], [], [])
    assert await step.wait(60)
    assert "cannot send PostPreProcess: a message of" in step.failure


def splice(backtrack: int, *tokens: int) -> str:
    return returning({"Splice": {"backtrack": backtrack, "ff_tokens": [*tokens]}})


def allowing_all(n_vocab: int) -> str:
    """Instructions that allow every token."""
    n_bytes = 4 * ((n_vocab + 31) // 32)
    fill = f"(memory.fill (i32.const 65536) (i32.const 255) (i32.const {n_bytes}))"
    return fill + "(call $aici_host_return_logit_bias (i32.const 65536))" + returning(MID)


def modules(n_vocab: int) -> dict[str, bytes]:
    """The controllers of the contract's ``SCRIPTS``, in Wasm."""
    more: dict[str, dict[str, str]] = {
        "everything": {},
        "only-seven": {
            "mid": "(i32.store (i32.const 8192) (i32.const 128))"
            "(call $aici_host_return_logit_bias (i32.const 8192))" + returning(MID)
        },
        "suspends": {"pre": returning({**PRE, "suspend": True})},
        "forks": {"pre": returning({**PRE, "num_forks": 3})},
        "ends": {"pre": returning({**PRE, "num_forks": 0})},
        "stops": {"post": returning({"stop": True})},
        "appends": {"mid": splice(0, 7, 8, 9)},
        "backtracks": {"mid": splice(2, 7, 8)},
        "allows-the-end": {"mid": returning('"Stop"')},
        "fails": {"mid": "unreachable"},
        "asks-for-too-much": {"mid": splice(0, 4_000_000_000)},
    }
    assert more.keys() == SCRIPTS.keys()
    everything = allowing_all(n_vocab)
    return {
        name: controller(**{"mid": everything, **callbacks}, memory='(memory (export "memory") 4)')
        for name, callbacks in more.items()
    }


def runtime_start(folder: Path, **settings: Any) -> RuntimeStart:
    with vocabulary(EMBEDDED) as tokenizer:
        n_vocab = tokenizer.n_tokens
    settings = {"step_ms": 10_000, "init_ms": 10_000, "skip_ms": 0, **settings}  # a machine may be busy with tests
    return RuntimeStart(Aici(**settings), EMBEDDED, folder, n_vocab, N_ROWS, 16 << 20, expire_s=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runtimes of all tests keep modules, so that each module is compiled once."""
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(params=[thorough(False), True], ids=["semaphores", "futexes"])
async def runtime(request: pytest.FixtureRequest, folder: Path, nursery: trio.Nursery) -> SupervisedRuntime:
    start = runtime_start(folder, futex=request.param)
    made = SupervisedRuntime(start, max_tokens=1 << 16)
    nursery.start_soon(made.run)
    known = {info.tag for info in await made.get_tags()}
    for name, wasm in modules(start.n_vocab).items():
        if name not in known:
            module_id = (await made.make_module(wasm, ADMIN)).module_id
            await made.set_tags(module_id, [name], ADMIN)
    return made


@pytest.fixture
async def module_id(runtime: SupervisedRuntime) -> str:
    return next(info.module_id for info in await runtime.get_tags() if info.tag == "everything")


@pytest.fixture
def kill(runtime: SupervisedRuntime) -> Callable[[], None]:
    def end() -> None:
        os.kill(runtime.snapshot()["pid"], signal.SIGKILL)

    return end
