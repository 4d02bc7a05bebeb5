"""Room of modules on disk: the bound, a full disk, and which modules are removed to make room for others."""

from __future__ import annotations

import base64
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.aici_client import ADMIN, Engine
from tests.support.hostile_wasm import with_custom_section
from tests.support.wat_controllers import controller

pytestmark = [pytest.mark.slow]

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
    return {path.name[:64] for path in (folder / "cache").iterdir() if path.name != "tags"}


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
    for word in ("the module takes 1.2 MiB", "may take 1.0 MiB", "aici_max_modules_mb", "have tags take 0.0 MiB"):
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
@pytest.mark.parametrize("part", ["module", "machine code", "its digest"])
def test_a_full_disk_is_an_error_and_leaves_nothing(engine: Engine, tmp_path: Path, part: str) -> None:
    kept = engine.side_ok("mk_module", binary=base64.b64encode(GOOD).decode())
    before = sorted(path.name for path in (tmp_path / "cache").iterdir())
    wasm = module(0, 10)
    assert len(wasm) < kept["compiled_size"]
    largest = {"module": 0, "machine code": len(wasm), "its digest": kept["compiled_size"] + 16}[part]
    pid = engine.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    answer = refusal(engine, wasm)
    assert answer["is_user_error"] is False
    assert "File too large" in answer["error"]
    assert str(tmp_path) not in answer["error"]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == before
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert engine.upload(wasm) == engine.upload_id(wasm)


def test_what_a_killed_process_has_begun_is_removed(engine: Engine, tmp_path: Path) -> None:
    engine.upload(GOOD)
    abandoned, recent = tmp_path / "cache" / ".a.wasm-1.tmp", tmp_path / "cache" / ".b.wasm-1.tmp"
    for path in (abandoned, recent):
        path.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    engine.upload(module(1, 10))
    assert not abandoned.exists()
    assert recent.exists()


def test_one_user_cannot_take_the_tags_of_all_others(engine: Engine, tmp_path: Path) -> None:
    module_id = engine.upload(module(0))

    def error_of(tag: str, user: str) -> str | None:
        auth = ADMIN if user == "root" else {"user": user, "is_admin": False}
        answer = engine.side({"op": "set_tags", "module_id": module_id, "tags": [tag], "$auth": auth})
        return answer.get("error") or None

    assert error_of("alice.first", "alice") is None
    for n in range(999):
        (tmp_path / "cache" / "tags" / f"alice.t{n}.json").touch()
    assert error_of("alice.more", "alice") == "alice has 1000 tags and may have 1000"
    assert error_of("alice.first", "alice") is None, "it is none more"
    assert error_of("alice.b.first", "alice.b") is None
    assert error_of("latest", "root") is None
    for n in range(10_000 - 1002):
        (tmp_path / "cache" / "tags" / f"bob{n}.t.json").touch()
    assert "there are 10000 tags already" in (error_of("other", "root") or "")
    assert error_of("latest", "root") is None, "it moves to another module"
