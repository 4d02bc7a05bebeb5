"""Files and batches of OpenAI's API, with its own client: what they answer, who sees them, what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import psutil
import pytest
from openai.types import Batch, FileObject

from tests.gateway.conftest import TIMEOUT_S, Gateway
from tests.support.commands import invoke
from tests.support.real_daemon import Daemon, missing, real_daemon, started, wait_ready
from uma_trio.gateway.batches.store import Store

pytest.importorskip("python_multipart", reason="python-multipart is missing: pip install -e '.[dev]'")

CHAT, RESPOND, EMBED = "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
COMPLETE: Any = "/v1/completions"
QUESTIONS = ["What is the capital of France?", "What is the capital of Italy?", "Tell me a story about a fox."]


def row(custom_id: str, body: object, url: str = COMPLETE) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completions(n: int, max_tokens: int = 24) -> list[dict[str, Any]]:
    starts = ("Once upon a time", "The fox", "Lisbon is", "A long story:")
    return [
        row(f"row-{number}", {"prompt": f"{starts[number % 4]} {number}", "max_tokens": max_tokens, "ignore_eos": True})
        for number in range(n)
    ]


def jsonl(rows: Sequence[object]) -> bytes:
    return b"".join([json.dumps(each).encode() + b"\n" for each in rows])


def upload(client: openai.OpenAI, rows: Sequence[object], **fields: Any) -> FileObject:
    return client.files.create(file=("rows.jsonl", io.BytesIO(jsonl(rows))), purpose="batch", **fields)


def begin(client: openai.OpenAI, rows: Sequence[dict[str, Any]], **fields: Any) -> Batch:
    file = upload(client, rows)
    return client.batches.create(
        input_file_id=file.id, endpoint=rows[0]["url"], **{"completion_window": "24h", **fields}
    )


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = TIMEOUT_S) -> Batch:
    until = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(batch_id)).status in ("validating", "in_progress", "cancelling"):
        assert time.monotonic() < until, batch
        time.sleep(0.05)
    return batch


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file of results, by ``custom_id``."""
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "a row is there twice"
    return by_id


def texts(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {custom_id: line["response"]["body"]["choices"][0]["text"] for custom_id, line in found.items()}


def refusal(error: openai.APIStatusError) -> tuple[int, str, str]:
    assert isinstance(error.body, dict)
    return error.status_code, error.body["uma_code"], error.body["message"]


# -- answers --


@pytest.mark.parametrize(
    ("url", "bodies"),
    [
        (
            CHAT,
            [{"model": "embedded", "messages": [{"role": "user", "content": q}], "max_tokens": 12} for q in QUESTIONS],
        ),
        (COMPLETE, [{"model": "embedded", "prompt": q, "max_tokens": 12} for q in QUESTIONS]),
        (RESPOND, [{"model": "embedded", "input": q, "max_output_tokens": 12} for q in QUESTIONS]),
        (EMBED, [{"model": "embedded", "input": q} for q in QUESTIONS]),
    ],
)
def test_the_answers_are_those_of_the_endpoint(gateway: Gateway, url: str, bodies: list[dict[str, Any]]) -> None:
    def essence(answer: dict[str, Any]) -> Any:
        found = answer.get("choices") or answer.get("output") or answer["data"]
        for each in found:
            each.pop("id", None)
        return found, answer["usage"]["total_tokens"]

    client = gateway.openai()
    rows = [row(f"row {number} é", body, url) for number, body in enumerate(bodies)]
    batch = ended(client, begin(client, rows, metadata={"night": "1"}).id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert batch.metadata == {"night": "1"}
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 3, "failed": 0, "total": 3}
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    found = lines(client, batch.output_file_id)
    with gateway.http() as http:
        for each in rows:
            line = found[each["custom_id"]]
            assert (line["response"]["status_code"], line["error"]) == (200, None)
            assert line["response"]["request_id"].startswith("req-")
            answer, alone = line["response"]["body"], http.post(url, json=each["body"]).json()
            if url == EMBED:
                pairs = zip(answer["data"][0]["embedding"], alone["data"][0]["embedding"], strict=True)
                assert all(a == pytest.approx(b, abs=1e-3) for a, b in pairs)
            else:
                assert essence(answer) == essence(alone)
    assert batch.output_file_id is not None
    kept = client.files.retrieve(batch.output_file_id)
    assert (kept.purpose, kept.bytes) == ("batch_output", len(client.files.content(kept.id).content))
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert client.files.delete(file_id).deleted


def test_bad_rows_go_into_the_file_of_errors_and_the_others_are_answered(gateway: Gateway) -> None:
    client = gateway.openai()
    good = {"prompt": "Once", "max_tokens": 3}
    rows = [
        row("good", good),
        row("type", {**good, "temperature": "hot"}),
        row("range", {**good, "temperature": 1e9}),
        row("model", {**good, "model": "missing"}),
        row("nothing", {}),
        row("stream", {**good, "stream": True}),
        row("dear", {**good, "stop": [1e300] * 2000}),
        row("best", {**good, "best_of": 7}),
        row("last", good),
    ]
    batch = ended(client, begin(client, rows).id)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 2, "failed": 7, "total": 9}
    assert lines(client, batch.output_file_id).keys() == {"good", "last"}
    errors = {custom_id: line["response"] for custom_id, line in lines(client, batch.error_file_id).items()}
    statuses = {"type": 400, "range": 400, "model": 404, "nothing": 400, "stream": 400, "dear": 413, "best": 400}
    assert {custom_id: response["status_code"] for custom_id, response in errors.items()} == statuses
    assert errors["type"]["body"]["error"]["param"] == "temperature"
    assert "cannot be streamed" in errors["stream"]["body"]["error"]["message"]


def test_cancelled_rows_that_have_an_answer_keep_it(gateway: Gateway) -> None:
    client = gateway.openai()
    rows = [*completions(4, 2), *[row(f"long-{n}", {"prompt": f"{n}", "ignore_eos": True}) for n in range(40)]]
    batch = begin(client, rows)
    while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 4:
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert (batch.status, batch.cancelled_at is None, batch.cancelling_at is None) == ("cancelled", False, False)
    assert lines(client, batch.output_file_id).keys() >= {f"row-{n}" for n in range(4)}
    gateway.daemon.wait_until(lambda snapshot: not snapshot["running"], "nothing runs")
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(batch.id)
    assert refusal(caught.value)[1] == "E_GATEWAY_BATCH_ENDED"


def test_lists_have_pages(gateway: Gateway) -> None:
    client = gateway.openai()
    files = [upload(client, completions(1)) for _ in range(3)]
    ids = [file.id for file in files]
    assert [file.id for file in client.files.list(limit=3)][:3] == ids[::-1]
    page = client.files.list(limit=1, after=ids[2])
    assert ([file.id for file in page.data], page.has_more) == ([ids[1]], True)
    upward = client.files.list(order="asc", after=ids[0], purpose="batch")
    assert [file.id for file in upward] == ids[1:]
    made = [
        client.batches.create(input_file_id=ids[0], endpoint=COMPLETE, completion_window="24h").id for _ in range(3)
    ]
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:0:-1]
    assert [batch.id for batch in client.batches.list(limit=1, after=made[1]).data] == made[:1]
    for batch_id in made:
        ended(client, batch_id)
    for file_id in ids:
        client.files.delete(file_id)
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "batch_none"}):
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            client.batches.list(**wrong)


# -- what is refused --


def test_a_bad_file_is_refused_at_once_with_the_line(gateway: Gateway) -> None:
    client = gateway.openai()
    n_before = len(client.files.list().data)
    good = row("a", {"prompt": "x"})
    for bad, words in (
        ([good, "text"], "line 2: expected `object`"),
        ([good, good], "line 2: custom_id 'a' is also that of line 1"),
        ([good, row("b", {}, CHAT)], "line 2: url is /v1/chat/completions"),
        ([row("b", {}, "/v1/models")], "line 1: url is '/v1/models'"),
        ([], "no rows"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            upload(client, bad)
        assert words in refusal(caught.value)[2]
    assert len(client.files.list().data) == n_before
    assert not [*store_of(gateway.daemon, "uploads").iterdir()]


def test_forms_that_are_refused(gateway: Gateway) -> None:
    good = ("rows.jsonl", jsonl(completions(1)))
    with gateway.http() as client:

        def sent(status: int, **options: Any) -> str:
            answer = client.post("/v1/files", **options)
            assert answer.status_code == status, answer.text
            message: str = answer.json()["error"]["message"]
            return message

        assert "multipart/form-data" in sent(400, json={"file": "x"})
        assert "purpose" in sent(400, files={"file": good})
        assert "for batches only" in sent(400, files={"file": good}, data={"purpose": "fine-tune"})
        assert "no part that is called file" in sent(400, files={"data": good}, data={"purpose": "batch"})
        assert "two files" in sent(400, files=[("file", good), ("file", good)], data={"purpose": "batch"})
        assert "16 parts" in sent(400, files={f"f{n}": good for n in range(20)})
        assert "4,096 bytes" in sent(400, files={"file": good}, data={"purpose": "b" * 5000})
        late = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
        assert "seconds" in sent(400, files={"file": good}, data=late)
        form = {"content-type": "multipart/form-data; boundary=x"}
        broken = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
        assert "breaks off" in sent(400, content=broken, headers=form)
        assert "not valid" in sent(400, content=b"--y\r\n", headers=form)
        assert "not valid" in sent(400, content=b"--x\r\n" + b"a" * 9000, headers=form)
        kept = client.post("/v1/files", files={"file": good}, data={**late, "expires_after[seconds]": "3600"})
        assert kept.json()["expires_at"] - kept.json()["created_at"] == 3600
        assert client.delete(f"/v1/files/{kept.json()['id']}").json()["deleted"] is True


def test_batches_that_are_refused(gateway: Gateway) -> None:
    client = gateway.openai()
    file = upload(client, completions(1))
    for fields, status, words in (
        ({"input_file_id": "file-none"}, 404, "no file 'file-none'"),
        ({"endpoint": CHAT}, 400, "have the url /v1/completions"),
        ({"completion_window": "1y"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {f"{n}": "" for n in range(17)}}, 400, "metadata"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            client.batches.create(
                **{"input_file_id": file.id, "endpoint": COMPLETE, "completion_window": "24h", **fields}
            )
        assert caught.value.status_code == status
        assert words in refusal(caught.value)[2]
    client.files.delete(file.id)
    for ask in (client.files.retrieve, client.files.content, client.files.delete, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError):
            ask("file-none")


def test_a_file_that_a_batch_reads_is_not_deleted(gateway: Gateway) -> None:
    client = gateway.openai()
    batch = begin(client, [row(f"{n}", {"prompt": f"{n}", "ignore_eos": True}) for n in range(20)])
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(batch.input_file_id)
    assert refusal(caught.value)[1] == "E_GATEWAY_FILE_IN_USE"
    client.batches.cancel(batch.id)
    ended(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_large_file_is_never_whole_in_memory(gateway: Gateway) -> None:
    process = psutil.Process(gateway.daemon.metrics()["gateway"]["pid"])
    filler = {"prompt": "a" * 100_000}
    rows = [row(f"{n}", filler) for n in range(800)]
    content = jsonl(rows)
    client = gateway.openai()
    client.files.delete(upload(client, rows[:10]).id)
    before = process.memory_info().rss
    file = client.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose="batch")
    assert process.memory_info().rss - before < len(content) / 2
    assert file.bytes == len(content)
    client.files.delete(file.id)


# -- tenants --


def store_of(daemon: Daemon, *parts: str) -> Path:
    return daemon.socket.parent.joinpath("state-home", "uma-trio", "files", *parts)


def test_tenants_see_their_own_and_have_quotas(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    keys = tmp_path / "keys.yaml"
    found = {
        name: invoke("keys", "create", name, "--file", keys, *limits).stdout.strip()
        for name, limits in (("alice", ("--max-requests", 2)), ("bob", ()))
    }
    flags = ("--parallel", "4", "--http", "0", "--http-keys", str(keys), "--max-files", "2", "--max-files-mb", "1")
    with real_daemon(*flags) as daemon:
        url = f"{daemon.http_url()}/v1"
        alice, bob = (
            openai.OpenAI(base_url=url, api_key=found[name], max_retries=0, timeout=TIMEOUT_S)
            for name in ("alice", "bob")
        )
        with alice, bob:
            batch = ended(alice, begin(alice, completions(6)).id)
            assert batch.status == "completed"
            assert batch.output_file_id is not None
            assert len(lines(alice, batch.output_file_id)) == 6
            talk = alice.conversations.create()
            ask: dict[str, Any] = {"model": "embedded", "input": "The capital of France is", "max_output_tokens": 4}
            response, turn = alice.responses.create(**ask), alice.responses.create(**ask, conversation=talk.id)
            for act, known in (
                (bob.files.retrieve, batch.input_file_id),
                (bob.files.content, batch.output_file_id),
                (bob.files.delete, batch.output_file_id),
                (bob.batches.retrieve, batch.id),
                (bob.batches.cancel, batch.id),
                (bob.responses.delete, response.id),
                (bob.responses.delete, turn.id),
                (bob.conversations.delete, talk.id),
                (lambda id: bob.post("/session/close", cast_to=object, body={"session_id": id}), talk.id),
            ):
                assert not_found(act, known) == not_found(act, "x" * len(known)), "as if there were none"
            assert alice.conversations.delete(talk.id).deleted
            assert alice.responses.delete(response.id) is None
            assert (bob.files.list().data, bob.batches.list().data) == ([], [])
            for create in (
                lambda: upload(alice, completions(1)),
                lambda: alice.batches.create(
                    input_file_id=batch.input_file_id, endpoint=COMPLETE, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.APIStatusError) as caught:
                    create()
                assert refusal(caught.value)[:2] == (413, "E_GATEWAY_FILES_FULL")
            with pytest.raises(openai.APIStatusError) as caught:
                upload(bob, [row(f"{n}", {"prompt": "a" * 100_000}) for n in range(11)])
            assert refusal(caught.value)[:2] == (413, "E_GATEWAY_FILES_FULL")
            assert upload(bob, completions(1)).id


def not_found(ask: Callable[[str], object], id: str) -> str:
    """The error about ``id``, whose name is left out."""
    with pytest.raises(openai.NotFoundError) as caught:
        ask(id)
    error = caught.value.response.json()["error"]
    return json.dumps({**error, "request_id": ""}).replace(id, "ID")


# -- kills --


@pytest.mark.thorough
def test_a_batch_survives_kills_of_gateway_and_daemon_and_computes_no_finished_row_twice(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    flags = ("--parallel", "4", "--http", "0", "--threads", "1")
    rows = completions(40, 32)
    with real_daemon(*flags) as daemon, Gateway.of(daemon).openai() as client:
        batch = ended(client, begin(client, rows).id)
        undisturbed = texts(lines(client, batch.output_file_id))
    assert undisturbed.keys() == {each["custom_id"] for each in rows}

    socket, log_file = tmp_path / "uma.sock", tmp_path / "log"
    written: list[bytes] = []

    def output() -> bytes:
        files = [*(tmp_path / "state-home/uma-trio/files/content").iterdir()]
        return max((file.read_bytes() for file in files if b'"response"' in file.read_bytes()), key=len, default=b"")

    def grown(by: int) -> None:
        """Wait until so many more rows have answers, and note what is written."""
        n_before, until = output().count(b"\n"), time.monotonic() + TIMEOUT_S
        while output().count(b"\n") < min(n_before + by, len(rows)):
            assert time.monotonic() < until
            time.sleep(0.005)
        written.append(output())

    with started(*flags, socket=socket, log_file=log_file) as daemon:
        wait_ready(daemon)
        with openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none", timeout=TIMEOUT_S) as client:
            batch_id = begin(client, rows).id
        for by in (3, 5, 2):
            grown(by)
            os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
        grown(4)
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    log_file.unlink()
    with started(*flags, socket=socket, log_file=log_file) as daemon:
        wait_ready(daemon)
        grown(4)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        written.append(output())
    log_file.unlink()
    with (
        real_daemon(*flags, folder=tmp_path) as daemon,
        openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none", timeout=TIMEOUT_S) as client,
    ):
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        content = client.files.content(batch.output_file_id).content
        assert texts(lines(client, batch.output_file_id)) == undisturbed
    for before in written:
        whole = before[: before.rfind(b"\n") + 1]
        assert content.startswith(whole), "a finished row was computed again"


def test_rows_without_an_answer_at_the_end_of_the_window_are_expired(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    rows = [*completions(2, 2), *[row(f"long-{n}", {"prompt": f"{n}", "ignore_eos": True}) for n in range(9)]]
    with (
        real_daemon("--parallel", "2", "--http", "0", folder=tmp_path) as daemon,
        openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none", timeout=TIMEOUT_S) as client,
    ):
        batch = begin(client, rows)
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 2:
            time.sleep(0.02)
        store = Store(store_of(daemon), max_bytes=1, max_files=1)
        store.change(batch.id, lambda known: msgspec.structs.replace(known, expires_at=int(time.time())))
        os.kill(daemon.metrics()["gateway"]["pid"], signal.SIGKILL)
        batch = ended(client, batch.id)
        assert (batch.status, batch.expired_at is None) == ("expired", False)
        answered, errors = lines(client, batch.output_file_id), lines(client, batch.error_file_id)
        assert answered.keys() | errors.keys() == {each["custom_id"] for each in rows}
        assert {"row-0", "row-1"} <= answered.keys()
        assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}
