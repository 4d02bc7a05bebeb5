"""The runtime as the specification describes it, driven from outside over semaphores and over futexes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest

from tests.support.aici_client import ADMIN, PATIENCE_S, ROOT, Engine
from tests.support.commands import run_command
from tests.support.profile import sampled, thorough
from tests.support.wat_controllers import MID, POST, PRE, controller, printing, returning

ids = itertools.count(100)

COUNTER = "(global $step (mut i32) (i32.const 0))"
NEXT_STEP = "(global.set $step (i32.add (global.get $step) (i32.const 1)))"
LOOP = "(loop $forever (br $forever))"
TRAP = "unreachable"
FREE = controller()
SHIPPED = ["jsctrl", "uppercase", "yesno"]


def in_turn(*results: object) -> str:
    """Instructions that return the first result in the first call, and so on; then the last one again and again."""
    *first, last = results
    found = returning(last)
    for n, result in reversed([*enumerate(first)]):
        found = f"(if (i32.eq (global.get $step) (i32.const {n})) (then {returning(result)}) (else {found}))"
    return found + NEXT_STEP


def allowing(*tokens: int, at: int = 8192) -> str:
    """Instructions that allow some of the tokens 0 to 31, and no others."""
    mask = sum(1 << token for token in tokens)
    return f"(i32.store (i32.const {at}) (i32.const {mask})) (call $aici_host_return_logit_bias (i32.const {at}))"


def stepping(**callbacks: str) -> bytes:
    return controller(more=COUNTER, memory='(memory (export "memory") 2)', **callbacks)


ONLY_SEVEN = controller(mid=allowing(7) + returning(MID), memory='(memory (export "memory") 2)')


@pytest.fixture(scope="module", params=[thorough(False), True], ids=["semaphores", "futexes"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a runtime, for all tests of a variant.  The second variant spells its flags in two words."""
    flags = [f"--wasm-max-{name}-time" for name in ("pre-step", "step", "init")]
    times = "1000", "1000", "3000"  # the usual ones are short for a machine that is busy with tests
    more = zip(flags, times, strict=True)
    folder = tmp_path_factory.mktemp("runtime")
    if request.param:
        made = Engine(folder, *[word for pair in more for word in pair], futex=True, form=" ")
    else:
        made = Engine(folder, *["=".join(pair) for pair in more])
    try:
        made.shake_hands()
        yield made
    finally:
        made.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    try:
        made.shake_hands()
        yield made
    finally:
        made.close()


def result(value: object, logs: str = "", error: str = "") -> dict[str, object]:
    return {"error": error, "result": value, "storage": [], "logs": logs}


def without_micros(found: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    for each in found.values():
        micros = each.pop("micros")
        assert isinstance(micros, int)
        assert micros % 10 == 0
    return found


# The exchange of the document -------------------------------------------------------------------------------------


def test_the_exchange_of_the_document(engine: Engine) -> None:
    """Each request is the document's, and each answer has its form; values are those of our controller."""
    assert engine.main({"op": "ping"}) == {"type": "ok", "data": {"pong": 1}}
    assert engine.main({"op": "tokens"}) == {"type": "ok", "data": {"vocab_size": engine.n_vocab}}

    # jsctrl-latest of the document: fixed text, two tokens by a mask, the end
    wasm = stepping(
        prompt=printing("FIXED\n") + returning({}),
        pre=f"(if (i32.eqz (global.get $step)) (then {returning({**PRE, 'ff_tokens': [17, 18, 19]})})"
        f" (else {returning(PRE)}))",
        mid=allowing(4, 5) + returning(MID),
        post=in_turn(POST, POST, {"stop": True}),
    )
    module_id = hashlib.sha256(wasm).hexdigest()
    rid = "61141b8b-9a85-4859-9c92-bf189920426f"
    upload = {"$rid": rid, "$auth": ADMIN, "op": "mk_module", "binary": base64.b64encode(wasm).decode()}
    answer = engine.side(upload)
    assert answer.keys() == {"$rid", "type", "data"}
    assert (answer["$rid"], answer["type"]) == (rid, "ok")
    assert answer["data"].keys() == {"module_id", "wasm_size", "compiled_size", "time"}
    assert (answer["data"]["module_id"], answer["data"]["wasm_size"]) == (module_id, len(wasm))
    assert answer["data"]["compiled_size"] > 0
    compiled_size = answer["data"]["compiled_size"]

    names = ["jsctrl-latest", "jsctrl-2024-01-30-2145"]
    answer = engine.side({"$rid": "e", "$auth": ADMIN, "op": "set_tags", "module_id": module_id, "tags": names})
    tags = answer["data"]["tags"]
    assert answer == {"$rid": "e", "type": "ok", "data": {"tags": tags}}
    for tag, name in zip(tags, names, strict=True):
        assert isinstance(tag.pop("updated_at"), int)
        assert tag == {
            "tag": name,
            "module_id": module_id,
            "updated_by": "localhost",
            "wasm_size": len(wasm),
            "compiled_size": compiled_size,
        }
    answer = engine.side({"$rid": "bb", "$auth": ADMIN, "op": "get_tags"})
    assert answer["$rid"] == "bb"
    listed = answer["data"]["tags"]
    assert {*names} <= {each["tag"] for each in listed}
    assert [each["updated_at"] for each in listed] == sorted((each["updated_at"] for each in listed), reverse=True)

    req_id = "run-062a793f-a83f-4198-a792-9dfc39f623a6"
    request = {
        "$rid": "0aae92c8-e415-4efd-947b-361a8573020c",
        "$auth": ADMIN,
        "op": "instantiate",
        "req_id": req_id,
        "prompt": [1],
        "module_id": "jsctrl-latest",
        "module_arg": "async function main() {}\n",
    }
    assert engine.side(request) == {"type": "ok", "data": {}, "$rid": request["$rid"]}

    answer = engine.main(
        {"op": "post_pre_process", "post_ops": [], "pre_ops": [{"id": 2, "req_id": req_id}], "freed": []}
    )
    assert answer["data"].keys() == {"post_seqs", "pre_seqs"}
    assert answer["type"] == "ok"
    assert answer["data"]["post_seqs"] == {}
    assert without_micros(answer["data"]["pre_seqs"]) == {
        "2": result({"suspend": False, "num_forks": 1, "ff_tokens": [17, 18, 19]}, logs="FIXED\n")
    }

    for n, stops in ((0, False), (1, True)):
        op = {"id": 2, "clone_id": None} if n == 0 else {"id": 2}
        answer = engine.main({"op": "mid_process", "ops": [op]})
        assert (answer["type"], answer["data"]["num_seqs"]) == ("ok", 1)
        assert without_micros(answer["data"]["seqs"]) == {"2": result(None)}
        assert engine.allowed(0) == [4, 5]
        answer = engine.main(
            {
                "op": "post_pre_process",
                "post_ops": [{"id": 2, "tokens": [4], "backtrack": 0}],
                "pre_ops": [],
                "freed": [],
            }
        )
        assert without_micros(answer["data"]["post_seqs"]) == {"2": result({"stop": stops})}
        assert without_micros(answer["data"]["pre_seqs"]) == {
            "2": result({"suspend": False, "num_forks": 1, "ff_tokens": []})
        }
    last = engine.post_pre(freed=[2])
    assert last["pre_seqs"].keys() == {"2"}, "one last pre"
    assert engine.post_pre() == {"post_seqs": {}, "pre_seqs": {}}


# Envelopes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"{", b"\xff", b'{"op": "ping"', b'{"op": "ping", "x": ' + b"[" * 100_000])
def test_what_is_no_json(engine: Engine, text: bytes) -> None:
    for exchange in (engine.main, engine.side):
        answer = exchange(text)
        assert answer.keys() == {"type", "error"}
        assert answer["type"] == "json-error"


@pytest.mark.parametrize(
    "message",
    [
        {"op": "nonsense"},
        {"op": 3},
        {},
        {"op": "post_pre_process", "post_ops": [], "pre_ops": []},
        {"op": "post_pre_process", "post_ops": [{"id": -1, "tokens": []}], "pre_ops": [], "freed": []},
        {"op": "mid_process", "ops": [{"id": "2"}]},
        {"op": "mid_process"},
        {"op": "get_tags"},
    ],
)
def test_bad_messages_on_the_main_channel(engine: Engine, message: dict[str, object]) -> None:
    answer = engine.main(message)
    assert answer.keys() == {"type", "error", "is_user_error"}
    assert answer["type"] == "error"
    assert answer["is_user_error"] is False
    if message.get("op") in ("nonsense", 3, None, "get_tags"):
        assert answer["error"] == "bad op"
    assert engine.main({**message, "$rid": "abc"})["$rid"] == "abc"
    assert "$rid" not in engine.main({**message, "$rid": 7}), "only strings come back"


def test_the_request_id_comes_back_on_both_channels(engine: Engine) -> None:
    for exchange in (engine.main, engine.side):
        assert exchange({"op": "ping", "$rid": "x"}) == {"type": "ok", "data": {"pong": 1}, "$rid": "x"}
        assert exchange({"op": "ping"}) == {"type": "ok", "data": {"pong": 1}}


@pytest.mark.parametrize("auth", [{"user": "a"}, {"is_admin": True}, {"user": 1, "is_admin": True}, 3])
def test_an_incomplete_user(engine: Engine, auth: object) -> None:
    answer = engine.side({"op": "get_tags", "$auth": auth, "$rid": "r"})
    assert (answer["type"], answer["$rid"]) == ("error", "r")


# Modules and tags -------------------------------------------------------------------------------------------------


def user_error(engine: Engine, message: dict[str, object]) -> str:
    answer = engine.side({"$rid": "r", "$auth": ADMIN, **message})
    assert (answer["type"], answer["$rid"], answer["is_user_error"]) == ("error", "r", True)
    error: str = answer["error"]
    return error


def test_what_is_no_module(engine: Engine) -> None:
    assert user_error(engine, {"op": "mk_module", "binary": base64.b64encode(b"not Wasm").decode()})
    no_export = base64.b64encode(controller(left_out="aici_create")).decode()
    assert "aici_create" in user_error(engine, {"op": "mk_module", "binary": no_export})
    answer = engine.side({"op": "mk_module", "binary": "no base64!"})
    assert (answer["type"], answer["is_user_error"]) == ("error", False)


def test_the_same_module_again(engine: Engine) -> None:
    assert engine.upload(FREE) == engine.upload(FREE) == hashlib.sha256(FREE).hexdigest()


@pytest.mark.parametrize(
    ("tag", "error"),
    [
        ("a" * 51, "1 to 50 characters"),
        ("abcdef0123456789abcdef", "must not look like a module id"),
        ("", "'' cannot be a tag"),
        ("a/b", "'a/b' cannot be a tag"),
        ("../a", "the first a letter or a digit"),
        ("..", "the first a letter or a digit"),
        (".", "the first a letter or a digit"),
        ("-rf", "the first a letter or a digit"),
        ("a\0b", "cannot be a tag"),
        ("a\n", "cannot be a tag"),
        ("é", "the letters A to Z and a to z"),
        ("٣", "the letters A to Z and a to z"),
        ("ａ", "the letters A to Z and a to z"),
        ("jsctrl", "jsctrl is a controller that comes with uma-trio; choose another tag"),
    ],
)
def test_tags_that_nobody_may_set(engine: Engine, tag: str, error: str) -> None:
    module_id = engine.upload(FREE)
    assert error in user_error(engine, {"op": "set_tags", "module_id": module_id, "tags": ["good-one", tag]})
    assert "good-one" not in [each["tag"] for each in engine.side_ok("get_tags")["tags"]]


def test_modules_that_do_not_exist(engine: Engine) -> None:
    unknown = "0" * 64
    instantiate = {"op": "instantiate", "req_id": "r", "prompt": [1], "module_arg": ""}
    assert user_error(engine, {**instantiate, "module_id": "no-such-tag"}) == "tag no-such-tag not found"
    assert user_error(engine, {**instantiate, "module_id": "/etc/passwd"}) == "invalid module_id"
    assert "not found" in user_error(engine, {**instantiate, "module_id": unknown})
    module_id = engine.upload(FREE)
    engine.side_ok("set_tags", module_id=module_id, tags=["local.mine"])
    meant = user_error(engine, {**instantiate, "module_id": "local.mien"})
    assert meant == "tag local.mien not found; did you mean local.mine?"
    assert "downloads nothing" in user_error(engine, {**instantiate, "module_id": "gh:owner/repo"})
    assert "not found" in user_error(engine, {"op": "set_tags", "module_id": unknown, "tags": ["a"]})
    assert user_error(engine, {"op": "set_tags", "module_id": "ab", "tags": ["a"]}) == "invalid module_id"


def test_modules_and_tags_survive_a_restart(tmp_path: Path) -> None:
    with contextlib.closing(Engine(tmp_path)) as first:
        first.shake_hands()
        module_id = first.upload(ONLY_SEVEN)
        first.side_ok("set_tags", module_id=module_id, tags=["seven"])
    [compiled] = (tmp_path / "cache" / "owners").rglob("*.elf")
    assert compiled.stem == module_id
    compiled.write_bytes(b"of another version")
    with contextlib.closing(Engine(tmp_path)) as second:
        second.shake_hands()
        assert [each["tag"] for each in second.side_ok("get_tags")["tags"]] == ["seven", *SHIPPED]
        second.begin(1, "seven")
        second.mid(1)
        assert second.allowed(0) == [7]


# Instantiate ------------------------------------------------------------------------------------------------------


def test_prompts_and_arguments(engine: Engine) -> None:
    """The controller prints both."""
    memory = '(memory (export "memory") 2)'
    echo = """
      (i32.store (i32.const 4096) (i32.const 8192))
      (i32.store (i32.const 4100) (call $aici_host_read_blob ({blob}) (i32.const 8192) (i32.const 4096)))
      (drop (call $fd_write (i32.const 1) (i32.const 4096) (i32.const 1) (i32.const 4104)))
    """
    wasm = controller(
        init=echo.replace("{blob}", "call $aici_host_module_arg"),
        prompt=echo.replace("{blob}", "call $aici_host_process_arg") + returning({}),
        memory=memory,
    )
    expected = [("text", "text"), ({"a": [1, None]}, '{"a":[1,null]}'), (3, "3"), (None, "null")]
    for argument, shown in expected:
        assert engine.begin(next(ids), wasm, argument)["logs"] == shown + '{"prompt":[1]}'
    id = next(ids)
    engine.side_ok("instantiate", req_id="no-argument", prompt="a", module_id=engine.upload(wasm))
    logs = engine.post_pre(new={id: "no-argument"})["pre_seqs"][str(id)]["logs"]
    assert re.fullmatch(r'null\{"prompt":\[[0-9,]+\]\}', logs), "a text becomes tokens"


@pytest.mark.parametrize("prompt", [3, None, ["a"], [1.5], {}])
def test_prompts_that_are_none(engine: Engine, prompt: object) -> None:
    message = {"op": "instantiate", "req_id": "r", "module_id": engine.upload(FREE), "prompt": prompt}
    answer = engine.side(message)
    assert answer["error"] == "expecting string or int array as prompt"


def test_controllers_that_do_not_start(engine: Engine) -> None:
    fields = {"op": "instantiate", "req_id": "r", "prompt": [1]}
    for name in ("init", "create", "prompt"):
        module_id = engine.upload(controller(**{name: TRAP}))
        assert "unreachable" in user_error(engine, {**fields, "module_id": module_id})
    module_id = engine.upload(controller(init=LOOP))
    assert user_error(engine, {**fields, "module_id": module_id}) == "timeout: aici_init took too long"
    out_of_vocabulary = engine.side({**fields, "prompt": [engine.n_vocab], "module_id": engine.upload(FREE)})
    assert "prompt" in out_of_vocabulary["error"]


def test_the_side_channel_answers_in_any_order(engine: Engine) -> None:
    slow, quick = engine.upload(controller(init=LOOP)), engine.upload(FREE)
    for rid, module_id in (("slow", slow), ("quick", quick)):
        message = {
            "$rid": rid,
            "$auth": ADMIN,
            "op": "instantiate",
            "req_id": rid,
            "prompt": [1],
            "module_id": module_id,
        }
        engine.slots["cmd-side"].send(json.dumps(message).encode())
    assert [json.loads(engine.slots["resp-side"].receive())["$rid"] for _ in range(2)] == ["quick", "slow"]


def test_the_last_of_two_controllers_of_a_request_counts(engine: Engine) -> None:
    id = next(ids)
    engine.instantiate(FREE, "twice")
    engine.instantiate(ONLY_SEVEN, "twice")
    engine.post_pre(new={id: "twice"})
    engine.mid(id)
    assert engine.allowed(0) == [7]


# Post and pre -----------------------------------------------------------------------------------------------------


def test_a_wrong_operation_has_an_error_of_its_own(engine: Engine) -> None:
    """The reference implementation fails the whole request in these cases."""
    good, unknown, new = next(ids), next(ids), next(ids)
    engine.begin(good, FREE)
    posts = [{"id": unknown, "tokens": [1]}, {"id": good, "tokens": [1]}]
    found = engine.post_pre(posts, {new: "nobody"})
    assert found["post_seqs"][str(unknown)] == worker_error(f"invalid id {unknown}")
    assert found["pre_seqs"][str(new)] == worker_error("invalid req_id nobody")
    assert found["post_seqs"][str(good)]["result"] == POST
    assert found["pre_seqs"][str(good)]["result"] == PRE
    engine.instantiate(FREE, "second")
    found = engine.post_pre([{"id": good, "tokens": [1]}], {good: "second"})
    assert found["pre_seqs"][str(good)] == worker_error(f"duplicate id {good}")
    assert found["post_seqs"][str(good)]["result"] == POST
    found = engine.post_pre([{"id": good, "tokens": [1]}] * 2, {new: "second"})
    assert found["post_seqs"][str(good)] == worker_error(f"duplicate id {good}")
    assert found["pre_seqs"][str(new)]["result"] == PRE, "its controller has waited"
    assert engine.post_pre(freed=[unknown, 4_000_000_000])["pre_seqs"][str(good)]["result"] == PRE


def took_too_long(callback: str) -> dict[str, object]:
    return worker_error(f"timeout: aici_{callback}_process took too long")


def worker_error(reason: str) -> dict[str, object]:
    text = f"Worker: {reason}"
    return {"error": text, "result": None, "storage": [], "logs": text, "micros": 0}


def test_tokens_that_pre_appends(engine: Engine) -> None:
    """The controller sees them before the next pre, until there are none."""
    ff = {**PRE, "ff_tokens": [3, 4]}
    found = engine.begin(next(ids), stepping(pre=in_turn(ff, ff, {**PRE, "num_forks": 2})))
    assert found["result"] == {"suspend": False, "num_forks": 2, "ff_tokens": [3, 4, 3, 4]}
    found = engine.begin(next(ids), controller(pre=returning(ff), post=returning({"stop": True})))
    assert found["result"] == {"suspend": False, "num_forks": 0, "ff_tokens": [3, 4]}


def test_tokens_that_pre_appends_before_it_suspends(engine: Engine) -> None:
    """No engine appends tokens to a suspended sequence: it gets them when the sequence goes on."""
    ff, suspend = {**PRE, "ff_tokens": [3, 4]}, {**PRE, "suspend": True}
    id = next(ids)
    found = engine.begin(id, stepping(pre=in_turn(ff, suspend, {**PRE, "ff_tokens": [5]}, suspend, PRE)))
    assert found["result"] == {"suspend": True, "num_forks": 1, "ff_tokens": []}
    assert engine.post_pre()["pre_seqs"][str(id)]["result"] == {"suspend": True, "num_forks": 1, "ff_tokens": []}
    assert engine.post_pre()["pre_seqs"][str(id)]["result"] == {
        "suspend": False,
        "num_forks": 1,
        "ff_tokens": [3, 4, 5],
    }


@pytest.mark.parametrize(
    ("pre", "error"),
    sampled(
        [
            (returning({**PRE, "ff_tokens": [3]}), "too many ff_tokens rounds from pre_process"),
            (returning({**PRE, "ff_tokens": [3], "suspend": True}), "suspend"),
            (returning({**PRE, "ff_tokens": [3], "num_forks": 2}), "num_forks"),
            (returning({**PRE, "num_forks": 2, "suspend": True}), "num_forks"),
            (returning({**PRE, "ff_tokens": [4_000_000_000]}), "ff_token"),
            (returning("{"), ""),
            (returning({"num_forks": 1}), ""),
            ("", "aici_host_return_process_result not called"),
            (TRAP, "unreachable"),
            ("(call $aici_host_stop)", "*** aici_host_stop()"),
            ("(call $proc_exit (i32.const 3))", "proc_exit: 3"),
        ],
        3,
    ),
)
def test_errors_of_pre(engine: Engine, pre: str, error: str) -> None:
    id = next(ids)
    found = engine.begin(id, controller(pre=printing("before") + pre))
    assert found["error"].startswith("Error (pre0): before")
    assert error in found["error"]
    assert found["logs"].endswith(found["error"])
    assert found["result"] == PRE
    again = engine.post_pre([{"id": id, "tokens": [1]}])
    assert "Previous WASM Error" in again["pre_seqs"][str(id)]["error"]
    assert again["pre_seqs"][str(id)]["result"] == PRE
    assert "Previous WASM Error" in again["post_seqs"][str(id)]["error"]
    assert again["post_seqs"][str(id)]["result"] == {"stop": True}
    middle = engine.mid(id)["seqs"][str(id)]
    assert "Previous WASM Error" in middle["error"]
    assert middle["result"] is None
    engine.post_pre(freed=[id])


def test_an_error_of_post(engine: Engine) -> None:
    id = next(ids)
    engine.begin(id, controller(post=TRAP))
    found = engine.post_pre([{"id": id, "tokens": [1]}])
    assert found["post_seqs"][str(id)]["error"].startswith("Error (post): ")
    assert found["post_seqs"][str(id)]["result"] == {"stop": True}
    assert found["pre_seqs"][str(id)]["error"] == "Error (pre0): Previous WASM Error"
    engine.post_pre(freed=[id])


def test_the_controller_does_not_count_the_token_that_was_not_sampled(engine: Engine) -> None:
    """It prints the argument of post."""
    echo = """
      (i32.store (i32.const 4096) (i32.const 8192))
      (i32.store (i32.const 4100)
        (call $aici_host_read_blob (call $aici_host_process_arg) (i32.const 8192) (i32.const 4096)))
      (drop (call $fd_write (i32.const 1) (i32.const 4096) (i32.const 1) (i32.const 4104)))
    """
    id = next(ids)
    engine.begin(id, controller(post=echo + returning(POST), memory='(memory (export "memory") 2)'))
    for sent, seen in ((0, 0), (1, 0), (3, 2)):
        found = engine.post_pre([{"id": id, "tokens": [5, 6], "backtrack": sent}])["post_seqs"][str(id)]
        assert json.loads(found["logs"]) == {"tokens": [5, 6], "backtrack": seen}


# Mid --------------------------------------------------------------------------------------------------------------


def test_results_of_mid(engine: Engine) -> None:
    modules = [
        (ONLY_SEVEN, None, [7]),
        (controller(mid=returning("Stop".join('""'))), None, None),
        (controller(mid=returning({"Splice": {"backtrack": 0, "ff_tokens": [8, 9]}})), [[8, 9], 0], [8]),
        (controller(mid=returning({"Splice": {"backtrack": 2, "ff_tokens": [8]}})), [[8], 3], "all"),
        (controller(mid=returning({"Splice": {"backtrack": 1, "ff_tokens": []}})), [[], 2], "all"),
        (controller(mid=returning(MID)), None, []),
    ]
    sequences = [next(ids) for _ in modules]
    for id, (wasm, _, _) in zip(sequences, modules, strict=True):
        engine.begin(id, wasm)
    data = engine.mid(*sequences)
    assert data["num_seqs"] == len(modules)
    for n, (id, (_, expected, allowed)) in enumerate(zip(sequences, modules, strict=True)):
        found = data["seqs"][str(id)]
        assert found["error"] == ""
        splice = found["result"]
        assert (None if splice is None else [splice["ff_tokens"], splice["backtrack"]]) == expected
        if allowed == "all":
            assert not engine.row(n).any()
        elif allowed is None:
            assert len(engine.allowed(n)) == 1, "EOS"
        else:
            assert engine.allowed(n) == allowed
    engine.post_pre(freed=sequences)


@pytest.mark.parametrize(
    ("mid", "error"),
    sampled(
        [
            (TRAP, "unreachable"),
            (returning({"Splice": {"backtrack": 0, "ff_tokens": []}}), ""),
            (returning({"Splice": {"backtrack": 0, "ff_tokens": [4_000_000_000]}}), "ff_token out of range"),
            (returning('{"Other": 1}'), ""),
            ("", "aici_host_return_process_result not called"),
        ],
        2,
    ),
)
def test_errors_of_mid(engine: Engine, mid: str, error: str) -> None:
    bad, good = next(ids), next(ids)
    engine.begin(bad, controller(mid=mid))
    engine.begin(good, ONLY_SEVEN)
    found = engine.mid(bad, good)["seqs"]
    assert found[str(bad)]["error"].startswith("Error (mid): ")
    assert error in found[str(bad)]["error"]
    assert found[str(bad)]["result"] is None
    assert engine.allowed(0) == []
    assert (found[str(good)]["error"], engine.allowed(1)) == ("", [7])
    engine.post_pre(freed=[bad, good])


def test_unknown_and_repeated_sequences_in_mid(engine: Engine) -> None:
    good, other, unknown = next(ids), next(ids), next(ids)
    engine.begin(good, ONLY_SEVEN)
    engine.begin(other, ONLY_SEVEN)
    data = engine.mid(unknown, good, other, other, (next(ids), unknown))
    assert data["num_seqs"] == 5
    assert data["seqs"][str(unknown)] == worker_error(f"invalid id {unknown}")
    assert data["seqs"][str(other)] == worker_error(f"duplicate id {other}")
    assert not engine.row(0).any(), "a row that nobody has written"
    assert engine.allowed(1) == [7]
    engine.mid(other)
    assert engine.allowed(0) == [7], "it lives on"


def test_biases_that_do_not_fit(engine: Engine) -> None:
    size = len(engine.biases.map)
    n = size // (engine.n_vocab * 4)
    assert n * engine.n_vocab * 4 == size
    assert len(engine.mid(*range(1_000_000, 1_000_000 + n - 1))["seqs"]) == n - 1
    ops = [{"id": 1_000_000 + k} for k in range(n)]
    answer = engine.main({"op": "mid_process", "ops": ops})
    assert answer["type"] == "error"
    assert "shm size too small" in answer["error"]


# Forks ------------------------------------------------------------------------------------------------------------


def echoing_group() -> bytes:
    """Prints its argument of mid; allows as many tokens as it was called times."""
    echo = """
      (i32.store (i32.const 4096) (i32.const 8192))
      (i32.store (i32.const 4100)
        (call $aici_host_read_blob (call $aici_host_process_arg) (i32.const 8192) (i32.const 4096)))
      (drop (call $fd_write (i32.const 1) (i32.const 4096) (i32.const 1) (i32.const 4104)))
      (i32.store (i32.const 16384) (i32.sub (i32.shl (i32.const 1) (global.get $step)) (i32.const 1)))
      (call $aici_host_return_logit_bias (i32.const 16384))
    """
    return stepping(mid=NEXT_STEP + echo + returning(MID), pre=returning({**PRE, "num_forks": 3}))


def test_forks(engine: Engine) -> None:
    parent, one, two = next(ids), next(ids), next(ids)
    assert engine.begin(parent, echoing_group())["result"]["num_forks"] == 3
    found = engine.mid(parent)["seqs"][str(parent)]
    assert json.loads(found["logs"]) == {"fork_group": [parent]}
    data = engine.mid(parent, (one, parent), (two, parent))
    for n, id in enumerate((parent, one, two)):
        assert json.loads(data["seqs"][str(id)]["logs"]) == {"fork_group": [parent, one, two]}
        assert engine.allowed(n) == [0, 1], "what the parent has done, its forks have done"
    data = engine.mid(one)
    assert json.loads(data["seqs"][str(one)]["logs"]) == {"fork_group": [one]}
    assert engine.allowed(0) == [0, 1, 2]
    posts = [{"id": id, "tokens": [1]} for id in (parent, one, two)]
    assert {*engine.post_pre(posts)["post_seqs"]} == {str(parent), str(one), str(two)}
    clone = engine.mid(parent, (one, parent))["seqs"]
    assert clone[str(one)] == worker_error(f"duplicate id {one}")
    assert json.loads(clone[str(parent)]["logs"]) == {"fork_group": [parent]}
    engine.mid(one)
    assert engine.allowed(0) == [0, 1, 2, 3], "the sequence that has the id lives on"
    engine.post_pre(freed=[parent, one, two])


def test_forks_without_end(engine: Engine) -> None:
    parent = next(ids)
    clones = [next(ids) for _ in range(20)]
    engine.begin(parent, FREE)
    found = engine.mid(parent, *((id, parent) for id in clones))["seqs"]
    errors = [found[str(id)]["error"] for id in clones]
    assert errors == [""] * 15 + ["Worker: too many forks (max=16)"] * 5
    assert found[str(parent)]["error"] == ""
    engine.post_pre(freed=[parent, *clones])
    nobody = engine.mid((next(ids), parent))["seqs"]
    assert [each["error"] for each in nobody.values()] == [f"Worker: invalid clone_id {parent}"]


def test_variables_belong_to_the_request(engine: Engine) -> None:
    command = json.dumps({"WriteVar": {"name": "n", "value": "61", "op": "Append", "when_version_is": None}})
    data = command.encode()
    store = "".join(f"(i32.store8 (i32.const {8192 + n}) (i32.const {byte}))" for n, byte in enumerate(data))
    echo = f"""
      (i32.store (i32.const 4096) (i32.const 16384))
      (i32.store (i32.const 4100) (call $aici_host_read_blob
        (call $aici_host_storage_cmd (i32.const 8192) (i32.const {len(data)})) (i32.const 16384) (i32.const 4096)))
      (drop (call $fd_write (i32.const 1) (i32.const 4096) (i32.const 1) (i32.const 4104)))
    """
    wasm = controller(mid=store + echo + returning(MID), memory='(memory (export "memory") 2)')
    parent, fork, stranger = next(ids), next(ids), next(ids)
    engine.begin(parent, wasm)
    engine.begin(stranger, wasm)
    found = engine.mid(parent, (fork, parent), stranger)["seqs"]
    versions = {id: json.loads(found[str(id)]["logs"])["WriteVar"]["version"] for id in (parent, fork, stranger)}
    assert sorted((versions[parent], versions[fork])) == [1, 2]
    assert versions[stranger] == 1
    for id in (parent, fork, stranger):
        assert found[str(id)]["storage"] == [json.loads(command)]
    engine.post_pre(freed=[parent, fork, stranger])


# Time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(["pre", "post", "mid"], 3))
def test_a_controller_that_never_ends_is_stopped(engine: Engine, name: str) -> None:
    bad, good = next(ids), next(ids)
    wasm = controller(**{name: LOOP})
    engine.begin(good, ONLY_SEVEN)
    if name == "pre":
        assert engine.begin(bad, wasm) == took_too_long(name)
    else:
        engine.begin(bad, wasm)
        if name == "mid":
            found = engine.mid(bad, good)["seqs"]
            assert engine.allowed(1) == [7]
        else:
            found = engine.post_pre([{"id": bad, "tokens": [1]}, {"id": good, "tokens": [1]}])["post_seqs"]
        assert found[str(bad)] == took_too_long(name)
        assert found[str(good)]["error"] == ""
    assert str(bad) not in engine.post_pre()["pre_seqs"], "it is gone"
    assert engine.mid(bad, good)["seqs"][str(bad)] == worker_error(f"invalid id {bad}")
    assert engine.allowed(1) == [7]
    engine.post_pre(freed=[good])


def test_many_controllers_that_never_end_do_not_stop_the_others(engine: Engine) -> None:
    bad, good = [next(ids) for _ in range(12)], [next(ids) for _ in range(3)]
    for id in bad:
        engine.begin(id, controller(mid=LOOP))
    for id in good:
        engine.begin(id, ONLY_SEVEN)
    found = engine.mid(*bad, *good)["seqs"]
    assert [found[str(id)]["error"] for id in bad] == [took_too_long("mid")["error"]] * len(bad)
    assert [found[str(id)]["error"] for id in good] == [""] * len(good)
    engine.post_pre(freed=[*bad, *good])


def test_slow_controllers_are_skipped_if_the_engine_wants_that(tmp_path: Path) -> None:
    """Ours: with --uma-skip-slow-ms the step goes on without them."""
    flags = ("--uma-skip-slow-ms", "600", "--wasm-max-step-time=4000", "--wasm-max-pre-step-time=4000")
    with contextlib.closing(Engine(tmp_path, *flags)) as engine:
        engine.shake_hands()
        bad, good = next(ids), next(ids)
        engine.begin(bad, controller(mid=LOOP))
        engine.begin(good, ONLY_SEVEN)
        skipped = {"error": "", "result": None, "storage": [], "logs": "", "micros": 0, "skipped": True}
        found = engine.mid(bad, good)["seqs"]
        assert found[str(bad)] == skipped
        assert "skipped" not in found[str(good)]
        assert engine.allowed(1) == [7]
        busy = engine.post_pre([{"id": bad, "tokens": [1]}, {"id": good, "tokens": [1]}])
        assert busy["post_seqs"][str(bad)]["error"] == f"Worker: {bad} has not answered mid_process yet"
        found = engine.mid((next(ids), bad))["seqs"]
        assert [each["error"] for each in found.values()] == [f"Worker: {bad} has not answered mid_process yet"]
        n = 0
        while (found := engine.mid(bad, good)["seqs"])[str(bad)] == skipped:
            step = engine.post_pre([{"id": good, "tokens": [1]}])
            assert step["pre_seqs"][str(bad)]["result"] == PRE
            assert step["pre_seqs"][str(good)]["result"] == PRE
            n += 1
        assert n > 1
        assert found[str(bad)] == took_too_long("mid")
        assert found[str(good)]["error"] == ""


@pytest.mark.thorough
def test_the_answer_of_a_skipped_controller_comes_later(tmp_path: Path) -> None:
    flags = ("--uma-skip-slow-ms=5", "--wasm-max-step-time=60000", "--wasm-max-pre-step-time=1000")
    # counts for a second, so it is late however busy the machine is, and is then as good as any
    count = (
        "(loop $more (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const {n}))))"
    )
    wasm = controller(
        mid=count.replace("{n}", "3000000000") + allowing(3) + returning(MID), memory='(memory (export "memory") 2)'
    )
    with contextlib.closing(Engine(tmp_path, *flags)) as engine:
        engine.shake_hands()
        slow, quick = next(ids), next(ids)
        engine.begin(slow, wasm)
        engine.begin(quick, ONLY_SEVEN)
        n = 0
        while (found := engine.mid(quick, slow)["seqs"])[str(slow)].get("skipped"):
            assert not engine.row(1).any()
            n += 1
        assert n > 0
        assert found[str(slow)]["error"] == ""
        assert engine.allowed(0) == [7]
        assert engine.allowed(1) == [3]
        assert engine.post_pre([{"id": slow, "tokens": [3]}])["post_seqs"][str(slow)]["result"] == POST


# The process ------------------------------------------------------------------------------------------------------


def test_it_has_a_process_group_of_its_own(engine: Engine) -> None:
    assert os.getpgid(engine.process.pid) == engine.process.pid


def test_no_name_stays_with_futexes(engine: Engine) -> None:
    is_futex = not engine.slots["cmd"].memory.name.endswith("-shm")
    assert len(engine.names()) == (0 if is_futex else 13)


@pytest.mark.parametrize("channel", sampled(["cmd", "cmd-side"], 2))
@pytest.mark.parametrize("futex", [False, True])
def test_stop_has_no_answer_and_leaves_no_name(tmp_path: Path, channel: str, futex: bool) -> None:
    with contextlib.closing(Engine(tmp_path, futex=futex)) as engine:
        engine.shake_hands()
        engine.begin(1, FREE)
        engine.slots[channel].send(b'{"op":"stop"}')
        assert engine.process.wait(PATIENCE_S) == 0
        assert engine.names() == []
        with pytest.raises(posix_ipc.BusyError):
            engine.slots[channel.replace("cmd", "resp")].receive(0)


def test_a_signal_to_its_group_ends_it(alone: Engine) -> None:
    os.killpg(alone.process.pid, signal.SIGTERM)
    assert alone.process.wait(PATIENCE_S) == -signal.SIGTERM
    assert alone.names() == []


def test_it_does_not_take_the_names_of_the_next_engine_with_it(alone: Engine, tmp_path: Path) -> None:
    name = f"{alone.prefix}cmd-shm"
    posix_ipc.unlink_shared_memory(name)
    other = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096)
    other.close_fd()
    alone.slots["cmd"].send(b'{"op":"stop"}')
    alone.process.wait(PATIENCE_S)
    assert alone.names() == [name.removeprefix("/")]


def test_it_ends_with_its_engine(tmp_path: Path) -> None:
    """Also after a kill -9, while a controller runs."""
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.support.aici_client import Engine
engine = Engine(Path({str(tmp_path)!r}), forks=False)
engine.shake_hands()
print(engine.process.pid, engine.prefix, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid, prefix = engine.stdout.readline().split()
        ended = os.pidfd_open(int(pid))
        engine.kill()
    try:
        assert select.select([ended], [], [], PATIENCE_S)[0]
    finally:
        os.close(ended)
    assert not [name for name in os.listdir("/dev/shm") if prefix.removeprefix("/") in name]


def test_command_lines_that_are_refused(tmp_path: Path) -> None:
    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return run_command(["aicirt", *flags], os.environ, folder=tmp_path)

    found = run()
    assert (found.returncode, found.stdout.strip()) == (1, "missing --server")
    found = run("--server", "--name", "aici0-")
    assert found.returncode == 1
    assert "--name must start with /" in found.stderr
    found = run("-s", "-t", "gpt4")
    assert found.returncode == 1
    assert "`uma-trio models` lists the installed models" in found.stderr
    found = run("-s", "--json-size", "0")
    assert found.returncode == 2
    found = run("--server", "--run")
    assert found.returncode == 1


def test_another_size_is_refused(tmp_path: Path) -> None:
    """The reference implementation changes the size under the engine."""
    name = f"/at{os.getpid()}-size-"
    memory = posix_ipc.SharedMemory(f"{name}cmd-shm", posix_ipc.O_CREX, size=4096)
    memory.close_fd()
    try:
        found = run_command(["aicirt", "--server", "--name", name], os.environ, folder=tmp_path)
        assert found.returncode == 1
        assert "the same sizes" in found.stderr
    finally:
        for each in os.listdir("/dev/shm"):
            if each.removeprefix("sem.").startswith(name.removeprefix("/")):
                (Path("/dev/shm") / each).unlink()


def test_tools(tmp_path: Path) -> None:
    (tmp_path / "a.wasm").write_bytes(FREE)
    flags = ["--module", "a.wasm", "--save-tokenizer=trie"]
    found = run_command(["aicirt", *flags], os.environ, folder=tmp_path)
    assert (found.returncode, found.stdout.strip()) == (0, hashlib.sha256(FREE).hexdigest()), found.stderr
    assert (tmp_path / "trie").read_bytes()[:4] == bytes.fromhex("D36F8B55")
