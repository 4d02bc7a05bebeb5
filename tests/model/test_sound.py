"""Requests with sound: through the daemon, its socket, HTTP and the command line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.chat_completion_content_part_input_audio_param import InputAudio
from openai.types.responses import ResponseInputAudioParam

from tests.support.commands import invoke
from tests.support.gpu import agree
from tests.support.pictures import drawn, png
from tests.support.projectors import projector_file
from tests.support.real_daemon import Answer, Daemon, real_daemon
from tests.support.sounds import flac_header, riff, wav

QUESTION = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    projector = projector_file(tmp_path_factory.mktemp("projector"), "qwen2a")
    with real_daemon("--http", "0", "--mmproj", str(projector)) as found:
        yield found


def ask(daemon: Daemon, *parts: dict[str, Any], **fields: Any) -> Answer:
    messages = [{"role": "user", "content": [*parts]}]
    return daemon.ask(messages=messages, **{"max_tokens": 8, "temperature": 0, "stream": False, **fields})


def sound(data: bytes) -> dict[str, Any]:
    return {"type": "audio", "data": base64.b64encode(data).decode()}


def test_sound_is_rows_of_the_prompt_and_is_encoded_once(daemon: Daemon) -> None:
    model = daemon.ask(type="models").last["models"][0]
    assert "audio" in model["capabilities"]
    assert "vision" not in model["capabilities"]
    before = daemon.metrics()["pictures"]
    without = ask(daemon, QUESTION).last["usage"]["prompt_tokens"]
    first, again = (ask(daemon, sound(wav(1)), QUESTION) for _ in range(2))
    other = ask(daemon, sound(wav(2)), QUESTION)
    assert first.last["usage"]["prompt_tokens"] > without + 10
    assert agree(first.text, again.text)
    assert again.last["usage"]["cached_tokens"] == again.last["usage"]["prompt_tokens"] - 1
    assert other.last["usage"]["cached_tokens"] < without
    found = daemon.metrics()["pictures"]
    assert [found[name] - before[name] for name in ("encoded_total", "found_total")] == [2, 1]


def test_openai_and_the_command_line_send_the_same(daemon: Daemon, tmp_path: Path) -> None:
    data = wav(3)
    expected = ask(daemon, sound(data), QUESTION)
    heard: InputAudio = {"data": base64.b64encode(data).decode(), "format": "wav"}
    with openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="embedded",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": heard},
                        {"type": "text", "text": "What is this?"},
                    ],
                }
            ],
            max_tokens=8,
            temperature=0,
        )
        part = ResponseInputAudioParam(type="input_audio", input_audio=heard)
        asked_again: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "What is this?"}]}]
        response = client.responses.create(model="embedded", input=asked_again, max_output_tokens=16, temperature=0)
    assert agree(answer.choices[0].message.content or "", expected.text)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.last["usage"]["prompt_tokens"]
    assert response.usage is not None
    assert response.usage.input_tokens == expected.last["usage"]["prompt_tokens"]
    said = expected.text.strip()
    assert agree(response.output_text[: len(said)], said)
    file = tmp_path / "a song.wav"
    file.write_bytes(data)
    options = ("--no-stream", "--json", "--max-tokens", "8", "--temp", "0")
    asked = invoke("ask", "--audio", str(file), *options, QUESTION["text"], UMA_SOCKET=str(daemon.socket))
    assert agree(json.loads(asked.stdout)["text"], expected.text)
    talk = f"/audio {tmp_path / 'none.wav'}\n/image {file}\n/image\n'{file}'\n{QUESTION['text']}\n/retry\n/stats\n"
    talked = invoke("chat", "--max-tokens", "8", "--temp", "0", stdin=talk, UMA_SOCKET=str(daemon.socket))
    assert f"cannot read the sound {tmp_path / 'none.wav'}: No such file" in talked.stderr
    assert f"{expected.last['usage']['prompt_tokens']} prompt + " in talked.stderr
    refused = invoke("ask", "--audio", str(tmp_path / "none.wav"), "Why?", UMA_SOCKET=str(daemon.socket))
    assert "cannot read the sound" in refused.stderr


def test_a_file_is_transcribed(daemon: Daemon) -> None:
    """The model cannot, but it is asked; the request is the one that a chat would be."""
    data = wav(4)
    expected = ask(daemon, sound(data), {"type": "text", "text": "Transcribe this audio."}, max_tokens=None)
    with openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none", max_retries=0) as client:
        found = client.audio.transcriptions.create(model="embedded", file=("a.wav", data))
        assert agree(found.text, expected.text.strip())
        assert found.usage is not None
        assert found.usage.to_dict()["input_tokens"] == expected.last["usage"]["prompt_tokens"]
        with pytest.raises(openai.BadRequestError, match=r"file: .*sound is WAV, MP3 or FLAC"):
            client.audio.transcriptions.create(model="embedded", file=("a.wav", b"hello"))
    url = f"{daemon.http_url()}/v1/audio/transcriptions"
    fields = {"response_format": "text", "language": "en", "prompt": "Ada"}
    plain = httpx.post(url, files={"file": ("a.wav", data)}, data=fields, timeout=60)
    assert (plain.status_code, plain.headers["content-type"].split(";")[0]) == (200, "text/plain")
    refused = httpx.post(url, files={"other": ("a.wav", b"hi")}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")
    refused = httpx.post(url, files={"file": ("a.wav", bytes(13 << 20))}, timeout=60)
    assert refused.status_code == 413


@pytest.mark.parametrize(
    ("part", "code", "reason"),
    [
        ({"type": "image", "data": base64.b64encode(png(drawn(1))).decode()}, "E_MODEL_NO_VISION", "takes sound only"),
        (sound(png(drawn(1))), "E_PROTO_BAD_REQUEST", "the file is a picture"),
        (sound(b"hello"), "E_PROTO_BAD_REQUEST", "sound is WAV, MP3 or FLAC"),
        (sound(flac_header(100_000)), "E_PROTO_BAD_REQUEST", "it may last 1800 s"),
        (sound(riff(bytes(2000), rate=1)), "E_LIMIT_CONTEXT", "the sound has 24"),
        (sound(flac_header(100)), "E_PROTO_BAD_REQUEST", "cannot be decoded|lasts 0.00"),
        (sound(wav(1)[:44]), "E_PROTO_BAD_REQUEST", "cannot be decoded|lasts 0.00"),
    ],
)
def test_what_is_wrong_is_named(daemon: Daemon, part: dict[str, Any], code: str, reason: str) -> None:
    refused = ask(daemon, part, QUESTION)
    assert refused.code == code
    assert any(each in refused.last["message"] for each in reason.split("|")), refused.last
