"""Answers about pictures, compared with llama-server's."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gpu import agree, tolerance
from tests.support.llama_server import llama_server
from tests.support.pictures import drawn, png
from tests.support.profile import is_quick, thorough
from tests.support.projectors import projector_file
from tests.support.random_models import random_model
from tests.support.real_daemon import ROOT, Daemon, real_daemon
from tests.support.sounds import wav
from uma_trio.models.packaged import EMBEDDED

PHOTO = ROOT / "build" / "llama.cpp" / "tools" / "mtmd" / "test-1.jpeg"
SPEECH = PHOTO.with_name("test-2.mp3")

N_TOKENS, N_TOP = 12, 5
EXACT = 0.01
"""The same for F32 weights without flash attention."""
TOLERANCE = 0.35
"""The largest difference of log-probabilities for the first token: the two choose their kernels of attention themselves, for
the text too.  Another picture changes them by a multiple of that."""


def chats() -> dict[str, list[dict[str, Any]]]:
    """Contents of a message of the user: ``bytes`` are pictures."""
    one, other = png(drawn(1)), png(drawn(2))
    found = {
        "before": [one, "What is the capital of France?"],
        "another": [other, "What is the capital of France?"],
        "after": ["What is the capital of France?", one],
        "two": ["Look at this:", one, other, "What do blue and yellow make?"],
        "one": [one],
    }
    if PHOTO.exists() and not is_quick():
        found["photo"] = ["Say hello.", PHOTO.read_bytes(), " Now."]
    return contents("image", found)


def sound_chats() -> dict[str, list[dict[str, Any]]]:
    one, other = wav(1), wav(2, 2.5)
    found = {
        "before": [one, "What is the capital of France?"],
        "another": [other, "What is the capital of France?"],
        "two": ["Listen:", one, other, "What do blue and yellow make?"],
    }
    if SPEECH.exists() and not is_quick():
        found["speech"] = ["Say hello.", SPEECH.read_bytes(), " Now."]
    return contents("audio", found)


def contents(kind: str, chats: dict[str, list[str | bytes]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [
            {"type": kind, "data": part} if isinstance(part, bytes) else {"type": "text", "text": part}
            for part in parts
        ]
        for name, parts in chats.items()
    }


def of_openai(part: dict[str, Any]) -> dict[str, Any]:
    """A file as OpenAI's API has it."""
    text = base64.b64encode(part["data"]).decode()
    if part["type"] == "audio":
        is_wav = part["data"].startswith(b"RIFF")
        return {"type": "input_audio", "input_audio": {"data": text, "format": "wav" if is_wav else "mp3"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def of_llama_server(url: str, parts: list[dict[str, Any]]) -> tuple[str, int, list[dict[str, float]]]:
    content = [part if part["type"] == "text" else of_openai(part) for part in parts]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": N_TOP,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    [choice] = answer["choices"]
    tops = [
        {each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in choice["logprobs"]["content"]
    ]
    return choice["message"]["content"], answer["usage"]["prompt_tokens"], tops


def of_daemon(daemon: Daemon, parts: list[dict[str, Any]]) -> tuple[str, int, list[dict[str, float]]]:
    answer = daemon.ask(
        messages=[{"role": "user", "content": parts}],
        max_tokens=N_TOKENS,
        temperature=0,
        logprobs=N_TOP,
        stream=False,
        encoding="cbor",
    )
    tops = [{each["text"]: each["logprob"] for each in token["top_logprobs"]} for token in answer.last["logprobs"]]
    return answer.text, answer.last["usage"]["prompt_tokens"], tops


def test_greedy_answers_after_pictures_are_those_of_llama_server(tmp_path: Path) -> None:
    projector = projector_file(tmp_path)
    first = compare(EMBEDDED, projector, tmp_path, [], TOLERANCE)
    assert difference(first["before"], first["another"]) > 4 * TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "kind"),
    [("tiny-swa", "gemma3"), ("tiny-mrope", "qwen2vl_merger"), ("tiny-hybrid-mrope", "qwen2vl_merger")],
)
def test_other_kinds_of_positions_and_attention_are_those_of_llama_server(
    tmp_path: Path, shape: str, kind: str
) -> None:
    model = random_model(shape, "f32", ctx=2048, vocabulary="gpt-2")
    projector = projector_file(tmp_path, kind, model)
    first = compare(model, projector, tmp_path, ["--chat-template", "chatml"], tolerance(EXACT, on_gpu=TOLERANCE))
    assert difference(first["before"], first["another"]) > 4 * EXACT


def test_greedy_answers_after_sound_are_those_of_llama_server(tmp_path: Path) -> None:
    model = random_model("4x64x2x1x192", "f32", ctx=2048, vocabulary="gpt-2")
    projector = projector_file(tmp_path, "qwen2a", model)
    first = compare(
        model, projector, tmp_path, ["--chat-template", "chatml"], tolerance(EXACT, on_gpu=TOLERANCE), sound_chats()
    )
    assert difference(first["before"], first["another"]) > 4 * EXACT


def compare(
    model: Path,
    projector: Path,
    folder: Path,
    flags: list[str],
    largest: float,
    asked_about: dict[str, list[dict[str, Any]]] | None = None,
) -> dict[str, dict[str, float]]:
    """Ask both; returns the log-probabilities for the first token of each chat."""
    both = ["--mmproj", str(projector), "--flash-attn", "off", *flags]
    with (
        llama_server(model, "--jinja", "-c", "2048", "-np", "1", *both, log_file=folder / "log") as url,
        real_daemon("--model", str(model), "--ctx", "4096", "--parallel", "2", *both) as daemon,
    ):
        first = {}
        for name, parts in (asked_about or chats()).items():
            longer = [*parts, {"type": "text", "text": " Why?"}]
            if parts[-1]["type"] == "text":
                longer[-2:] = [{"type": "text", "text": f"{parts[-1]['text']} Why?"}]
            for more, asked in enumerate([parts, longer]):  # the second one continues the KV cache of the first
                theirs, ours = of_llama_server(url, asked), of_daemon(daemon, asked)
                assert agree(ours[0], theirs[0], n=1), (name, more)
                assert ours[1] == theirs[1], (name, more)
                assert difference(ours[2][0], theirs[2][0]) < largest, (name, more)
                first.setdefault(name, ours[2][0])
        assert "non-consecutive" not in daemon.logs(), "a recurrent memory warns of each picture"
    return first


@pytest.mark.parametrize("shape", [thorough("tiny-mrope"), "tiny-hybrid-mrope"])
def test_a_session_whose_pictures_have_two_dimensions_comes_back_from_disk(tmp_path: Path, shape: str) -> None:
    model = random_model(shape, "f32", ctx=2048, vocabulary="gpt-2")
    projector = projector_file(tmp_path, "qwen2vl_merger", model)
    options = ("--model", str(model), "--mmproj", str(projector), "--chat-template", "chatml", "--ctx", "4096")
    saving = (
        "--parallel",
        "2",
        "--state-dir",
        str(tmp_path / "state"),
        "--offload-after-s",
        "0",
        "--flash-attn",
        "off",
    )
    turns = [
        [{"role": "user", "content": parts}] for parts in (chats()["two"], [{"type": "text", "text": "And then?"}])
    ]
    fields = {"max_tokens": N_TOKENS, "temperature": 0, "stream": False, "encoding": "cbor"}
    with real_daemon(*options, *saving) as daemon:
        undisturbed = [daemon.ask(messages=turn, session_id="album", **fields) for turn in turns]
    with real_daemon(*options, *saving) as daemon:
        first = daemon.ask(messages=turns[0], session_id="other", **fields)
        daemon.wait_until(lambda metrics: metrics["kv"]["saved_states"] > 1, "both sessions are on disk")
    with real_daemon(*options, *saving) as daemon:
        second = daemon.ask(messages=turns[1], session_id="other", **fields)
        assert all(agree(one.text, other.text) for one, other in zip((first, second), undisturbed, strict=True))
        assert second.last["usage"]["cached_tokens"] > first.last["usage"]["prompt_tokens"] - 16
        assert daemon.metrics()["kv_offload"]["loaded_total"] == 1


def difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest, of the tokens that both have."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())
