"""llama-server's own API: /completion, /props, and the paths without /v1."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "n_predict": 6, "ignore_eos": True}


def post(gateway: Gateway, path: str = "/completion", **body: Any) -> httpx.Response:
    with gateway.http() as client:
        return client.post(path, json=body)


def complete(gateway: Gateway, **body: Any) -> Any:
    answer = post(gateway, **{**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(gateway: Gateway, **body: Any) -> list[dict[str, Any]]:
    text = post(gateway, **{**GREEDY, **body}, stream=True).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def tokens_of(gateway: Gateway, text: str, **fields: Any) -> list[int]:
    found: list[int] = post(gateway, "/tokenize", content=text, **fields).json()["tokens"]
    return found


def test_an_answer_is_that_of_openais_api(gateway: Gateway) -> None:
    text = gateway.openai().completions.create(
        model="embedded", prompt=PROMPT, temperature=0, max_tokens=6, extra_body={"ignore_eos": True}
    )
    found = complete(gateway, n_keep=-1, id_slot=0)
    assert found["content"] == text.choices[0].text
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (found["tokens_predicted"], found["truncated"], found["tokens"]) == (6, False, [])
    assert found["has_new_line"] is ("\n" in found["content"])
    assert found["generation_settings"]["n_predict"] == 6
    assert (found["prompt"], found["model"], "warnings" in found) == (PROMPT, "embedded", False)
    assert found == {**post(gateway, "/completions", **GREEDY).json(), "timings": found["timings"]}


def test_a_stream_has_the_same_text_and_its_tokens(gateway: Gateway) -> None:
    whole = complete(gateway, return_tokens=True)
    *pieces, end = events(gateway)
    assert "".join(each["content"] for each in pieces) == whole["content"]
    assert [token for each in pieces for token in each["tokens"]] == whole["tokens"]
    assert [each["stop"] for each in pieces] == [False] * len(pieces)
    assert (end["stop"], end["content"], end["tokens_predicted"]) == (True, "", len(whole["tokens"]))


def test_a_stop_string_is_named(gateway: Gateway) -> None:
    text = complete(gateway)["content"]
    found = complete(gateway, stop=[text[2:4]])
    assert (found["stop_type"], found["stopping_word"]) == ("word", text[2:4])
    assert found["content"] == text[: text.index(text[2:4])]


def test_timings_add_up(gateway: Gateway) -> None:
    found = complete(gateway, cache_prompt=False)
    timings = found["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == found["tokens_evaluated"]
    assert timings["predicted_n"] == 6
    assert math.isclose(timings["predicted_per_second"] * timings["predicted_ms"], 5e3)
    assert math.isclose(timings["prompt_per_token_ms"] * timings["prompt_n"], timings["prompt_ms"])
    one = complete(gateway, n_predict=1)["timings"]
    assert (one["predicted_per_second"], one["predicted_per_token_ms"]) == (0, 0)


def test_prompts_in_every_form_are_the_same_prompt(gateway: Gateway) -> None:
    tokens = tokens_of(gateway, PROMPT, add_special=True)
    rest = tokens_of(gateway, " France is")
    mixed = [*tokens_of(gateway, "The capital of", add_special=True), " France is"]
    assert mixed[:-1] + rest == tokens
    expected = complete(gateway)["content"]
    for prompt in (tokens, mixed, {"prompt_string": PROMPT}):
        assert complete(gateway, prompt=prompt)["content"] == expected
    several = complete(gateway, prompt=[tokens, PROMPT, {"prompt_string": PROMPT}, mixed])
    assert [each["content"] for each in several] == [expected] * 4
    assert [each["index"] for each in several] == [0, 1, 2, 3]
    assert len(complete(gateway, prompt=[PROMPT])) == 1
    assert len(complete(gateway, n_cmpl=2)) == 2


def test_probabilities_are_those_of_each_token(gateway: Gateway) -> None:
    whole = complete(gateway, n_probs=3)["completion_probabilities"]
    streamed = [each for event in events(gateway, n_probs=3)[:-1] for each in event["completion_probabilities"]]
    assert [each["id"] for each in streamed] == [each["id"] for each in whole]
    assert all(each["top_logprobs"][0]["id"] == each["id"] and len(each["top_logprobs"]) == 3 for each in whole)
    assert b"".join(bytes(each["bytes"]) for each in whole).decode() == complete(gateway)["content"]


def test_a_bias_of_a_text_is_that_of_its_tokens(gateway: Gateway) -> None:
    first = complete(gateway, return_tokens=True)["tokens"][0]
    text = post(gateway, "/detokenize", tokens=[first]).json()["content"]
    assert tokens_of(gateway, text) == [first]
    for bias in ([[first, False]], [[text, -100]], {str(first): -100}, {text: False}):
        assert complete(gateway, logit_bias=bias, return_tokens=True)["tokens"][0] != first


@pytest.mark.thorough
def test_an_answer_that_fills_the_context_is_truncated(gateway: Gateway) -> None:
    found = complete(gateway, prompt=PROMPT * 580, n_predict=100_000)
    assert (found["truncated"], found["stop_type"]) == (True, "limit")


def test_only_the_fields_that_are_asked_for(gateway: Gateway) -> None:
    found = complete(gateway, response_fields=["content", "generation_settings/n_predict", "nothing/here"])
    assert found == {"content": complete(gateway)["content"], "generation_settings/n_predict": 6}


def test_progress_of_the_prefill_comes_before_the_text(gateway: Gateway) -> None:
    found = events(gateway, prompt="One two three. " * 300, cache_prompt=False, return_progress=True)
    progress = [each["prompt_progress"] for each in found if "prompt_progress" in each]
    assert progress == [each["prompt_progress"] for each in found[: len(progress)]]
    assert progress[-1]["processed"] == progress[-1]["total"] == found[-1]["tokens_evaluated"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 1},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [1, None]},
        {"prompt": ["a"] * 129},
        {"prompt": {"prompt_string": "a", "multimodal_data": ["AAAA"]}},
        {"prompt": "a", "logit_bias": 3},
        {"prompt": "a", "logit_bias": [["a"]]},
        {"prompt": "a", "logit_bias": [["a", True]]},
        {"prompt": "a", "logit_bias": [["a", 1]] * 1025},
        {"prompt": "a", "n_predict": -7},
    ],
)
def test_what_makes_no_sense_is_refused(gateway: Gateway, body: dict[str, Any]) -> None:
    answer = post(gateway, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_props_has_what_clients_look_for(gateway: Gateway) -> None:
    with gateway.http() as client:
        found = client.get("/props").json()
        meta = client.get("/models").json()["data"][0]["meta"]
    assert found["default_generation_settings"]["n_ctx"] == meta["n_ctx"]
    assert (found["model_alias"], found["total_slots"]) == ("embedded", 16)
    assert "messages" in found["chat_template"]


def test_openais_client_works_without_v1(gateway: Gateway) -> None:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=30) as client:
        chat = client.chat.completions.create(
            model="embedded", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert chat.usage is not None
        assert client.responses.create(model="embedded", input="Hello", max_output_tokens=16).output_text


@pytest.fixture(scope="module")
def any_model() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with real_daemon("--parallel", "2", "--http", "0", "--http-any-model", "--seed", "7") as daemon:
        yield Gateway.of(daemon)


def test_any_model_can_be_any_name(gateway: Gateway, any_model: Gateway) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 4}},
        "/v1/embeddings": {"input": "Hello"},
        "/v1/generate": {"prompt": "Hello", "max_tokens": 4},
        "/completion": {"prompt": "Hello", "n_predict": 4},
        "/tokenize": {"content": "Hello"},
    }
    for path, body in bodies.items():
        assert post(gateway, path, model="gpt-0", **body).status_code == 404, path
        answer = post(any_model, path, model="gpt-0", **body)
        assert answer.status_code == 200, answer.text


def test_requests_without_a_seed_get_that_of_the_server(any_model: Gateway) -> None:
    sampled = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    found = complete(any_model, **sampled)
    assert found["generation_settings"]["seed"] == 7
    assert found["content"] == complete(any_model, **sampled)["content"]
    assert found["content"] == complete(any_model, **sampled, seed=7)["content"]
    assert found["content"] != complete(any_model, **sampled, seed=8)["content"]
