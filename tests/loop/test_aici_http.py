"""AICI's API over HTTP: the real gateway and the real connection, with controllers from a script, in virtual time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.support.controller_library import MemoryLibrary
from tests.support.scripted_generation import eos, play
from tests.support.serving import Serving, serving, settings
from uma_trio.cli import main
from uma_trio.errors import ControllerFailed, ControllerNotFound, ControllerUnavailable, UmaError
from uma_trio.gateway.application import make_app
from uma_trio.protocol.controllers import Backtrack, ControllerOutput, Fork, StorageWrite
from uma_trio.protocol.events import Failure, Token
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.requests import Generate

WASM = b"\0asm" + bytes(300_000)
RUN = {"controller": "jsctrl", "controller_arg": "program", "max_tokens": 50}
HERE = ("127.0.0.1", 5000)
ELSEWHERE = ("192.0.2.7", 5000)


@contextlib.asynccontextmanager
async def http(
    folder: Path, *, client: tuple[str, int] = HERE, key: str | None = None, **limits: object
) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    async with serving(**limits) as running:
        running.service.runtime = MemoryLibrary()
        keys = folder / "keys.yaml"
        app = make_app(settings(socket=running.path, **({"http_keys": keys} if keys.exists() else {}), **limits))
        headers = {} if key is None else {"api-key": key}
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as connected:
            yield running, connected
        await running.settled()


def create_key(folder: Path, *args: str) -> str:
    result = CliRunner().invoke(main, ["keys", "create", *args, "--file", str(folder / "keys.yaml")])
    assert result.exit_code == 0, result.output
    return result.stdout.split()[0]


def frames_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The frames of a run, read as AICI's own client does: every line that is not empty is data, and [DONE] ends it."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts_of(frames: Sequence[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for frame in frames:
        for fork in frame.get("forks", ()):
            assert {"index", "text", "error", "logs", "storage"} <= set(fork) <= {*fork, "finish_reason"}
            found[fork["index"]] = found.get(fork["index"], "") + fork["text"]
    return found


async def ran(folder: Path, *script: Sequence[ServerEvent] | UmaError, **fields: Any) -> tuple[Any, list[Generate]]:
    async with http(folder) as (_, client):
        with pytest.MonkeyPatch.context() as monkeypatch:
            requests = play(monkeypatch, *script)
            return await client.post("/v1/run", json={**RUN, **fields}), requests


def token(index: int, text: str, *, inserted: bool = False) -> Token:
    return Token(id="", index=index, text=text, token_id=5, inserted=inserted)


# -- runs ---------------------------------------------------------------------------------------------


async def test_a_run_has_the_frames_of_the_reference(tmp_path: Path) -> None:
    written = StorageWrite.of("answer", b"42", "set", None)
    answer, requests = await ran(
        tmp_path,
        [token(0, "The answer is ", inserted=True), ControllerOutput(id="", index=0, logs="begins\n")],
        [token(0, "4")],
        [token(0, "2"), ControllerOutput(id="", index=0, storage=[written])],
        [eos(0, sampled=2, inserted=1)],
    )
    first, *steps = frames_of(answer)
    assert set(first) == {"id", "object", "created", "model"}
    assert (first["object"], first["model"]) == ("initial-run", "fake")
    assert first["id"].startswith("run-")
    assert [list(step) for step in steps] == [["object", "forks", "usage"]] * len(steps)
    assert {step["object"] for step in steps} == {"run"}
    assert steps[0] == {
        "object": "run",
        "forks": [{"index": 0, "text": "The answer is ", "error": "", "logs": "begins\n", "storage": []}],
        "usage": {"sampled_tokens": 0, "ff_tokens": 1, "cost": 1},
    }
    assert texts_of(steps) == {0: "The answer is 42"}
    assert [fork.get("finish_reason") for step in steps for fork in step["forks"]][-2:] == [None, "aici-stop"]
    assert steps[-1]["usage"] == {"sampled_tokens": 2, "ff_tokens": 1, "cost": 5}
    [variables] = [fork["storage"] for step in steps for fork in step["forks"] if fork["storage"]]
    assert variables == [
        {"WriteVar": {"name": "answer", "value": "3432", "op": "Set", "when_version_is": None}},
    ]
    [request] = requests
    assert (request.controller, request.controller_arg, request.max_tokens) == ("jsctrl", "program", 50)
    assert (request.temperature, request.top_p, request.top_k) == (0, 1, 0)


async def test_a_fork_gets_the_text_so_far_and_a_backtrack_its_sign(tmp_path: Path) -> None:
    answer, _ = await ran(
        tmp_path,
        [token(0, "one "), token(0, "two")],
        [Backtrack(id="", index=0, tokens=1, text="two")],
        [Fork(id="", index=1, parent=0), token(1, "left"), token(0, "right")],
        [eos(1, "length", sampled=1), eos(0, "deadlock", sampled=3)],
    )
    frames = frames_of(answer)
    assert texts_of(frames) == {0: "one two ↩ right", 1: "one left"}
    assert [fork["finish_reason"] for fork in frames[-1]["forks"]] == ["deadlock", "length"]
    assert frames[-1]["usage"]["sampled_tokens"] == 4


async def test_a_fork_that_fails_ends_alone(tmp_path: Path) -> None:
    failed = Failure(code="E_CONTROLLER_FAILED", message="trap", index=0, id="")
    answer, _ = await ran(
        tmp_path,
        [
            Fork(id="", index=1, parent=0),
            ControllerOutput(id="", index=0, logs="oh", error="Error (mid): trap"),
            failed,
        ],
        [token(1, "fine")],
        [eos(1)],
    )
    frames = frames_of(answer)
    forks = [fork for frame in frames[1:] for fork in frame["forks"]]
    assert [fork["error"] for fork in forks if fork["index"] == 0 and fork["error"]] == ["Error (mid): trap"]
    assert [fork["finish_reason"] for fork in forks if "finish_reason" in fork] == ["fail", "aici-stop"]
    assert texts_of(frames)[1] == "fine"


@pytest.mark.parametrize("index", [0, None])
async def test_an_error_after_the_beginning_ends_the_stream_as_the_clients_know_it(
    tmp_path: Path, index: int | None
) -> None:
    failed = Failure(code="E_CONTROLLER_UNAVAILABLE", message="the runtime has ended", index=index, id="")
    answer, _ = await ran(tmp_path, [token(0, "x")], [failed])
    last = frames_of(answer)[-1]
    assert [(fork["error"], fork["finish_reason"]) for fork in last["forks"]] == [("the runtime has ended", "fail")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ControllerNotFound("tag nobody not found"), 404),
        (ControllerFailed("init: syntax error"), 400),
        (ControllerUnavailable("controllers are switched off"), 503),
    ],
)
async def test_errors_before_the_stream_are_text(tmp_path: Path, error: UmaError, status: int) -> None:
    answer, _ = await ran(tmp_path, error)
    assert answer.status_code == status
    assert answer.text.startswith(f"APIError: {error}")
    assert ("GET /v1/controllers/tags" in answer.text) == (status == 404)
    assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    "body",
    [{}, {"controller": 5}, {**RUN, "max_tokens": 0}, {**RUN, "temperature": -1}, {"controller": "none"}, []],
)
async def test_wrong_runs_are_refused(tmp_path: Path, body: Any) -> None:
    async with http(tmp_path) as (_, client):
        answer = await client.post("/v1/run", json=body)
    assert answer.status_code == 400
    assert answer.text.startswith("APIError: ")


async def test_without_a_controller_the_argument_is_continued(tmp_path: Path) -> None:
    async with http(tmp_path) as (_, client):
        answer = await client.post("/v1/run", json={"controller": "none", "controller_arg": "abcd", "max_tokens": 3})
    frames = frames_of(answer)
    assert frames[0]["object"] == "initial-run"
    assert len(texts_of(frames)[0].split()) == 3
    assert frames[-1]["forks"][0]["finish_reason"] == "length"
    assert frames[-1]["usage"] == {"sampled_tokens": 3, "ff_tokens": 4, "cost": 10}


async def test_any_json_is_an_argument(tmp_path: Path) -> None:
    for arg in ({"a": [1]}, [1], 5, None):
        _, [request] = await ran(tmp_path, [eos(0)], controller_arg=arg)
        assert request.controller_arg == arg


async def test_headers_of_a_proxy_choose_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = create_key(tmp_path, "alice")
    async with http(tmp_path, key=key) as (_, client):
        requests = play(monkeypatch, [eos(0)])
        await client.post("/v1/run", json=RUN, headers={"x-user-id": "root", "x-user-role": "admin"})
    assert [request.principal for request in requests] == ["tenant:alice"]


async def test_a_run_counts_for_the_limits_of_its_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = create_key(tmp_path, "alice", "--tpm", "60")
    async with http(tmp_path, key=key) as (_, client):
        play(monkeypatch, [token(0, "x")] * 55, [eos(0, sampled=55)])
        statuses = [(await client.post("/v1/run", json=RUN)).status_code for _ in range(2)]
        refused = await client.post("/v1/run", json=RUN)
    assert statuses[0] == 200
    assert refused.status_code == 429
    assert refused.text.startswith("APIError: ")
    assert "retry-after" in refused.headers


# -- controllers --------------------------------------------------------------------------------------


async def test_upload_tag_and_list(tmp_path: Path) -> None:
    async with http(tmp_path) as (_, client):
        uploaded = (await client.post("/v1/controllers", content=WASM)).json()
        module_id = hashlib.sha256(WASM).hexdigest()
        size = len(WASM)
        assert uploaded.pop("time") >= 0
        assert uploaded == {"module_id": module_id, "wasm_size": size, "compiled_size": 2 * size}
        body = {"module_id": module_id, "tags": ["digits", "numbers"]}
        tagged = (await client.post("/v1/controllers/tags", json=body)).json()
        listed = (await client.get("/v1/controllers/tags")).json()
    assert [tag["tag"] for tag in tagged["tags"]] == ["digits", "numbers"]
    assert listed["tags"] == tagged["tags"]
    assert set(listed["tags"][0]) == {"tag", "module_id", "updated_at", "updated_by", "wasm_size", "compiled_size"}
    assert type(listed["tags"][0]["updated_at"]) is int


async def test_uploads_have_a_limit_of_their_own(tmp_path: Path) -> None:
    async with http(tmp_path, http_max_body_bytes=1024, max_controller_bytes=len(WASM)) as (_, client):
        assert (await client.post("/v1/controllers", content=WASM)).status_code == 200
        too_large = await client.post("/v1/controllers", content=WASM + b"x")
        assert (too_large.status_code, too_large.text[:10]) == (413, "APIError: ")
        assert "max_controller_bytes" in too_large.text
        assert (await client.post("/v1/run", content=WASM)).status_code == 413


@pytest.mark.parametrize("content", [b"", b"hello", b'{"binary": "AAAA"}'])
async def test_what_is_no_controller_is_refused(tmp_path: Path, content: bytes) -> None:
    async with http(tmp_path) as (_, client):
        answer = await client.post("/v1/controllers", content=content)
    assert answer.status_code == 400
    assert answer.text.startswith("APIError: ")


@pytest.mark.parametrize(
    ("args", "client", "is_for_everybody"),
    [
        (("ops", "--admin"), ELSEWHERE, True),
        (("alice",), HERE, False),
        ((), HERE, True),
        ((), ELSEWHERE, False),
    ],
)
async def test_whose_tags_are_for_everybody(
    tmp_path: Path, args: tuple[str, ...], client: tuple[str, int], is_for_everybody: bool
) -> None:
    key = create_key(tmp_path, *args) if args else None
    proxy = {"x-user-id": "root", "x-user-role": "admin"}
    async with http(tmp_path, client=client, key=key) as (running, connected):
        module_id = (await connected.post("/v1/controllers", content=WASM)).json()["module_id"]
        body = {"module_id": module_id, "tags": ["any"]}
        answer = await connected.post("/v1/controllers/tags", json=body, headers=proxy)
        assert answer.status_code == 200, answer.text
        async with running.client() as other:
            tags = await other.controller_tags(principal="tenant:bob")
    assert [tag.tag for tag in tags] == ["any"] * is_for_everybody


async def test_list_and_delete(tmp_path: Path) -> None:
    alice, ops = create_key(tmp_path, "alice"), create_key(tmp_path, "ops", "--admin")
    async with http(tmp_path, key=alice) as (_, client):
        admin = {"api-key": ops}
        module_id = (await client.post("/v1/controllers", content=WASM)).json()["module_id"]
        await client.post("/v1/controllers", content=WASM, headers=admin)
        await client.post("/v1/controllers/tags", json={"module_id": module_id, "tags": ["a", "b"]})
        await client.post("/v1/controllers/tags", json={"module_id": module_id, "tags": ["all"]}, headers=admin)

        async def owners(query: str = "", **headers: str) -> list[str]:
            answer = await client.get(f"/v1/controllers{query}", headers=headers)
            return sorted(each["owner"] for each in answer.json()["controllers"])

        assert await owners() == ["tenant:alice"]
        assert await owners(**admin) == ["tenant:alice", "tenant:ops"]
        assert await owners("?owner=tenant:alice", **admin) == ["tenant:alice"]
        assert (await client.get("/v1/controllers?owner=tenant:ops")).status_code == 400
        for path, status in (
            ("tags/all", 400),
            ("tags/nothing", 404),
            ("tags/..%2F..%2Fa", 404),
            ("tags/%C3%A9", 400),
            (f"{'0' * 64}", 404),
            ("..%2f..%2fetc", 404),
            (f"{module_id}?owner=tenant:ops", 400),
        ):
            answer = await client.delete(f"/v1/controllers/{path}")
            assert (path, answer.status_code) == (path, status), answer.text
            assert "Traceback" not in answer.text
        assert (await client.delete("/v1/controllers/tags/a")).json() == {"deleted": ["a"]}
        assert (await client.delete(f"/v1/controllers/{module_id}")).json() == {"deleted": [module_id, "b"]}
        assert await owners(**admin) == ["tenant:ops"]
        deleted = await client.delete(f"/v1/controllers/{module_id}?owner=tenant:ops", headers=admin)
        assert deleted.json() == {"deleted": [module_id, "all"]}
        assert await owners(**admin) == []


@pytest.mark.parametrize(("client", "principal"), [(HERE, None), (ELSEWHERE, "http")])
@pytest.mark.parametrize("path", ["/v1/run", "/v1/generate"])
async def test_who_uploads_without_keys_is_who_runs(
    tmp_path: Path, client: tuple[str, int], principal: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http(tmp_path, client=client) as (_, connected):
        requests = play(monkeypatch, [eos(0)])
        await connected.post(path, json=RUN)
    assert [request.principal for request in requests] == [principal]


async def test_a_key_is_needed_if_there_are_tenants(tmp_path: Path) -> None:
    create_key(tmp_path, "alice")
    async with http(tmp_path) as (_, client):
        answers = [
            await client.post("/v1/controllers", content=WASM),
            await client.get("/v1/controllers/tags"),
            await client.post("/v1/run", json=RUN),
        ]
    assert [answer.status_code for answer in answers] == [401] * 3
    assert all(answer.text.startswith("APIError: send an API key") for answer in answers)
