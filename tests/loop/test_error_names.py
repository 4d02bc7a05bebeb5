"""Errors of the daemon over HTTP: they name fields as the client has sent them, in each dialect."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.profile import sampled
from tests.support.serving import serving, settings
from uma_trio.gateway.application import make_app

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}
ANTHROPIC = {**CHAT, "max_tokens": 5}
OLLAMA = {"model": "fake", "stream": False}
NAMELESS = {"type": "function", "function": {"name": ""}}
TOOL = {"name": "t", "parameters": {"type": "string"}}


def options(**wrong: Any) -> dict[str, Any]:
    return {**OLLAMA, **CHAT, "options": wrong}


CASES = [
    ("/v1/messages", {**ANTHROPIC, "stop_sequences": ["a"] * 17}, "stop_sequences"),
    ("/v1/messages", {**ANTHROPIC, "stop_sequences": [""]}, "stop_sequences[0]"),
    ("/v1/messages", {**ANTHROPIC, "max_tokens": 0}, "max_tokens"),
    ("/v1/messages", {**ANTHROPIC, "top_p": 2}, "top_p"),
    (
        "/v1/messages",
        {**ANTHROPIC, "tools": [{"name": "t", "input_schema": {"type": "string"}}]},
        "tools[0].input_schema",
    ),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "n_predict": 0}, "n_predict"),
    ("/v1/chat/completions", {**CHAT, "repeat_penalty": 11}, "repeat_penalty"),
    ("/v1/chat/completions", {**CHAT, "repetition_penalty": 11}, "repetition_penalty"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "stop": ["a"] * 17}, "stop"),
    ("/v1/chat/completions", {**CHAT, "n": 17}, "n"),
    ("/v1/chat/completions", {**CHAT, "n_cmpl": 17}, "n_cmpl"),
    ("/v1/chat/completions", {**CHAT, "guided_choice": []}, "guided_choice"),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ("/v1/chat/completions", {**CHAT, "tools": [NAMELESS]}, "tools[0].function.name"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"function": TOOL}]}, "tools[0].function.parameters"),
    ("/v1/completions", {**PROMPT, "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {**PROMPT, "logprobs": 21}, "logprobs"),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "hello", "top_logprobs": 21}, "top_logprobs"),
    ("/completion", {**PROMPT, "n_predict": 0}, "n_predict"),
    ("/completion", {**PROMPT, "n_probs": 21}, "n_probs"),
    ("/completion", {**PROMPT, "n_cmpl": 17}, "n_cmpl"),
    ("/completion", {**PROMPT, "reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
    ("/api/chat", options(repeat_penalty=11), "repeat_penalty"),
    ("/api/chat", options(num_keep="a"), "num_keep"),
    ("/api/chat", options(num_predict=2**40), "num_predict"),
    ("/api/chat", options(stop=["a"] * 17), "stop"),
    ("/api/chat", {**OLLAMA, **CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/api/generate", {**OLLAMA, **PROMPT, "options": {"temperature": "hot"}}, "temperature"),
    ("/v1/generate", {**PROMPT, "stop": [99999999]}, "stop"),
    ("/v1/generate", {**PROMPT, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ("/v1/generate", {**PROMPT, "max_tokens": 0}, "max_tokens"),
]


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving() as running:
        transport = httpx.ASGITransport(make_app(settings(socket=running.path)), client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as connected:
            yield connected
        await running.settled()


@pytest.mark.parametrize("stream", sampled([False, True], 3))
@pytest.mark.parametrize(("path", "body", "name"), CASES, ids=[f"{path} {name}" for path, _, name in CASES])
async def test_the_field_that_the_client_has_sent_is_named(
    autojump_clock: object, path: str, body: dict[str, Any], name: str, stream: bool
) -> None:
    async with client() as connected:
        answer = await connected.post(path, json={**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert f"{name} " in answer.text or f"{name}:" in answer.text, answer.text
    if path.startswith("/v1/") and "param" in answer.text:
        assert answer.json()["error"]["param"] == name
