"""Controllers of several tenants over HTTP: the real daemon, the real runtime, and faults around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Gateway
from tests.support.commands import invoke
from tests.support.forked import WITH_COMPILER
from tests.support.hostile_wasm import with_custom_section
from tests.support.real_daemon import Daemon, missing, real_daemon
from tests.support.small_disk import fill, small_disk
from tests.support.wasm_compiler import killing_the_compiler
from tests.support.wat_controllers import PRE, controller, returning

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or "")]

ENDS = controller(pre=returning({**PRE, "num_forks": 0}))
PROGRAM = "start(async () => { await $`one two` })"


def module(n: int, size: int) -> bytes:
    """A controller of its own, with at least ``size`` bytes."""
    return with_custom_section(ENDS, b"padding", bytes([n]) * size)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Keys of tenants, in ``keys.yaml``."""
    return {
        name: invoke("keys", "create", name, *flags, "--file", tmp_path / "keys.yaml").stdout.split()[-1]
        for name, *flags in (("alice",), ("bob",), ("ops", "--admin"))
    }


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **options: Any) -> Iterator[Daemon]:
    own = ("--http", "0", "--http-keys", str(folder / "keys.yaml"), "--state-dir", str(folder / "state"))
    with real_daemon(*own, "--threads", "1", *flags, **options) as daemon:
        yield daemon


@contextlib.contextmanager
def clients(daemon: Daemon, keys: dict[str, str]) -> Iterator[list[httpx.Client]]:
    """Those of alice, bob and ops."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Gateway.of(daemon).http(headers={"authorization": f"Bearer {key}"}))
            for key in keys.values()
        ]


def upload(client: httpx.Client, wasm: bytes) -> str:
    answer = client.post("/v1/controllers", content=wasm)
    assert answer.status_code == 200, answer.text
    module_id: str = answer.json()["module_id"]
    return module_id


def run(client: httpx.Client, name: str, argument: Any = None) -> httpx.Response:
    return client.post("/v1/run", json={"controller": name, "controller_arg": argument, "max_tokens": 5})


def test_tenants_and_their_modules(tmp_path: Path, keys: dict[str, str]) -> None:
    flags = ("--aici-max-principal-modules-mb", "1", "--aici-max-modules-mb", "16")
    with serving(tmp_path, *flags) as daemon, clients(daemon, keys) as (alice, bob, ops):
        private = upload(alice, module(0, 400_000))
        assert upload(bob, module(1, 10))
        assert run(bob, private).status_code == 404
        assert upload(bob, module(0, 400_000)) == private
        alice.post("/v1/controllers/tags", json={"module_id": private, "tags": ["mine"]})
        second = upload(alice, module(2, 400_000))
        alice.post("/v1/controllers/tags", json={"module_id": second, "tags": ["second"]})
        shared = upload(ops, module(3, 10))
        ops.post("/v1/controllers/tags", json={"module_id": shared, "tags": ["ours"]})
    with serving(tmp_path, *flags) as daemon, clients(daemon, keys) as (alice, bob, ops):
        full = alice.post("/v1/controllers", content=module(4, 400_000))
        assert full.status_code == 400
        assert "aici_max_principal_modules_mb" in full.text
        assert [run(client, "ours").status_code for client in (alice, bob)] == [200, 200]
        assert [run(client, "mine").status_code for client in (alice, bob)] == [200, 404]
        assert [tag["tag"] for tag in bob.get("/v1/controllers/tags").json()["tags"]][:1] == ["ours"]
        assert alice.delete(f"/v1/controllers/{private}").json() == {"deleted": [private, "mine"]}
        assert [run(client, private).status_code for client in (alice, bob)] == [404, 200]
        upload(alice, module(4, 400_000))
        owners = [each["owner"] for each in ops.get("/v1/controllers").json()["controllers"]]
        assert sorted(owners) == [f"tenant:{name}" for name in ("alice", "alice", "bob", "bob", "ops")]
        assert ops.delete(f"/v1/controllers/{second}?owner=tenant:alice").status_code == 200
        assert run(alice, "second").status_code == 404


@pytest.mark.thorough
def test_the_compiler_is_killed(tmp_path: Path, keys: dict[str, str]) -> None:
    with serving(tmp_path, environment=WITH_COMPILER) as daemon, clients(daemon, keys) as (alice, bob, _):
        with killing_the_compiler(daemon.pid):
            killed = run(alice, "jsctrl", PROGRAM)
        assert killed.status_code == 503
        assert "ended by SIGKILL; try again" in killed.text
        assert "retry-after" in killed.headers
        for client in (alice, bob):
            answer = run(client, "jsctrl", PROGRAM)
            assert answer.status_code == 200
            assert '"aici-stop"' in answer.text
        assert daemon.metrics()["controllers"]["restarts_total"] == 0


@pytest.mark.thorough
def test_the_disk_of_the_controllers_is_full(tmp_path: Path, keys: dict[str, str]) -> None:
    with small_disk(folder := tmp_path / "state" / "aici"):
        fill(folder)
        with serving(tmp_path) as daemon, clients(daemon, keys) as (alice, bob, _):
            assert alice.post("/v1/controllers", content=ENDS).status_code == 503
            for client in (alice, bob):
                assert '"aici-stop"' in run(client, "jsctrl", PROGRAM).text
            (folder / "filling").unlink()
            assert run(alice, upload(alice, ENDS)).status_code == 200
