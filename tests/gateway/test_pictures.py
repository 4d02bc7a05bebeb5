"""Pictures in every API of the gateway, sent by the clients that people use."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import anyio
import httpx
import ollama
import openai
import pytest

from tests.support.commands import invoke
from tests.support.pictures import drawn, jpeg_header, png
from tests.support.projectors import N_ROWS, projector_file
from tests.support.real_daemon import Daemon, real_daemon
from tests.support.serving import settings
from uma_trio.gateway.application import make_app
from uma_trio.gateway.picture_urls import PictureUrls
from uma_trio.protocol import sealed_memory

QUESTION = "What is the capital of France?"
PICTURE = png(drawn(1))
BASE64 = base64.b64encode(PICTURE).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
MIME = base64.encodebytes(PICTURE).decode().replace("\n", "\r\n")
MODEL = "embedded"
FRAME_BYTES = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    projector = projector_file(tmp_path_factory.mktemp("projector"))
    with real_daemon("--http", "0", "--mmproj", str(projector), "--max-frame-bytes", str(FRAME_BYTES)) as found:
        yield found


@pytest.fixture(scope="module")
def text_only(daemon: Daemon) -> int:
    """Tokens of the question without a picture."""
    answer = daemon.ask(messages=[{"role": "user", "content": QUESTION}], max_tokens=1, stream=False)
    tokens: int = answer.last["usage"]["prompt_tokens"]
    return tokens


@pytest.fixture(scope="module")
def openai_client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none", max_retries=0) as client:
        yield client


def question_of(url: str) -> list[Any]:
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def test_the_openai_client(openai_client: openai.OpenAI, text_only: int) -> None:
    answer = openai_client.chat.completions.create(model=MODEL, messages=question_of(DATA_URL), max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == text_only + N_ROWS
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=question_of(DATA_URL), max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@pytest.mark.skipif(not sealed_memory.EXISTS, reason="this system has no sealed memory; Linux has")
def test_a_large_file_goes_to_the_daemon_as_a_descriptor(openai_client: openai.OpenAI, text_only: int) -> None:
    large = base64.encodebytes(PICTURE + bytes(FRAME_BYTES)).decode()  # in lines; decoders ignore what follows
    for fields in ({"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}):
        found = openai_client.chat.completions.create(
            model=MODEL, messages=question_of(f"data:image/png;base64,{large}"), max_tokens=1, **fields
        )
        usage = [each.usage for each in found][-1] if fields["stream"] else found.usage
        assert usage.prompt_tokens == text_only + N_ROWS
    with pytest.raises(openai.BadRequestError, match=r"image_url\.url: Invalid base64"):
        broken = f"data:image/png;base64,{large[: FRAME_BYTES // 4]}?==="
        openai_client.chat.completions.create(model=MODEL, messages=question_of(broken), max_tokens=1)


def test_the_openai_client_with_responses(openai_client: openai.OpenAI, text_only: int) -> None:
    content: Any = [
        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    answer = openai_client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=16
    )
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.input_tokens == text_only + N_ROWS
    assert not answer.store
    stored = openai_client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=16, temperature=0, store=True
    )
    assert openai_client.responses.retrieve(stored.id).output_text == stored.output_text
    following = openai_client.responses.create(
        model=MODEL, input="And now?", previous_response_id=stored.id, max_output_tokens=8
    )
    assert following.usage is not None
    assert following.usage.input_tokens > text_only + N_ROWS


def test_the_anthropic_client(daemon: Daemon, text_only: int) -> None:
    with anthropic.Anthropic(base_url=daemon.http_url(), api_key="none", max_retries=0) as client:
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
        question: Any = {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}
        answer = client.messages.create(model=MODEL, messages=[question], max_tokens=8)
        assert answer.content[0].type == "text"
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == text_only + N_ROWS
        image["source"]["data"] = MIME
        counted = client.messages.count_tokens(model=MODEL, messages=[question])
        assert counted.input_tokens == text_only + N_ROWS
        called: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]}
        result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}]}
        tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
        screenshot = client.messages.create(model=MODEL, messages=[question, called, result], tools=tools, max_tokens=8)
        assert screenshot.usage.input_tokens + (screenshot.usage.cache_read_input_tokens or 0) > text_only + 2 * N_ROWS


def test_the_ollama_client(daemon: Daemon, text_only: int) -> None:
    with ollama.Client(host=daemon.http_url()) as client:
        answer = client.chat(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION, "images": [PICTURE]}],
            options={"num_predict": 8},
        )
        assert answer.message.content
        assert answer.prompt_eval_count == text_only + N_ROWS
        generated = client.generate(model=MODEL, prompt=QUESTION, images=[BASE64], options={"num_predict": 8})
        assert generated.prompt_eval_count == text_only + N_ROWS
        assert "vision" in (client.show(MODEL).capabilities or ())


def test_models_say_that_they_see(daemon: Daemon, openai_client: openai.OpenAI) -> None:
    [model] = openai_client.models.list().data
    assert "vision" in model.model_dump()["capabilities"]
    assert httpx.get(f"{daemon.http_url()}/props").json()["modalities"] == {"vision": True, "audio": False}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "https://example.com/cat.png",
            "not fetched from other servers here: send the file itself, .* --http-fetch-pictures",
        ),
        ("file:///etc/passwd", "this is no data URL"),
        ("data:image/png;base64,?", "base64"),
        (f"data:image/png;base64,{base64.b64encode(b'hello').decode()}", "a picture is PNG"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(openai_client: openai.OpenAI, url: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        openai_client.chat.completions.create(model=MODEL, messages=question_of(url), max_tokens=8)
    assert (caught.value.param or "").startswith("messages[0].content[1]")


DAMAGED = base64.b64encode(PICTURE[:200]).decode()
CUT = base64.b64encode(jpeg_header(640, 480)[:-2]).decode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [("%%%%", "base64"), (DAMAGED, "it is damaged, or no picture"), (CUT, "ends in the middle of its pixels")],
)
def test_errors_name_the_field_that_has_the_picture(daemon: Daemon, data: str, reason: str) -> None:
    url = f"data:image/png;base64,{data}"
    anthropic_image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    response_image = {"type": "input_image", "image_url": url}
    ollama_message = {"role": "user", "content": QUESTION, "images": [BASE64, data]}
    for path, body, field in (
        ("/v1/chat/completions", {"messages": question_of(url)}, "messages[0].content[1].image_url.url"),
        ("/v1/chat/completions/render", {"messages": question_of(url)}, "messages[0].content[1].image_url.url"),
        ("/v1/responses", {"input": [{"role": "user", "content": [response_image]}]}, "input[0].content[0].image_url"),
        (
            "/v1/messages",
            {"system": QUESTION, "messages": [{"role": "user", "content": [anthropic_image]}], "max_tokens": 1},
            "messages[0].content[0].source.data",
        ),
        ("/api/generate", {"prompt": QUESTION, "images": [data]}, "images[0]"),
        ("/api/chat", {"messages": [ollama_message]}, "messages[0].images[1]"),
    ):
        answer = httpx.post(f"{daemon.http_url()}{path}", json={"model": MODEL, **body}, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        message: str = error if isinstance(error, str) else error["message"]
        assert message.startswith(f"{field}: "), message
        assert reason in message
        if "/v1/chat" in path:
            assert error["param"] == field


def test_a_picture_by_url_that_an_answer_describes_is_fetched_once(
    daemon: Daemon, text_only: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []

    async def get(self: PictureUrls, url: str, left: list[int]) -> bytes:
        wanted.append(url)
        return PICTURE

    async def answer() -> httpx.Response:
        app = make_app(settings(socket=daemon.socket, http_fetch_pictures=True))
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"messages": question_of("https://pictures.example/cat.png"), "max_tokens": 1, "verbose": True}
            return await client.post("/v1/chat/completions", json=body, timeout=60)

    monkeypatch.setattr(PictureUrls, "_get", get)
    found = anyio.run(answer).raise_for_status().json()
    assert (found["usage"]["prompt_tokens"], wanted) == (text_only + N_ROWS, ["https://pictures.example/cat.png"])
    assert QUESTION in found["__verbose"]["prompt"]


def test_ollamas_images_are_no_data_urls(daemon: Daemon) -> None:
    body = {"model": MODEL, "prompt": QUESTION, "images": [DATA_URL]}
    answer = httpx.post(f"{daemon.http_url()}/api/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("images[0] is a data URL: leave out")


def test_what_asks_for_the_prompt_takes_the_pictures_of_a_request(daemon: Daemon, text_only: int) -> None:
    chats = [f"/v1/chat/completions{end}" for end in ("", "/input_tokens", "/render")]
    for path in [*chats, "/tokenize", "/apply-template", "/v1/responses/input_tokens", "/v1/responses/render"]:

        def asked(url: str, path: str = path) -> httpx.Response:
            body: dict[str, Any] = {"messages": question_of(url), "verbose": True, "max_tokens": 1}
            if "responses" in path:
                content = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": url}]
                body = {"input": [{"role": "user", "content": content}]}
            return httpx.post(f"{daemon.http_url()}{path}", json=body, timeout=60)

        refused = asked("https://example.com/cat.png")
        assert refused.status_code == 400
        assert "not fetched from other servers here" in refused.json()["error"]["message"], path
        found = asked(DATA_URL)
        assert found.status_code == 200, found.text
        counted = found.json().get("input_tokens", len(found.json().get("token_ids", ())) or found.json().get("count"))
        assert counted in (None, text_only + N_ROWS)


def test_pictures_of_the_assistant_are_refused(daemon: Daemon) -> None:
    answer = httpx.post(
        f"{daemon.http_url()}/v1/chat/completions",
        json={"messages": [{"role": "assistant", "content": question_of(DATA_URL)[0]["content"]}]},
    )
    assert answer.status_code == 400
    assert "'image_url' is not supported here; send text" in answer.json()["error"]["message"]


def test_a_photo_of_eight_mebibytes_needs_no_setting(openai_client: openai.OpenAI, text_only: int) -> None:
    photo = png(drawn(8, 1672, 1672))
    assert len(photo) > 8 << 20
    url = f"data:image/png;base64,{base64.b64encode(photo).decode()}"
    answer = openai_client.chat.completions.create(model=MODEL, messages=question_of(url), max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == text_only + N_ROWS


def test_a_picture_that_is_too_large_for_a_request_has_a_fitting_hint(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "huge.png"
    file.write_bytes(PICTURE + bytes(31 << 20))  # two go as descriptors, and no frame has room for the third
    asked = invoke("ask", *["--image", str(file)] * 3, QUESTION, UMA_SOCKET=str(daemon.socket))
    assert "smaller pictures" in asked.stderr
    assert "--max-frame-bytes" in asked.stderr
