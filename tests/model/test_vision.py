"""Requests with pictures: through the daemon and its socket."""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import uma_trio
from tests.support.commands import invoke
from tests.support.gpu import agree
from tests.support.pictures import bombs, drawn, gif, png, with_orientation
from tests.support.projectors import N_ROWS, projector_file
from tests.support.real_daemon import ROOT, Answer, Daemon, real_daemon
from uma_trio.client import open_client
from uma_trio.models.packaged import EMBEDDED
from uma_trio.protocol import sealed_memory
from uma_trio.protocol.framing import frame

QUESTION = "What is this?"
PHOTO = ROOT / "build" / "llama.cpp" / "tools" / "mtmd" / "test-1.jpeg"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    projector = projector_file(tmp_path_factory.mktemp("projector"))
    with real_daemon("--mmproj", str(projector)) as found:
        yield found


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode()}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def ask(daemon: Daemon, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    return daemon.ask(messages=messages, **{"max_tokens": 8, "temperature": 0, "stream": False, **fields})


def scores(daemon: Daemon, *parts: dict[str, Any]) -> list[float]:
    """Log-probabilities for the first token, which a picture changes, although it means nothing to this model."""
    answer = ask(daemon, user(*parts), logprobs=4, max_tokens=1, cache_prompt=False)
    return [round(each["logprob"], 3) for each in answer.last["logprobs"][0]["top_logprobs"]]


def test_what_is_in_a_picture_and_where_it_stands_is_what_the_model_sees(daemon: Daemon) -> None:
    one, other = picture(png(drawn(1))), picture(png(drawn(2)))
    question = text(QUESTION)
    seen = [
        scores(daemon, *parts)
        for parts in ([question], [one, question], [other, question], [question, one], [one, other, question])
    ]
    assert all(a != b for n, a in enumerate(seen) for b in seen[:n]), seen
    assert scores(daemon, one, question) == seen[1]


def test_rows_of_pictures_count_as_tokens_of_the_prompt(daemon: Daemon) -> None:
    without, one, two = (
        ask(daemon, user(*[picture(png(drawn(n))) for n in range(pictures)], text(QUESTION))).last["usage"]
        for pictures in range(3)
    )
    assert one["prompt_tokens"] == without["prompt_tokens"] + N_ROWS
    assert two["prompt_tokens"] == without["prompt_tokens"] + 2 * N_ROWS


def test_json_and_cbor_are_the_same_and_an_equal_picture_is_in_the_kv_cache(daemon: Daemon) -> None:
    data = png(drawn(3))
    first = ask(daemon, user(picture(data), text(QUESTION)))
    again = ask(daemon, user({"type": "image", "data": data}, text(QUESTION)), encoding="cbor")
    assert agree(first.text, again.text)
    assert again.last["usage"]["cached_tokens"] == again.last["usage"]["prompt_tokens"] - 1


def test_a_text_cannot_spell_a_picture(daemon: Daemon) -> None:
    one = picture(png(drawn(1)))
    for spelled in ("<image>", "<__media__>", "<media:0>"):
        alone = ask(daemon, user(text(spelled))).last["usage"]["prompt_tokens"]
        found = ask(daemon, user(one, text(spelled)))
        assert found.last["usage"]["prompt_tokens"] == alone + N_ROWS
    refused = daemon.wire()
    with refused as wire:
        body = b'{"id": "r", "messages": [{"role": "user", "content": "\\udfbf"}]}'
        wire.send_bytes(frame(body))
        assert wire.answer().code == "E_PROTO_INVALID_JSON"


def test_a_session_with_a_picture_goes_on(daemon: Daemon) -> None:
    first = ask(daemon, user(picture(png(drawn(4))), text(QUESTION)), session_id="album")
    again = ask(daemon, user(text("And what is this?")), session_id="album")
    assert again.reason in ("stop", "length")
    usage = again.last["usage"]
    assert usage["prompt_tokens"] > first.last["usage"]["prompt_tokens"] + N_ROWS
    assert usage["cached_tokens"] >= first.last["usage"]["prompt_tokens"]
    third = ask(daemon, user(picture(png(drawn(5)))), session_id="album")
    assert third.last["usage"]["cached_tokens"] >= usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            user({"type": "image", "path": "a.png", "descriptor": False}),
            r'messages\[0\]\.content\[0\]: a part of type image has data or "descriptor": true, and no text',
        ),
        (user({"type": "text", "data": "aGk="}), "a part of type text has text, and no data"),
        (user({"type": "image", "data": "?"}), "data"),
        ([{"role": "assistant", "content": [picture(b"hi")]}, *user(text("?"))], "only messages of role user or tool"),
        (user(text("?"), picture(b"hello")), r"messages\[0\]\.content\[1\]: .* a picture is PNG"),
        (user(*[picture(b"hello")] * 65), "65 pictures; at most 64"),
        (user({"type": "audio", "data": "aGk="}), "this model cannot hear: its projector takes pictures only"),
    ],
)
def test_what_is_wrong_is_named(daemon: Daemon, messages: list[dict[str, Any]], reason: str) -> None:
    refused = ask(daemon, messages)
    assert refused.code in ("E_PROTO_BAD_REQUEST", "E_MODEL_NO_AUDIO")
    assert re.search(reason, refused.last["message"]), refused.last


def test_a_model_without_a_projector_says_how_to_get_one(tmp_path: Path) -> None:
    shutil.copy(EMBEDDED, tmp_path / "model.gguf")
    with real_daemon("--model", str(tmp_path / "model.gguf")) as daemon:
        refused = ask(daemon, user(text(QUESTION), picture(png(drawn(1)))))
        assert refused.code == "E_MODEL_NO_VISION"
        assert "--mmproj FILE" in refused.last["message"]
        assert "vision" not in daemon.ask(type="models").last["models"][0]["capabilities"]


def test_a_projector_is_found_next_to_its_model(tmp_path: Path) -> None:
    projector_file(tmp_path)
    (tmp_path / "mmproj-of-another.gguf").write_bytes(b"GGUF" + bytes(100))
    shutil.copy(EMBEDDED, tmp_path / "model.gguf")
    with real_daemon("--model", str(tmp_path / "model.gguf")) as daemon:
        assert "vision" in daemon.ask(type="models").last["models"][0]["capabilities"]
        assert daemon.logged("the model sees pictures")


def test_a_projector_that_does_not_fit_is_an_error_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is no projector, but a model"), real_daemon("--mmproj", str(EMBEDDED)):
        pass


def test_ask_and_chat_send_files(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "a cat.png"
    file.write_bytes(png(drawn(6)))
    without = ask(daemon, user(text(QUESTION))).last["usage"]["prompt_tokens"]
    socket = {"UMA_SOCKET": str(daemon.socket)}
    options = ("--no-stream", "--json", "--max-tokens", "4")
    asked = invoke("ask", "--image", str(file), "--image", str(file), *options, QUESTION, **socket)
    assert json.loads(asked.stdout)["usage"]["prompt_tokens"] == without + 2 * N_ROWS
    talk = f"/image {tmp_path / 'none.png'}\n/image {file}\n{QUESTION}\n/retry\n/stats\n"
    talked = invoke("chat", "--max-tokens", "4", "--temp", "0", stdin=talk, **socket)
    assert f"cannot read the picture {tmp_path / 'none.png'}: No such file" in talked.stderr
    assert f"{without + N_ROWS} prompt + 4 tokens" in talked.stderr
    refused = invoke("ask", "--image", str(tmp_path / "none.png"), QUESTION, **socket)
    assert (refused.returncode, "cannot read the picture" in refused.stderr) == (2, True)


@pytest.mark.skipif(not sealed_memory.EXISTS, reason="this system has no sealed memory; Linux has")
def test_a_file_that_no_frame_has_room_for_comes_as_a_descriptor(daemon: Daemon, tmp_path: Path) -> None:
    small = png(drawn(7))
    expected = ask(daemon, user(picture(small), text(QUESTION)))
    large = small + bytes(17 << 20)  # decoders ignore what follows
    chat = user({"type": "image", "data": large}, text(QUESTION))
    assert agree(str(uma_trio.ask(chat, socket=daemon.socket, max_tokens=8, temperature=0)), expected.text)

    async def asked() -> str:
        async with open_client(daemon.socket, encoding="cbor") as client:
            return (await client.complete(messages=chat, max_tokens=8, temperature=0)).text or ""

    for backend in ("asyncio", "trio"):
        assert agree(anyio.run(asked, backend=backend), expected.text)
    (tmp_path / "large.png").write_bytes(large)
    options = ("--no-stream", "--max-tokens", "8", "--temp", "0")
    answer = invoke("ask", "--image", str(tmp_path / "large.png"), *options, QUESTION, UMA_SOCKET=str(daemon.socket))
    assert agree(answer.stdout.rstrip("\n"), expected.text.rstrip("\n")), answer.stderr


@pytest.mark.thorough
def test_nothing_else_waits_for_bad_pictures(daemon: Daemon) -> None:
    """A stream of somebody else goes on, and every bad picture costs its own request an error within bounds."""
    fine = set()
    with daemon.wire() as stream:
        stream.send(id="s", prompt="Once upon a time", max_tokens=200, ignore_eos=True, temperature=0)
        for name, data in bombs().items():
            answer = ask(daemon, user({"type": "image", "data": data}, text(QUESTION)), encoding="cbor")
            if answer.code is None:
                assert answer.reason in ("stop", "length"), (name, answer.last)
                fine.add(name)
            else:
                assert answer.code == "E_PROTO_BAD_REQUEST", (name, answer.last)
        many = ask(daemon, user(*[picture(png(drawn(100 + n))) for n in range(50)], text(QUESTION)))
        went_on = stream.answer()
    assert {"a flat PNG of 6,000 x 6,000", "a GIF with 10,000 frames"} <= fine
    assert many.reason in ("stop", "length")
    assert many.last["usage"]["prompt_tokens"] > 50 * N_ROWS
    assert (went_on.reason, len(went_on.ids)) == ("length", 200)
    [encoder] = encoders(daemon)
    assert encoder.memory_info().rss < 1 << 30


def test_a_gif_is_its_first_frame_and_exif_turns_a_picture(daemon: Daemon) -> None:
    one, two = gif([5]), gif([5, 200])
    assert scores(daemon, {"type": "image", "data": one}) == scores(daemon, {"type": "image", "data": two})
    if PHOTO.exists():
        turned = with_orientation(PHOTO.read_bytes(), 6)
        assert scores(daemon, picture(PHOTO.read_bytes())) != scores(daemon, picture(turned))


@pytest.mark.thorough
def test_more_rows_than_the_context_has_are_refused_before_all_are_encoded(tmp_path: Path) -> None:
    with real_daemon("--mmproj", str(projector_file(tmp_path)), "--ctx", "256", "--parallel", "1") as daemon:
        parts = [picture(png(drawn(200 + n))) for n in range(40)]
        refused = ask(daemon, user(*parts, text(QUESTION)))
        assert refused.code == "E_LIMIT_CONTEXT"
        assert "the first 17 of 40 pictures have 272 tokens" in refused.last["message"]


@pytest.mark.thorough
def test_where_memory_is_short_the_encoder_starts_with_the_first_picture(tmp_path: Path) -> None:
    with real_daemon("--mmproj", str(projector_file(tmp_path)), "--memory-limit-mb", "200") as daemon:
        [fit] = daemon.logged("fit")
        assert "the encoder of pictures, which starts with the first one" in fit["why"]
        assert "vision" in daemon.ask(type="models").last["models"][0]["capabilities"]
        assert not encoders(daemon)
        assert ask(daemon, user(picture(png(drawn(1))), text(QUESTION))).reason == "length"
        assert len(encoders(daemon)) == 1


def test_a_model_that_cannot_see_with_its_projector_claims_nothing(tmp_path: Path) -> None:
    """The claim, the list of models and the refusal agree from the start on, and the refusal says why."""
    unknown = projector_file(tmp_path, "gemma3").read_bytes().replace(b"gemma3", b"gemma9")
    (tmp_path / "mmproj.gguf").write_bytes(unknown)
    shutil.copy(EMBEDDED, tmp_path / "model.gguf")
    with real_daemon("--model", str(tmp_path / "model.gguf")) as daemon:
        assert "vision" not in daemon.ask(type="models").last["models"][0]["capabilities"]
        refused = ask(daemon, user(text(QUESTION), picture(png(drawn(1)))))
        assert refused.code == "E_MODEL_NO_VISION"
        assert "unknown projector type: gemma9" in refused.last["message"]
        assert not encoders(daemon)
    with pytest.raises(AssertionError, match="gemma9"), real_daemon("--mmproj", str(tmp_path / "mmproj.gguf")):
        pass


def encoders(daemon: Daemon) -> list[psutil.Process]:
    return [each for each in daemon.processes if "uma_trio.encoder" in each.cmdline()]


def encodings(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.metrics()["pictures"]
    return found


@pytest.mark.thorough
def test_a_second_question_encodes_nothing_also_after_a_crash(tmp_path: Path) -> None:
    options = ("--mmproj", str(projector_file(tmp_path)), "--state-dir", str(tmp_path / "state"))
    asked = user(picture(png(drawn(1))), text(QUESTION))
    with real_daemon(*options) as daemon:
        first = ask(daemon, asked)
        ask(daemon, user(picture(png(drawn(2))), text("This is nobody's business.")))
        ask(daemon, user(picture(png(drawn(1))), text("And now?")), session_id="album")
        found = encodings(daemon)
        assert (found["encoded_total"], found["found_total"], found["loaded_total"]) == (2, 1, 0)
        daemon.wait_until(lambda metrics: metrics["pictures"]["disk_bytes"], "the picture is on disk")
        daemon.ask(messages=asked, id="letter", detached=True, max_tokens=200, ignore_eos=True)
        with daemon.wire() as wire:
            wire.send(type="attach", id="letter")
            seen = [wire.receive() for _ in range(3)]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    with real_daemon(*options) as daemon:
        with daemon.wire() as wire:
            wire.send(type="attach", id="letter")
            letter = Answer(wire.rest())
        assert letter.events[:3] == seen
        assert (letter.reason, letter.last["usage"]["completion_tokens"]) == ("length", 200)
        assert agree(ask(daemon, asked).text, first.text)
        more = ask(daemon, user(text("Tell me more.")), session_id="album")
        assert more.reason in ("stop", "length"), more.last
        found = encodings(daemon)
        assert (found["encoded_total"], found["found_total"], found["loaded_total"]) == (0, 2, 1)
    [file] = (tmp_path / "state").glob("*/pictures/*.picture")
    file.write_bytes(file.read_bytes()[:-1])
    with real_daemon(*options) as daemon:
        assert agree(ask(daemon, asked).text, first.text)
        assert daemon.logged("an encoded picture cannot be loaded, and is encoded again")
        assert encodings(daemon)["encoded_total"] == 1
    with real_daemon(*options, "--pictures-max-mb", "0") as daemon:
        ask(daemon, asked)
        assert (encodings(daemon)["encoded_total"], encodings(daemon)["disk_bytes"]) == (1, 0)
