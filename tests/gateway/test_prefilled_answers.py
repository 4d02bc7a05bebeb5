"""Answers that the client has begun: the same text as llama-server's, in every API that has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.gateway.conftest import Gateway
from tests.support.llama_server import llama_server
from tests.support.profile import sampled
from uma_trio.models.packaged import EMBEDDED

QUESTION = {"role": "user", "content": "What is the capital of France?"}
BEGUN = ("The", "The capital of", "The capital of France is Par", "I think", "\n", "Paris, ", "- one\n- ", "Ça va? 🙂")
LENGTH = 24


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("llama") / "log"
    with llama_server(EMBEDDED, "-c", "4096", "-np", "1", "--jinja", log_file=log) as url:
        yield url


def chat(begun: str, **fields: Any) -> dict[str, Any]:
    messages = [QUESTION, {"role": "assistant", "content": begun}]
    return {"messages": messages, "max_tokens": LENGTH, "temperature": 0, **fields}


def answer(url: str, body: dict[str, Any]) -> str:
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    return str(found["choices"][0]["message"]["content"])


@pytest.mark.parametrize("begun", sampled(BEGUN, 4))
def test_the_answer_is_that_of_llama_server(gateway: Gateway, theirs: str, begun: str) -> None:
    ours = answer(gateway.url, chat(begun))
    assert begun + ours == answer(theirs, chat(begun)), "which has the beginning as well"
    assert ours == answer(gateway.url, chat(begun, continue_final_message=True, add_generation_prompt=False))


@pytest.mark.parametrize("begun", sampled(BEGUN, 4))
def test_every_api_gives_the_same_text(gateway: Gateway, begun: str) -> None:
    expected = answer(gateway.url, chat(begun))
    assert gateway.daemon.ask(**chat(begun), continue_final_message=True).text == expected
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        messages: Any = chat(begun)["messages"]
        found = client.messages.create(
            model="embedded", max_tokens=LENGTH, messages=messages, extra_body={"temperature": 0}
        )
    assert "".join(block.text for block in found.content) == expected
    ollama = {**chat(begun), "model": "embedded", "stream": False, "options": {"num_predict": LENGTH, "temperature": 0}}
    with gateway.http() as client:
        said = client.post("/api/chat", json=ollama).raise_for_status().json()
        streamed = client.post("/v1/chat/completions", json=chat(begun, stream=True)).text
    assert said["message"]["content"] == expected
    assert streamed.count("[DONE]") == 1


def test_a_message_of_its_own(gateway: Gateway) -> None:
    """What the client says with ``continue_final_message``, ``false`` included, counts."""
    whole = answer(gateway.url, {**chat(""), "messages": [QUESTION]})
    begun = whole[: whole.index(" is")]
    assert begun + answer(gateway.url, chat(begun)) == whole
    assert answer(gateway.url, chat(begun, continue_final_message=False)) != whole.removeprefix(begun)
