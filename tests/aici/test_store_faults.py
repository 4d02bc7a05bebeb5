"""Faults around modules that nobody's module is to blame for: they pass, and take nothing else away."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.aici_client import ADMIN, Engine
from tests.support.hostile_wasm import with_custom_section
from tests.support.profile import sampled, thorough
from tests.support.small_disk import fill, make_read_only, small_disk
from tests.support.wasm_compiler import killing_the_compiler
from tests.support.wat_controllers import controller
from uma_trio.aici.controllers import shipped

GOOD = controller()
SLOW = with_custom_section(shipped()["jsctrl"], b"mine", b"compiled again")
PROGRAM = "start(async () => { await $`one` })"
ALICE = {"user": "alice", "is_admin": False}


@contextlib.contextmanager
def runtime(folder: Path, *flags: str, forks: bool = True) -> Iterator[Engine]:
    with contextlib.closing(Engine(folder, *flags, json_mb=4, forks=forks)) as made:
        made.shake_hands()
        yield made


def ask(engine: Engine, op: str, **fields: Any) -> dict[str, Any]:
    return engine.side({"op": op, "$rid": "r", "$auth": ADMIN, **fields})


def start(engine: Engine, name: str, argument: str = PROGRAM) -> dict[str, Any]:
    return ask(engine, "instantiate", req_id="r", prompt=[1], module_id=name, module_arg=argument)


def upload(engine: Engine, wasm: bytes, auth: object = ADMIN) -> dict[str, Any]:
    binary = base64.b64encode(wasm).decode()
    return engine.side({"op": "mk_module", "$rid": "r", "$auth": auth, "binary": binary})


@pytest.mark.thorough
def test_a_controller_that_comes_with_uma_trio_survives_its_compiler(tmp_path: Path) -> None:
    with runtime(tmp_path, forks=False) as engine:
        with killing_the_compiler(engine.process.pid):
            answer = start(engine, "jsctrl")
        assert (answer["type"], answer["is_user_error"]) == ("error", False)
        assert "its process was ended by SIGKILL; try again" in answer["error"]
        assert start(engine, "yesno", "x")["type"] == "ok", "nothing else was taken away"
        assert start(engine, "jsctrl")["type"] == "ok"


@pytest.mark.thorough
def test_a_compilation_whose_process_was_killed_is_tried_again(tmp_path: Path) -> None:
    with runtime(tmp_path, forks=False) as engine, killing_the_compiler(engine.process.pid, times=1):
        assert start(engine, "jsctrl")["type"] == "ok"


def test_an_upload_whose_compiler_is_killed_may_be_sent_again(tmp_path: Path) -> None:
    with runtime(tmp_path) as engine:
        with killing_the_compiler(engine.process.pid):
            answer = upload(engine, SLOW)
        assert (answer["type"], answer["is_user_error"]) == ("error", False)
        assert "try again" in answer["error"]
        assert upload(engine, SLOW)["type"] == "ok"
        assert start(engine, Engine.upload_id(SLOW))["type"] == "ok"


@pytest.mark.thorough
def test_a_stored_module_whose_compiler_is_killed_is_still_there(tmp_path: Path) -> None:
    with runtime(tmp_path) as engine:
        upload(engine, SLOW)
    [code] = (tmp_path / "cache" / "owners").rglob("*.elf")
    code.write_bytes(b"of another version")
    with runtime(tmp_path) as engine:
        with killing_the_compiler(engine.process.pid):
            answer = start(engine, Engine.upload_id(SLOW))
        assert (answer["type"], answer["is_user_error"]) == ("error", False)
        assert start(engine, Engine.upload_id(SLOW))["type"] == "ok"


def check_that_shipped_controllers_run(engine: Engine) -> None:
    for name in shipped():
        assert start(engine, name)["type"] == "ok"
    assert {each["tag"] for each in ask(engine, "get_tags")["data"]["tags"]} >= {*shipped()}


@pytest.mark.thorough
@pytest.mark.parametrize("is_read_only", [False, thorough(True)], ids=["full", "read-only"])
def test_a_disk_that_takes_no_more(tmp_path: Path, is_read_only: bool) -> None:
    cache = tmp_path / "cache"
    with small_disk(cache), runtime(tmp_path) as engine:
        kept = upload(engine, GOOD)["data"]["module_id"]
        ask(engine, "set_tags", module_id=kept, tags=["kept"])
        (make_read_only if is_read_only else fill)(cache)
        for wasm, auth in ((SLOW, ADMIN), (with_custom_section(GOOD, b"x", b"y"), ALICE)):
            answer = upload(engine, wasm, auth)
            assert (answer["type"], answer["is_user_error"]) == ("error", False)
            assert ("Read-only" if is_read_only else "No space left") in answer["error"]
            assert str(tmp_path) not in answer["error"]
        check_that_shipped_controllers_run(engine)
        assert start(engine, "kept")["type"] == "ok"
        with runtime(tmp_path) as second:
            check_that_shipped_controllers_run(second)
            assert start(second, "kept")["type"] == "ok"
            if not is_read_only:
                assert ask(second, "uma_remove_module", module_id=kept)["type"] == "ok", "so there is room again"
                (cache / "filling").unlink()
                assert upload(second, with_custom_section(GOOD, b"x", b"y"))["type"] == "ok"


DAMAGE = [
    b"",
    b"{",
    b"\xff",
    b"[" * 200_000,
    b"x" * (2 << 20),
    b'{"tag": "../../a", "module_id": "../../b"}',
]


@pytest.mark.parametrize(
    "damage",
    [*map(thorough, DAMAGE[:-1]), thorough(DAMAGE[-1]), None],
    ids=[*(f"{data[:8]!r}" for data in DAMAGE), "a folder"],
)
def test_a_damaged_tag_takes_nothing_else_away(
    tmp_path: Path, damage: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with runtime(tmp_path) as engine:
        module_id = upload(engine, GOOD)["data"]["module_id"]
        ask(engine, "set_tags", module_id=module_id, tags=["good", "bad"])
    bad = tmp_path / "cache" / "shared" / "bad.json"
    bad.unlink()
    bad.write_bytes(damage) if damage is not None else bad.mkdir()
    capfd.readouterr()
    with runtime(tmp_path) as engine:
        tags = [[each["tag"] for each in ask(engine, "get_tags")["data"]["tags"]] for _ in range(3)]
        assert tags == [["good", *sorted(shipped())]] * 3
        assert start(engine, "good")["type"] == "ok"
        assert "tag bad not found" in start(engine, "bad")["error"]
        check_that_shipped_controllers_run(engine)
        if damage is not None:
            assert ask(engine, "set_tags", module_id=module_id, tags=["bad"])["type"] == "ok"
            assert start(engine, "bad")["type"] == "ok", "it was repaired"
    assert capfd.readouterr().err.count("the tag bad is ignored") == 1


@pytest.mark.parametrize("what", sampled(["cache", "cache/owners", "cache/shared", "cache/shipped", "cache/lock"], 5))
def test_a_folder_that_is_something_else(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if what == "cache/lock" else path.write_text("no folder")
    with runtime(tmp_path) as engine:
        check_that_shipped_controllers_run(engine)
        answer = upload(engine, GOOD)
        if what in ("cache/shared", "cache/shipped"):
            assert answer["type"] == "ok"
            assert start(engine, Engine.upload_id(GOOD))["type"] == "ok"
        else:
            assert (answer["type"], answer["is_user_error"]) == ("error", False)
        assert "tag nothing not found" in start(engine, "nothing")["error"]


@pytest.mark.thorough
def test_damage_in_the_folder_of_one_owner_is_not_that_of_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with runtime(tmp_path) as engine:
        upload(engine, GOOD, ALICE)
    [alices] = (tmp_path / "cache" / "owners").iterdir()
    (alices / "owner").write_bytes(b"\xff")
    (alices / "tags").write_text("no folder")
    (tmp_path / "cache" / "owners" / "something").write_text("else")
    (tmp_path / "cache" / f"{'0' * 64}.wasm").write_text("of an older version")
    with runtime(tmp_path) as engine:
        assert upload(engine, GOOD)["type"] == "ok"
        assert [each["owner"] for each in ask(engine, "uma_get_modules")["data"]["modules"]] == ["localhost"]
        again = {"op": "instantiate", "$rid": "r", "$auth": ALICE, "req_id": "r", "prompt": [1], "module_arg": ""}
        assert engine.side({**again, "module_id": Engine.upload_id(GOOD)})["type"] == "ok"
    said = capfd.readouterr().err
    assert said.count("it does not say whose modules it has; remove it") == 2
    assert said.count("1 files that this version does not know") == 1


def test_a_module_that_is_damaged_on_disk(tmp_path: Path) -> None:
    with runtime(tmp_path) as engine:
        module_id = upload(engine, GOOD)["data"]["module_id"]
    [wasm] = (tmp_path / "cache" / "owners").rglob("*.wasm")
    [code] = (tmp_path / "cache" / "owners").rglob("*.elf")
    wasm.write_bytes(GOOD[:-1])
    with runtime(tmp_path) as engine:
        assert start(engine, module_id)["type"] == "ok", "its machine code is whole"
    code.write_bytes(code.read_bytes()[:-1])
    with runtime(tmp_path) as engine:
        assert "damaged; upload it again" in start(engine, module_id)["error"]
        assert upload(engine, GOOD)["type"] == "ok"
        assert start(engine, module_id)["type"] == "ok"
        assert json.dumps(ask(engine, "uma_get_modules")).count(module_id) == 1
