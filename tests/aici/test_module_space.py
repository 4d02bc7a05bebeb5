"""Room of modules on disk: the bound, a full disk, and which modules are removed to make room for others."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.aici_client import ADMIN, Engine
from tests.support.hostile_wasm import with_custom_section
from tests.support.profile import sampled
from tests.support.wat_controllers import controller

GOOD = controller()


def module(n: int, size: int = 400_000) -> bytes:
    """A controller of its own, with at least ``size`` bytes."""
    return with_custom_section(GOOD, b"padding", bytes([n]) * size)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Its runtime keeps two modules of the usual size, and no third one."""
    with contextlib.closing(Engine(tmp_path, "--uma-max-modules=1", json_mb=4)) as made:
        made.shake_hands()
        yield made


def ids_on_disk(folder: Path) -> set[str]:
    """Modules of which anything is on disk."""
    return {path.stem for path in files_on_disk(folder) if path.suffix in (".wasm", ".elf")}


def files_on_disk(folder: Path) -> set[Path]:
    return {path for path in (folder / "cache").rglob("*") if path.is_file()}


def refusal(engine: Engine, wasm: bytes) -> dict[str, Any]:
    message = {"op": "mk_module", "$rid": "r", "$auth": ADMIN, "binary": base64.b64encode(wasm).decode()}
    answer = engine.side(message)
    assert answer["type"] == "error", answer
    return answer


def test_modules_without_a_tag_leave_and_those_that_were_used_last_stay(engine: Engine, tmp_path: Path) -> None:
    first, second, third, fourth = (engine.upload_id(module(n)) for n in range(4))
    engine.upload(module(0))
    engine.upload(module(1))
    assert ids_on_disk(tmp_path) == {first, second}
    engine.begin(1, first)
    engine.upload(module(2))
    assert ids_on_disk(tmp_path) == {first, third}
    assert engine.mid(1)["seqs"]["1"]["error"] == "", "what runs goes on"
    engine.side_ok("set_tags", module_id=first, tags=["mine"])
    engine.upload(module(2))  # used again
    engine.upload(module(3))
    assert ids_on_disk(tmp_path) == {first, fourth}
    assert (
        "not found"
        in engine.side({"op": "instantiate", "req_id": "r", "prompt": [1], "module_id": third, "module_arg": ""})[
            "error"
        ]
    )
    engine.begin(2, "mine")


def test_a_module_that_has_no_room_is_refused_with_numbers(engine: Engine, tmp_path: Path) -> None:
    answer = refusal(engine, module(0, 1_200_000))
    assert answer["is_user_error"] is True
    for word in ("the module takes 1.2 MiB", "may have 1.0 MiB", "(aici_max_modules_mb)", "have tags take 0.0 MiB"):
        assert word in answer["error"]
    first = engine.upload(module(1))
    engine.side_ok("set_tags", module_id=first, tags=["first"])
    second = engine.upload(module(2))
    engine.side_ok("set_tags", module_id=second, tags=["second"])
    assert "have tags take 0.8 MiB" in refusal(engine, module(3))["error"]
    assert ids_on_disk(tmp_path) == {first, second}
    engine.side_ok("set_tags", module_id=second, tags=["first"])
    third = engine.upload(module(3))
    assert ids_on_disk(tmp_path) == {second, third}


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits the files of another process")
@pytest.mark.parametrize("part", sampled(["module", "machine code", "its digest"], 3))
def test_a_full_disk_is_an_error_and_leaves_nothing(engine: Engine, tmp_path: Path, part: str) -> None:
    kept = engine.side_ok("mk_module", binary=base64.b64encode(GOOD).decode())
    before = files_on_disk(tmp_path)
    wasm = module(0, 10)
    assert len(wasm) < kept["compiled_size"]
    largest = {"module": 0, "machine code": len(wasm), "its digest": kept["compiled_size"] + 16}[part]
    pid = engine.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    answer = refusal(engine, wasm)
    assert answer["is_user_error"] is False
    assert "File too large" in answer["error"]
    assert str(tmp_path) not in answer["error"]
    assert files_on_disk(tmp_path) == before
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert engine.upload(wasm) == engine.upload_id(wasm)


def test_what_a_killed_process_has_begun_is_removed(engine: Engine, tmp_path: Path) -> None:
    engine.upload(GOOD)
    [owner] = (tmp_path / "cache" / "owners").iterdir()
    abandoned, recent = owner / ".a.wasm-1.tmp", owner / ".b.wasm-1.tmp"
    for path in (abandoned, recent):
        path.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    engine.upload(module(1, 10))
    assert not abandoned.exists()
    assert recent.exists()


ALICE, BOB = ({"user": name, "is_admin": False} for name in ("alice", "bob"))


def ask(engine: Engine, op: str, auth: object = ADMIN, **fields: Any) -> Any:
    """The data of an answer, or the text of its error."""
    answer = engine.side({"op": op, "$rid": "r", "$auth": auth, **fields})
    return answer["data"] if answer["type"] == "ok" else answer["error"]


def upload(engine: Engine, wasm: bytes, auth: object) -> Any:
    return ask(engine, "mk_module", auth, binary=base64.b64encode(wasm).decode())


def runs(engine: Engine, name: str, auth: object) -> bool:
    found = ask(engine, "instantiate", auth, req_id="r", prompt=[1], module_id=name, module_arg="")
    assert found == {} or "not found" in found, found
    return found == {}


def owners_of(engine: Engine) -> list[str]:
    return sorted(each["owner"] for each in ask(engine, "uma_get_modules")["modules"])


def test_one_owner_cannot_fill_the_store_also_after_a_restart(tmp_path: Path) -> None:
    flags = ("--uma-max-modules=3", "--uma-max-principal-modules=1")
    with contextlib.closing(Engine(tmp_path, *flags, json_mb=4)) as first:
        first.shake_hands()
        bobs = upload(first, module(100), BOB)["module_id"]
        for n in range(2):
            found = upload(first, module(n), ALICE)
            ask(first, "set_tags", ALICE, module_id=found["module_id"], tags=[f"t{n}"])
    with contextlib.closing(Engine(tmp_path, *flags, json_mb=4)) as second:
        second.shake_hands()
        assert "you may have 1.0 MiB (aici_max_principal_modules_mb)" in upload(second, module(2), ALICE)
        assert runs(second, bobs, BOB)
        assert "module_id" in upload(second, module(101), BOB), "there is room for others"
        ask(second, "uma_remove_tags", ALICE, tags=["t0"])
        assert "module_id" in upload(second, module(2), ALICE)
        assert owners_of(second) == ["alice", "alice", "bob", "bob"]
        assert not runs(second, Engine.upload_id(module(0)), ALICE), "alice's own was removed"
        upload(second, module(3, 1_500_000), ADMIN)
        assert len(owners_of(second)) == 4, "an administrator may have all, and those who have more have made room"


def test_the_same_module_of_two_owners(engine: Engine) -> None:
    wasm = module(0, 10)
    module_id = upload(engine, wasm, ALICE)["module_id"]
    assert not runs(engine, module_id, BOB)
    assert "not found" in ask(engine, "set_tags", BOB, module_id=module_id, tags=["t"])
    assert "not found" in ask(engine, "uma_remove_module", BOB, module_id=module_id)
    assert upload(engine, wasm, BOB)["module_id"] == module_id
    for auth in (ALICE, BOB):
        ask(engine, "set_tags", auth, module_id=module_id, tags=["t"])
    assert ask(engine, "uma_remove_module", ALICE, module_id=module_id) == {"names": [module_id, "t"]}
    assert [runs(engine, name, auth) for name in (module_id, "t") for auth in (ALICE, BOB)] == [False, True] * 2
    assert not runs(engine, module_id, ADMIN), "an administrator names the owner"
    assert ask(engine, "uma_remove_module", module_id=module_id, owner="bob") == {"names": [module_id, "t"]}
    assert owners_of(engine) == []


def test_what_runs_goes_on_when_its_module_is_deleted(engine: Engine) -> None:
    module_id = engine.upload(GOOD)
    engine.side_ok("set_tags", module_id=module_id, tags=["mine"])
    engine.begin(1, "mine")
    other = engine.upload(module(1, 10))
    engine.side_ok("set_tags", module_id=other, tags=["mine"])
    assert engine.mid(1)["seqs"]["1"]["error"] == "", "its tag has moved"
    engine.side_ok("uma_remove_module", module_id=module_id)
    assert engine.mid(1)["seqs"]["1"]["error"] == ""
    assert not runs(engine, module_id, ADMIN), "although it was in memory"
    engine.begin(2, "mine")


def test_tags_of_administrators_are_for_everybody(engine: Engine) -> None:
    module_id = engine.upload(GOOD)
    assert not runs(engine, module_id, ALICE)
    engine.side_ok("set_tags", module_id=module_id, tags=["ours"])
    assert [runs(engine, name, ALICE) for name in ("ours", module_id)] == [True, True]
    assert "only an administrator" in ask(engine, "uma_remove_tags", ALICE, tags=["ours"])
    assert "comes with uma-trio" in ask(engine, "uma_remove_tags", tags=["jsctrl"])
    own = upload(engine, module(1, 10), ALICE)["module_id"]
    ask(engine, "set_tags", ALICE, module_id=own, tags=["ours"])
    ask(engine, "uma_remove_module", module_id=module_id)
    assert [runs(engine, "ours", auth) for auth in (ALICE, BOB)] == [True, False], "one's own come first"


def test_tags_have_a_limit_for_each_owner(engine: Engine, tmp_path: Path) -> None:
    module_id = upload(engine, module(0, 10), ALICE)["module_id"]
    for n in range(1000 // 50):
        tags = [f"t{n}-{each}" for each in range(50)]
        assert len(ask(engine, "set_tags", ALICE, module_id=module_id, tags=tags)["tags"]) == 50
    assert "there are 1000 tags" in ask(engine, "set_tags", ALICE, module_id=module_id, tags=["more"])
    assert "tags" in ask(engine, "set_tags", ALICE, module_id=module_id, tags=["t0-0"]), "it is none more"
    assert len(ask(engine, "get_tags", ALICE)["tags"]) == 1003
    assert len(ask(engine, "get_tags", BOB)["tags"]) == 3
    upload(engine, module(0, 10), BOB)
    assert "tags" in ask(engine, "set_tags", BOB, module_id=module_id, tags=["mine"])
    assert len(ask(engine, "uma_remove_module", ALICE, module_id=module_id)["names"]) == 1001


@pytest.mark.thorough
def test_uploads_deletes_and_runs_at_the_same_time(engine: Engine) -> None:
    """Each of them works or says that the module is not there; what is left can be used."""
    wasm = base64.b64encode(module(0, 10)).decode()
    module_id = engine.upload(module(0, 10))
    messages = [
        {"op": "mk_module", "binary": wasm},
        {"op": "set_tags", "module_id": module_id, "tags": ["mine"]},
        {"op": "instantiate", "req_id": "r", "prompt": [1], "module_id": module_id, "module_arg": ""},
        {"op": "instantiate", "req_id": "s", "prompt": [1], "module_id": "mine", "module_arg": ""},
        {"op": "uma_remove_module", "module_id": module_id},
        {"op": "uma_get_modules"},
        {"op": "get_tags"},
    ] * 6
    for n, message in enumerate(messages):
        engine.slots["cmd-side"].send(json.dumps({**message, "$rid": str(n), "$auth": ADMIN}).encode())
        if n >= 4:  # so many are under way at once
            check(json.loads(engine.slots["resp-side"].receive()))
    for _ in range(4):
        check(json.loads(engine.slots["resp-side"].receive()))
    assert engine.upload(module(0, 10)) == module_id
    engine.side_ok("set_tags", module_id=module_id, tags=["mine"])
    engine.begin(1, "mine")


def check(answer: dict[str, Any]) -> None:
    assert answer["type"] == "ok" or "not found" in answer["error"], answer
