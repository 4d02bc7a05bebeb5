"""Uploads, tags and lists of controllers over the socket: the real daemon, a runtime in memory, virtual time."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest

from tests.support.controller_library import MemoryLibrary
from tests.support.serving import Serving, serving
from uma_trio.client import Client, Failure, ServerError
from uma_trio.daemon.doors.uploads import MAX_INCOMPLETE
from uma_trio.principal import Principal

WASM = b"\0asm" + bytes(range(256)) * 2000
"""Two parts and a half."""


@contextlib.asynccontextmanager
async def library(**limits: object) -> AsyncIterator[tuple[Serving, MemoryLibrary]]:
    async with serving(**limits) as running:
        running.service.runtime = found = MemoryLibrary()
        yield running, found
        await running.settled()
        assert running.server.uploads.incomplete_bytes == 0


async def refused(client: Client, **fields: object) -> Failure:
    await client.send({"type": "controllers", "keep_alive": True, **fields})
    event = await client.receive()
    assert isinstance(event, Failure), event
    return event


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_an_upload_in_parts_gets_tags_and_is_listed(encoding: str) -> None:
    async with library() as (running, _), running.client(encoding=encoding) as client:
        uploaded = await client.upload_controller(WASM, keep_alive=True)
        assert uploaded.module_id == hashlib.sha256(WASM).hexdigest()
        assert (uploaded.wasm_size, uploaded.compiled_size) == (len(WASM), 2 * len(WASM))
        assert [each.module_id for each in await client.controller_modules(keep_alive=True)] == [uploaded.module_id]
        tags = await client.tag_controller(uploaded.module_id, ["mine", "other"], keep_alive=True)
        assert [tag.tag for tag in tags] == ["mine", "other"]
        assert await client.controller_tags() == tags


async def test_bytes_of_cbor_need_no_base64() -> None:
    async with library() as (running, _), running.client(encoding="cbor") as client:
        await client.send({"type": "controllers", "action": "upload", "binary": WASM[:1000]})
        answer = await client.receive()
        assert (answer.wasm_size, answer.module_id) == (1000, hashlib.sha256(WASM[:1000]).hexdigest())


async def test_a_long_list_takes_several_events() -> None:
    async with library() as (running, _), running.client() as client:
        module_id = (await client.upload_controller(WASM, keep_alive=True)).module_id
        for n in range(5):
            await client.tag_controller(module_id, [f"t{n}-{each}" for each in range(60)], keep_alive=True)
        await client.send({"type": "controllers", "id": "q"})
        events = [await client.receive() for _ in range(3)]
        assert [(event.id, event.more, len(event.tags)) for event in events] == [
            ("q", True, 128),
            ("q", True, 128),
            ("q", False, 44),
        ]


async def test_parts_come_in_order_on_one_connection() -> None:
    async with library() as (running, _), running.client() as client:
        upload = {"action": "upload", "binary": "AGFzbQ=="}
        assert "part 0 comes next" in (await refused(client, **upload, part=1, of=3)).message
        await client.send({"type": "controllers", "keep_alive": True, **upload, "of": 3})
        assert (await client.receive()).received_bytes == 4
        assert "part 1 of 3 comes next" in (await refused(client, **upload, part=2, of=3)).message
        assert "part 0 comes next" in (await refused(client, **upload, part=1, of=3)).message
        await client.send({"type": "controllers", "keep_alive": True, **upload, "of": 3})
        assert (await client.receive()).received_bytes == 4
        async with running.client() as other:
            assert "part 0 comes next" in (await refused(other, **upload, part=1, of=3)).message
        # the connection closes with an unfinished upload, which is forgotten


async def test_a_module_is_as_large_as_allowed_and_no_larger() -> None:
    async with library(max_controller_bytes=len(WASM)) as (running, _):
        async with running.client() as client:
            await client.upload_controller(WASM)
        async with running.client() as client:
            with pytest.raises(ServerError, match="max_controller_bytes"):
                await client.upload_controller(WASM + b"x")


async def test_unfinished_uploads_share_a_limit() -> None:
    part = "AAAA" * 300
    async with library(max_controller_bytes=1024) as (running, _), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(running.client()) for _ in range(MAX_INCOMPLETE + 1)]
        fields = {"type": "controllers", "action": "upload", "binary": part, "of": 2, "keep_alive": True}
        for client in clients[:-1]:
            await client.send(fields)
            assert (await client.receive()).received_bytes == 900
        late = await refused(clients[-1], **fields)
        assert (late.code, late.retry_after_ms) == ("E_LIMIT_QUEUE", 1000)
        await clients[0].send({**fields, "part": 1, "binary": "AA=="})
        assert isinstance(await clients[0].receive(), Failure)  # complete, and no Wasm
        await clients[-1].send(fields)
        assert (await clients[-1].receive()).received_bytes == 900


async def test_what_is_no_wasm_is_refused_and_the_connection_goes_on() -> None:
    async with library() as (running, _), running.client() as client:
        assert "no Wasm" in (await refused(client, action="upload", binary="AAAA")).message
        assert await client.controller_tags() == []


ALICE, BOB = {"principal": "tenant:alice"}, {"principal": "tenant:bob"}


async def test_a_principal_has_its_own_controllers_and_those_of_administrators() -> None:
    async with library() as (running, _), running.client() as client:
        ours = (await client.upload_controller(WASM, keep_alive=True, **ALICE)).module_id
        assert "not found" in (await refused(client, action="tag", module_id=ours, tags=["t"], **BOB)).message
        assert (await client.upload_controller(WASM, keep_alive=True, **BOB)).module_id == ours
        await client.tag_controller(ours, ["mine"], keep_alive=True, **ALICE)
        admin = {"principal": "tenant:ops", "principal_is_admin": True}
        shared = (await client.upload_controller(WASM + b"x", keep_alive=True, **admin)).module_id
        await client.tag_controller(shared, ["ours"], keep_alive=True, **admin)

        async def sees(**who: object) -> tuple[list[str], list[tuple[str, list[str]]]]:
            tags = await client.controller_tags(keep_alive=True, **who)
            modules = await client.controller_modules(keep_alive=True, **who)
            return sorted(tag.tag for tag in tags), sorted((each.owner, each.tags) for each in modules)

        assert await sees(**ALICE) == (["mine", "ours"], [("tenant:alice", ["mine"])])
        assert await sees(**BOB) == (["ours"], [("tenant:bob", [])])
        everybody = [("tenant:alice", ["mine"]), ("tenant:bob", []), ("tenant:ops", ["ours"])]
        assert await sees(**admin) == (["ours"], everybody)
        assert await sees() == (["ours"], everybody)
        assert "only an administrator" in (await refused(client, action="modules", owner="tenant:alice", **BOB)).message
        assert [each.owner for each in await client.controller_modules(owner="tenant:bob", keep_alive=True)] == [
            "tenant:bob"
        ]


async def test_deleting_takes_only_what_is_named_and_only_from_its_owner() -> None:
    async with library() as (running, _), running.client() as client:
        for who in (ALICE, BOB):
            module_id = (await client.upload_controller(WASM, keep_alive=True, **who)).module_id
            assert module_id is not None
            await client.tag_controller(module_id, ["a", "b"], keep_alive=True, **who)
        delete = {"action": "delete"}
        gone = await refused(client, **delete, tags=["a", "nothing"], **ALICE)
        assert (gone.code, gone.message) == ("E_CONTROLLER_NOT_FOUND", "tag nothing not found")
        assert await client.delete_controller(tags=["a"], keep_alive=True, **ALICE) == ["a"], "none was deleted before"
        assert await client.delete_controller(module_id, keep_alive=True, **ALICE) == [module_id, "b"]
        assert (await refused(client, **delete, module_id=module_id, **ALICE)).code == "E_CONTROLLER_NOT_FOUND"
        assert (
            "only an administrator"
            in (await refused(client, **delete, tags=["a"], owner="tenant:bob", **ALICE)).message
        )
        [left] = await client.controller_modules(keep_alive=True, **BOB)
        assert (left.module_id, left.tags) == (module_id, ["a", "b"])
        assert (await refused(client, **delete, module_id=module_id)).code == "E_CONTROLLER_NOT_FOUND", "it is bob's"
        assert await client.delete_controller(tags=["a"], owner="tenant:bob", keep_alive=True) == ["a"]
        assert await client.delete_controller(module_id, owner="tenant:bob", keep_alive=True) == [module_id, "b"]
        assert await client.controller_modules() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "delete"},
        {"action": "delete", "module_id": "0" * 64, "tags": ["a"]},
        {"action": "delete", "tags": []},
        {"action": "delete", "tags": ["../a"]},
        {"action": "delete", "module_id": "../../etc"},
        {"action": "tag", "module_id": "0" * 64},
        {"action": "modules", "module_id": "0" * 64},
        {"action": "list", "owner": "alice"},
    ],
)
async def test_wrong_queries(fields: dict[str, object]) -> None:
    async with library() as (running, _), running.client() as client:
        assert (await refused(client, **fields)).code == "E_PROTO_BAD_REQUEST"


async def test_only_the_user_who_runs_the_daemon_acts_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with library() as (running, _), running.client() as client:
        await client.upload_controller(WASM, keep_alive=True)
        monkeypatch.setattr("uma_trio.daemon.doors.connection.principal_of", lambda _: Principal("uid:4711"))
        async with running.client() as other:
            wrong = await refused(other, action="modules", principal_is_admin=True)
            assert "only the user who runs the daemon" in wrong.message
            await refused(other, action="modules", **ALICE)
            assert await other.controller_modules(keep_alive=True) == []
            module_id = (await other.upload_controller(WASM, keep_alive=True)).module_id
            await other.tag_controller(module_id, ["any"])
        assert [tag.tag for tag in await client.controller_tags()] == []


async def test_a_daemon_without_a_runtime_says_so() -> None:
    async with serving() as running, running.client() as client:
        assert (await refused(client)).code == "E_CONTROLLER_UNAVAILABLE"
        await client.send({"id": "r", "controller": "jsctrl", "keep_alive": True})
        event = await client.receive()
        assert isinstance(event, Failure)
        assert event.code == "E_CONTROLLER_UNAVAILABLE"
