"""Answers about pictures, compared with llama-server's."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx

from tests.support.llama_server import llama_server
from tests.support.pictures import drawn, png
from tests.support.projectors import projector_file
from tests.support.real_daemon import ROOT, Daemon, real_daemon
from uma_trio.models.packaged import EMBEDDED

PHOTO = ROOT / "build" / "llama.cpp" / "tools" / "mtmd" / "test-1.jpeg"

N_TOKENS, N_TOP = 12, 5
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
    if PHOTO.exists():
        found["photo"] = ["Say hello.", PHOTO.read_bytes(), " Now."]
    return {
        name: [
            {"type": "image", "data": part} if isinstance(part, bytes) else {"type": "text", "text": part}
            for part in parts
        ]
        for name, parts in found.items()
    }


def of_llama_server(url: str, parts: list[dict[str, Any]]) -> tuple[str, int, list[dict[str, float]]]:
    content = [
        part
        if part["type"] == "text"
        else {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part['data']).decode()}"},
        }
        for part in parts
    ]
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
    with (
        llama_server(EMBEDDED, "--mmproj", str(projector), "--jinja", "-c", "2048", log_file=tmp_path / "log") as url,
        real_daemon("--mmproj", str(projector)) as daemon,
    ):
        first = {}
        for name, parts in chats().items():
            theirs, ours = of_llama_server(url, parts), of_daemon(daemon, parts)
            assert ours[:2] == theirs[:2], name
            first[name] = ours[2][0]
            assert difference(first[name], theirs[2][0]) < TOLERANCE, name
        assert difference(first["before"], first["another"]) > 4 * TOLERANCE


def difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest, of the tokens that both have."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())
