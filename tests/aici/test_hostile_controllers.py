"""Hostile controllers in the runtime, driven from outside: each has its own error, and its neighbours their masks."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from tests.support.aici_client import ADMIN, Engine
from tests.support.hostile_wasm import (
    FAILING,
    LOOP,
    LOOPING,
    REFUSED,
    ROOM,
    HostileWasm,
    arguments,
    caller,
    compiles_too_long,
    with_custom_section,
)
from tests.support.profile import amount, sampled
from tests.support.wat_controllers import MID, POST, PRE, controller, printing, returning
from uma_trio.aici.runtime.signatures import CONSTRAINT, IMPORTS

ids = itertools.count(1)

MAX_RESIDENT = 700 << 20
"""Memory of the runtime after all of this.  It begins with about 150 MiB."""

COUNTING = controller(
    # allows the token whose number is that of the step, modulo 16
    more="(global $step (mut i32) (i32.const 0))",
    mid="(i32.store (i32.const 8192) (i32.shl (i32.const 1) (i32.and (global.get $step) (i32.const 15))))"
    "(call $aici_host_return_logit_bias (i32.const 8192))" + returning(MID),
    post="(global.set $step (i32.add (global.get $step) (i32.const 1)))" + returning(POST),
    memory=ROOM,
)


@attrs.define
class Neighbour:
    id: int
    n_steps: int = 0
    is_suspended: bool = False


@attrs.define
class Neighbours:
    """Sequences that do nothing wrong.  Each step checks their results and their masks.

    Args:
        may_be_late: with ``--uma-skip-slow-ms``, a controller that is late because the machine is busy gets another step.
    """

    engine: Engine
    may_be_late: bool = False
    all: list[Neighbour] = attrs.field(factory=list)

    def begin(self, n: int) -> None:
        self.all = [Neighbour(next(ids)) for _ in range(n)]
        for each in self.all:
            self._begins(each, self.engine.begin(each.id, COUNTING))

    @property
    def fewest_steps(self) -> int:
        return min(each.n_steps for each in self.all)

    def step(self, hostile: Sequence[int | tuple[int, int]] = (), posts: Sequence[dict[str, Any]] = ()) -> Steps:
        """One step of them and others: mid, then post and pre.  The others come first."""
        ready = [each for each in self.all if not each.is_suspended]
        mid = self.engine.mid(*hostile, *(each.id for each in ready))["seqs"]
        done = {}
        for n, each in enumerate(ready, len(hostile)):
            found, token = mid[str(each.id)], each.n_steps % 16
            assert (found["error"], found["result"]) == ("", None)
            if found.get("skipped"):
                assert self.may_be_late
            else:
                assert self.engine.allowed(n) == [token]
                done[each.id] = {"id": each.id, "tokens": [token]}
                each.n_steps += 1
        after = self.engine.post_pre([*posts, *done.values()])
        for id in done:
            assert (after["post_seqs"][str(id)]["error"], after["post_seqs"][str(id)]["result"]) == ("", POST)
        for each in self.all:
            self._begins(each, after["pre_seqs"][str(each.id)])
        return Steps(mid, after["post_seqs"], after["pre_seqs"])

    def _begins(self, each: Neighbour, found: dict[str, Any]) -> None:
        assert found["error"] == ""
        each.is_suspended = self.may_be_late and bool(found.get("skipped"))
        assert found["result"] == {**PRE, "suspend": each.is_suspended}


@attrs.frozen
class Steps:
    mid: dict[str, Any]
    post: dict[str, Any]
    pre: dict[str, Any]


def flags(**more: str) -> list[str]:
    """Limits of time for controllers that never end.  Neighbours have the same ones, so the machine must not stand still."""
    times = {"wasm-max-pre-step-time": "3000", "wasm-max-step-time": "3000", "wasm-max-init-time": "3000", **more}
    return [f"--{name}={value}" for name, value in times.items()]


FOREVER = {f"wasm-max-{name}-time": "60000" for name in ("pre-step", "step", "init")}
"""Limits of time that any machine keeps, however busy it is."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("hostile"), *flags(**FOREVER), json_mb=4)
    try:
        made.shake_hands()
        yield made
        resident = psutil.Process(made.process.pid).memory_info().rss
        assert resident < MAX_RESIDENT, f"{resident >> 20} MiB"
    finally:
        made.close()


@pytest.fixture(scope="module")
def neighbours(engine: Engine) -> Neighbours:
    found = Neighbours(engine)
    found.begin(3)
    return found


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Engine]:
    """An engine of the test's own."""
    with contextlib.closing(Engine(tmp_path, *flags(**FOREVER), json_mb=4)) as made:
        made.shake_hands()
        yield made


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Neighbours]]:
    """An engine for controllers that never end, and sequences next to them."""
    with contextlib.closing(Engine(tmp_path_factory.mktemp("hurried"), *flags(), json_mb=4)) as made:
        made.shake_hands()
        others = Neighbours(made)
        others.begin(3)
        yield made, others


def upload_error(engine: Engine, wasm: bytes) -> str:
    message = {"op": "mk_module", "$rid": "r", "$auth": ADMIN, "binary": base64.b64encode(wasm).decode()}
    answer = engine.side(message)
    assert (answer["type"], answer["$rid"]) == ("error", "r"), answer
    assert answer["is_user_error"] is True
    return str(answer["error"])


@pytest.mark.parametrize("hostile", sampled(REFUSED, 8), ids=str)
def test_modules_that_are_refused(engine: Engine, neighbours: Neighbours, hostile: HostileWasm) -> None:
    assert re.search(hostile.error, upload_error(engine, hostile.wasm))
    neighbours.step()


@pytest.mark.parametrize("hostile", sampled(FAILING, 8), ids=str)
def test_controllers_that_fail(engine: Engine, neighbours: Neighbours, hostile: HostileWasm) -> None:
    check_failure(engine, neighbours, hostile)


@pytest.mark.parametrize("hostile", sampled(LOOPING, 8), ids=str)
def test_controllers_that_never_end(hurried: tuple[Engine, Neighbours], hostile: HostileWasm) -> None:
    check_failure(*hurried, hostile)


def check_failure(engine: Engine, neighbours: Neighbours, hostile: HostileWasm) -> None:
    id = next(ids)
    found = fails(engine, neighbours, hostile, id)
    assert re.search(hostile.error, found, re.DOTALL), found
    assert len(found) < 100_000
    engine.post_pre(freed=[id])
    neighbours.step()
    assert str(id) not in engine.post_pre()["pre_seqs"]


def fails(engine: Engine, neighbours: Neighbours, hostile: HostileWasm, id: int) -> str:
    """The error of a controller, in the step in which it belongs; everybody else's step is as any other."""
    module_id, req_id = engine.upload(hostile.wasm), f"hostile-{id}"
    request = {"op": "instantiate", "req_id": req_id, "prompt": [1], "module_id": module_id, "$auth": ADMIN}
    answer = engine.side(request)
    if hostile.where == "init":
        assert (answer["type"], answer["is_user_error"]) == ("error", True)
        neighbours.step()
        assert engine.post_pre(new={id: req_id})["pre_seqs"][str(id)]["error"] == f"Worker: invalid req_id {req_id}"
        return str(answer["error"])
    assert answer["type"] == "ok", answer
    begun = engine.post_pre(new={id: req_id})["pre_seqs"]
    for each in neighbours.all:
        assert (begun[str(each.id)]["error"], begun[str(each.id)]["result"]) == ("", PRE)
    if hostile.where == "pre":
        neighbours.step()
        return str(begun[str(id)]["error"])
    assert begun[str(id)]["error"] == ""
    found = neighbours.step([id], [{"id": id, "tokens": [1]}])
    if hostile.where == "mid":
        return str(found.mid[str(id)]["error"])
    assert found.mid[str(id)]["error"] == ""
    return str(found.post[str(id)]["error"])


@pytest.mark.thorough
def test_a_module_that_takes_too_long_to_compile_delays_nobody(engine: Engine, neighbours: Neighbours) -> None:
    """Others go on, and begin; only uploads wait for each other."""
    hostile = compiles_too_long()
    binary = base64.b64encode(hostile.wasm).decode()
    engine.slots["cmd-side"].send(
        json.dumps({"op": "mk_module", "$rid": "slow", "$auth": ADMIN, "binary": binary}).encode()
    )
    answers: dict[str, Any] = {}

    def answer_to(rid: str) -> Any:
        while rid not in answers:
            answer = json.loads(engine.slots["resp-side"].receive())
            answers[answer["$rid"]] = answer
        return answers[rid]

    known = engine.upload_id(COUNTING)
    for n in range(20):
        request = {"op": "instantiate", "$rid": f"{n}", "$auth": ADMIN, "req_id": f"meanwhile-{n}"}
        request |= {"prompt": [1], "module_id": known}
        engine.slots["cmd-side"].send(json.dumps(request).encode())
        assert answer_to(f"{n}")["type"] == "ok", answers
        neighbours.step()
    new = {next(ids): f"meanwhile-{n}" for n in range(20)}
    engine.post_pre(new=new, freed=[*new])
    answer = answer_to("slow")
    assert (answer["type"], answer["is_user_error"]) == ("error", True)
    assert re.search(hostile.error, answer["error"])
    assert next(iter(answers)) == "0", "it was compiled before anybody else was answered"
    neighbours.step()


@pytest.mark.parametrize(
    ("module", "function"),
    sampled([(module, name) for module, names in IMPORTS.items() for name in names if names[name][0]], 8),
)
def test_all_kinds_of_numbers_to_each_import(
    engine: Engine, neighbours: Neighbours, module: str, function: str
) -> None:
    """Addresses and lengths of all kinds: the call fails with an error that says why, or the step goes on."""
    module_id = engine.upload(caller(module, function))
    errors = set()
    for batch in _batches(arguments(module, function, amount(quick=24, thorough=48)), 24):
        new = {}
        for argument in batch:
            id = next(ids)
            new[id] = f"caller-{id}"
            engine.instantiate(module_id, new[id], argument)
        assert not any(each["error"] for each in engine.post_pre(new=new)["pre_seqs"].values())
        found = neighbours.step([*new])
        errors |= {found.mid[str(id)]["error"] for id in new}
        engine.post_pre(freed=[*new])
    known = r"are not in the memory|at most|invalid blob id|proc_exit|storage command|wrong result"
    for error in errors - {""}:
        assert error.startswith("Error (mid): "), error
        assert re.search(known, error), error
    takes_addresses = any(
        each in function for each in ("read_blob", "tokenize", "return", "storage", "fd_write", "sizes_get")
    )
    if takes_addresses:
        assert any("are not in the memory" in error for error in errors)
    elif module != CONSTRAINT and function not in ("proc_exit", "fd_fdstat_get"):
        assert errors == {""}


def _batches(items: list[str], n: int) -> Iterator[list[str]]:
    for start in range(0, len(items), n):
        yield items[start : start + n]


@pytest.mark.parametrize(("kib", "warning"), [(256, ""), (257, "cannot tokenize 263168 bytes; at most 262144")])
def test_texts_to_tokenize_are_bounded(engine: Engine, neighbours: Neighbours, kib: int, warning: str) -> None:
    """Nothing interrupts the tokenizer, and other controllers wait for the interpreter while tokens are copied."""
    body = f"(drop (call $aici_host_tokenize (i32.const 65536) (i32.const {kib << 10})))"
    memory = '(memory (export "memory") 8)'
    module_id = engine.upload(controller(pre=body + returning(PRE), memory=memory))
    id = next(ids)
    engine.instantiate(module_id, f"text-{id}")
    found = engine.post_pre(new={id: f"text-{id}"})["pre_seqs"][str(id)]
    assert (found["error"], found["result"]) == ("", PRE)
    assert warning in found["logs"]
    assert bool(found["logs"]) == bool(warning)
    neighbours.step()
    engine.post_pre(freed=[id])


def test_output_floods_are_cut(engine: Engine, neighbours: Neighbours) -> None:
    """More than a megabyte of output of each callback: the last 64 KiB are kept, or as much of them as fits into the answer."""
    flood = f"""
      (memory.fill (i32.const 16384) (i32.const 1) (i32.const 60000))
      (i32.store (i32.const 0) (i32.const 16384)) (i32.store (i32.const 4) (i32.const 60000))
      (loop $more (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
        (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 20))))
      {printing("the end")}
    """
    module_id = engine.upload(
        controller(pre=flood + returning(PRE), mid=flood + returning(MID), post=flood + returning(POST), memory=ROOM)
    )
    new = {}
    for _ in range(16):
        id = next(ids)
        new[id] = f"flood-{id}"
        engine.instantiate(module_id, new[id])
    begun = engine.post_pre(new=new)["pre_seqs"]
    results = [begun[str(id)] for id in new]
    found = neighbours.step([*new], [{"id": id, "tokens": [1]} for id in new])
    for answers in (found.mid, found.post, found.pre):
        results += [answers[str(id)] for id in new]
    for result in results:
        assert result["error"] == ""
        assert result["logs"].endswith("the end")
        assert 1000 < len(result["logs"]) <= 64 << 10
    engine.post_pre(freed=[*new])


def test_writes_of_variables_that_no_message_holds(engine: Engine, neighbours: Neighbours) -> None:
    """Each of 3 controllers writes 3 MiB in one callback; the messages hold 4 MiB."""
    text = b'{"WriteVar":{"op":"Set","name":"a","value":"'
    size = 100_000
    command = "".join(f"(i32.store8 (i32.const {n}) (i32.const {byte}))" for n, byte in enumerate(text))
    command += f"(memory.fill (i32.const {len(text)}) (i32.const 48) (i32.const {size}))"
    for n, byte in enumerate(b'"}}'):
        command += f"(i32.store8 (i32.const {len(text) + size + n}) (i32.const {byte}))"
    write = f"""
      (loop $more (drop (call $aici_host_storage_cmd (i32.const 0) (i32.const {len(text) + size + 3})))
        (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 30))))
    """
    module_id = engine.upload(controller(mid=command + write + returning(MID, at=200_000), memory=ROOM))
    new = {next(ids): "" for _ in range(3)}
    for id in new:
        new[id] = f"writes-{id}"
        engine.instantiate(module_id, new[id])
    engine.post_pre(new=new)
    found = neighbours.step([*new])
    for id in new:
        assert re.fullmatch(r"Worker: its controller says too much at once: \d+ bytes, .*", found.mid[str(id)]["error"])
    assert not {str(id) for id in new} & {*engine.post_pre()["pre_seqs"]}, "they are gone"


def test_huge_results(patient: Engine) -> None:
    """500,000 tokens of each of 3 controllers at once; the messages hold 4 MiB."""
    engine, neighbours = patient, Neighbours(patient)
    neighbours.begin(3)
    text, size = b'{"Splice":{"backtrack":0,"ff_tokens":[7', 1_000_000
    head = "".join(f"(i32.store8 (i32.const {n}) (i32.const {byte}))" for n, byte in enumerate(text))
    # ,7,7,7 and so on
    fill = f"""
      (loop $more
        (i32.store16 (i32.add (i32.const {len(text)}) (local.get $n)) (i32.const {ord(",") | ord("7") << 8}))
        (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 2))) (i32.const {size}))))
    """
    tail = "".join(
        f"(i32.store8 (i32.const {len(text) + size + n}) (i32.const {byte}))" for n, byte in enumerate(b"]}}")
    )
    call = f"(call $aici_host_return_process_result (i32.const 0) (i32.const {len(text) + size + 3}))"
    module_id = engine.upload(controller(mid=head + fill + tail + call, memory='(memory (export "memory") 20)'))
    new = {next(ids): "" for _ in range(6)}
    for id in new:
        new[id] = f"huge-{id}"
        engine.instantiate(module_id, new[id])
    engine.post_pre(new=new)
    found = neighbours.step([*new])
    for id in new:
        assert "says too much at once" in found.mid[str(id)]["error"]
    one = next(ids)
    engine.instantiate(module_id, "one")
    engine.post_pre(new={one: "one"})
    assert len(neighbours.step([one]).mid[str(one)]["result"]["ff_tokens"]) == 1 + size // 2, "one alone fits"
    engine.post_pre(freed=[one])


def test_a_bomb_of_forks(engine: Engine, neighbours: Neighbours) -> None:
    """Each fork wants to fork again, without end, each with 4 MiB of memory."""
    wasm = controller(pre=returning({**PRE, "num_forks": 4_000_000_000}), memory='(memory (export "memory") 64)')
    first = next(ids)
    assert engine.begin(first, wasm)["result"]["num_forks"] == 4_000_000_000, "the engine decides what to make of it"
    live = [first]
    for _ in range(4):
        ops: list[int | tuple[int, int]] = []
        for parent in live:
            ops += [parent, *((next(ids), parent) for _ in range(3))]
        found = neighbours.step(ops).mid
        made = [op[0] for op in ops if isinstance(op, tuple)]
        errors = [found[str(id)]["error"] for id in made]
        assert {*errors} <= {"", "Worker: too many forks (max=16)"}
        live += [id for id, error in zip(made, errors, strict=True) if not error]
        posts = [{"id": id, "tokens": [1]} for id in live]
        neighbours.step([], posts)
    assert len(live) == 16
    engine.post_pre(freed=live)


@pytest.mark.thorough
def test_forks_of_large_controllers_do_not_take_the_time_of_others(tmp_path: Path) -> None:
    """15 forks with 60 MiB each, with the limits that are usual: neighbours are not late, whatever becomes of the forks."""
    wasm = controller(prompt=TOUCHING + returning({}), memory='(memory (export "memory") 960)')
    usual = flags(**{"wasm-max-pre-step-time": "1000", "wasm-max-step-time": "2000", "uma-skip-slow-ms": "20"})
    with contextlib.closing(Engine(tmp_path, *usual, json_mb=4)) as engine:
        engine.shake_hands()
        neighbours = Neighbours(engine, may_be_late=True)
        neighbours.begin(3)
        parent = next(ids)
        engine.begin(parent, wasm)
        ops: list[int | tuple[int, int]] = [parent, *((next(ids), parent) for _ in range(15))]
        group = [op if isinstance(op, int) else op[0] for op in ops]
        while any(found.get("skipped") for found in (neighbours.step(ops).mid[str(id)] for id in group)):
            pass
        engine.post_pre(freed=group)
        neighbours.step()


TOUCHING = """
  (loop $more (i64.store (local.get $n) (i64.const 1))
    (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 4096))) (i32.const 62900000))))
"""
"""Uses 60 MiB."""


@pytest.mark.thorough
def test_requests_that_take_the_memory_of_all_lose_it(tmp_path: Path) -> None:
    """10 requests take 60 MiB each, of which the 3rd, 6th and so on is one too many.  Neighbours have little and keep it."""
    grow = "(if (i32.eq (memory.size) (i32.const 1)) (then (drop (memory.grow (i32.const 959)))))"
    large = controller(pre=grow + TOUCHING + returning(PRE))
    with contextlib.closing(
        Engine(tmp_path, *flags(**FOREVER, **{"uma-max-total-memory": "150"}), json_mb=4)
    ) as engine:
        engine.shake_hands()
        neighbours = Neighbours(engine)
        neighbours.begin(3)
        before = psutil.Process(engine.process.pid).memory_info().rss
        errors = []
        for _ in range(10):
            id = next(ids)
            assert engine.begin(id, large)["error"] == "", "what it has is counted when it is done"
            pre = neighbours.step().pre
            errors.append({key for key, found in pre.items() if found["error"]})
            assert all("all controllers together have more than 150 MiB" in pre[key]["error"] for key in errors[-1])
            grown = psutil.Process(engine.process.pid).memory_info().rss - before
            assert grown < 250 << 20, f"{grown >> 20} MiB"
            engine.post_pre(freed=[int(key) for key in errors[-1]])
        assert sum(map(len, errors)) >= 8
        engine.begin(next(ids), COUNTING)
        neighbours.step()


@pytest.mark.thorough
def test_controllers_without_a_sequence_lose_their_memory_too(tmp_path: Path) -> None:
    large = controller(prompt=TOUCHING + returning({}), memory='(memory (export "memory") 960)')
    with contextlib.closing(
        Engine(tmp_path, *flags(**FOREVER, **{"uma-max-total-memory": "150"}), json_mb=4)
    ) as engine:
        engine.shake_hands()
        neighbours = Neighbours(engine)
        neighbours.begin(3)
        before = psutil.Process(engine.process.pid).memory_info().rss
        for n in range(20):
            engine.instantiate(large, f"large-{n}")
            neighbours.step()
            grown = psutil.Process(engine.process.pid).memory_info().rss - before
            assert grown < 250 << 20, f"{grown >> 20} MiB"


@pytest.mark.parametrize("callback", sampled(["pre", "mid", "post"], 3))
def test_neighbours_make_many_steps_while_a_controller_loops(tmp_path: Path, callback: str) -> None:
    """With --uma-skip-slow-ms the step goes on without it; in pre and post it is suspended until it has answered."""
    wasm = controller(**{callback: LOOP})
    with contextlib.closing(Engine(tmp_path, *flags(**{"uma-skip-slow-ms": "20"}), json_mb=4)) as engine:
        engine.shake_hands()
        neighbours = Neighbours(engine, may_be_late=True)
        neighbours.begin(3)
        bad = next(ids)
        engine.instantiate(wasm, "bad")
        late = {
            "error": "",
            "result": {**PRE, "suspend": True},
            "storage": [],
            "logs": "",
            "micros": 0,
            "skipped": True,
        }
        found = engine.post_pre(new={bad: "bad"})["pre_seqs"][str(bad)]
        while callback != "pre" and found["result"]["suspend"]:
            found = neighbours.step().pre[str(bad)]
        while callback == "post" and engine.mid(bad)["seqs"][str(bad)].get("skipped"):
            pass
        if callback == "post":
            step = engine.post_pre([{"id": bad, "tokens": [1]}])
            assert step["post_seqs"][str(bad)] == {**late, "result": POST}
            found = step["pre_seqs"][str(bad)]
        before = neighbours.fewest_steps
        if callback == "mid":
            skipped = {**late, "result": None}
            while (found := neighbours.step([bad]).mid[str(bad)]).get("skipped"):
                assert found == skipped
        else:
            assert found == late
            while (found := neighbours.step().pre[str(bad)])["error"] == "":
                assert found == late
        assert neighbours.fewest_steps - before > 1
        assert found["error"] == f"Worker: timeout: aici_{callback}_process took too long"
        assert str(bad) not in engine.post_pre()["pre_seqs"]


@pytest.mark.thorough
def test_what_a_late_controller_has_said_comes_later(tmp_path: Path) -> None:
    """Its post wanted to stop, and printed: pre says so when it is done."""
    count = """(loop $more
      (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 2000000000))))"""
    wasm = controller(
        post=printing("post ") + count + returning({"stop": True}), pre=printing("pre ") + returning(PRE), memory=ROOM
    )
    limits = flags(**FOREVER, **{"uma-skip-slow-ms": "5"})
    with contextlib.closing(Engine(tmp_path, *limits, json_mb=4)) as engine:
        engine.shake_hands()
        slow = next(ids)
        found = engine.begin(slow, wasm)
        while found["result"]["suspend"]:
            found = engine.post_pre()["pre_seqs"][str(slow)]
        while engine.mid(slow)["seqs"][str(slow)].get("skipped"):
            pass
        step = engine.post_pre([{"id": slow, "tokens": [1]}])
        assert step["post_seqs"][str(slow)]["result"] == POST, "as far as it is known"
        busy = engine.mid(slow)["seqs"][str(slow)]
        assert busy["error"] == f"Worker: {slow} has not answered post_process yet"
        while (found := engine.post_pre()["pre_seqs"][str(slow)])["result"]["suspend"]:
            assert found["skipped"] is True
        assert found["error"] == ""
        assert found["result"] == {**PRE, "num_forks": 0}
        assert found["logs"] == "post pre "


@pytest.mark.thorough
def test_a_module_of_100_megabytes(tmp_path: Path) -> None:
    """It is as slow as its size, and delays no step."""
    if shutil.disk_usage("/dev/shm").free < 1 << 30:
        pytest.skip("/dev/shm has less than 1 GiB")
    with contextlib.closing(Engine(tmp_path, *flags(**FOREVER), json_mb=200)) as engine:
        engine.shake_hands()
        neighbours = Neighbours(engine)
        neighbours.begin(3)
        large = with_custom_section(COUNTING, b"padding", bytes(100_000_000))
        engine.begin(next(ids), large)
        neighbours.step()
        too_large = with_custom_section(COUNTING, b"padding", bytes(140_000_000))
        assert "at most 134217728" in upload_error(engine, too_large)
        engine.begin(next(ids), controller(memory='(memory (export "memory") 1024)'))
        neighbours.step()


def test_controllers_that_nobody_assigns_do_not_pile_up(engine: Engine, neighbours: Neighbours) -> None:
    module_id = engine.upload(COUNTING)
    answers = []
    for n in range(300):
        request = {"op": "instantiate", "req_id": f"pile-{n}", "prompt": [1], "module_id": module_id, "$auth": ADMIN}
        answers.append(engine.side(request))
    refused = [answer for answer in answers if answer["type"] == "error"]
    assert 0 < len(refused) <= 300 - 200
    assert all("wait for a sequence already" in answer["error"] for answer in refused)
    neighbours.step()
    new = {next(ids): f"pile-{n}" for n in range(300)}
    engine.post_pre(new=new, freed=[*new])
    engine.begin(last := next(ids), COUNTING)
    engine.post_pre(freed=[last])
