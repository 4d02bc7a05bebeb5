"""What llama-server adds to OpenAI's APIs: fingerprint, timings, progress, __verbose, continued messages, slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import httpx
import pytest
from click.testing import CliRunner

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import missing, real_daemon
from uma_trio.cli import main
from uma_trio.client import ModelDescription, PrefillProgress, Token
from uma_trio.gateway.dialects.openai.extras import Extras, fingerprint_of, generation_settings
from uma_trio.gateway.dialects.openai.sampling import SamplingFields

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [QUESTION], "max_tokens": 5, "temperature": 0},
    TEXT: {"prompt": QUESTION["content"], "max_tokens": 5, "temperature": 0, "ignore_eos": True},
}
MODEL = ModelDescription(
    name="m",
    description="llama 1M",
    architecture="llama",
    size_bytes=1,
    n_parameters=1,
    context=64,
    context_per_request=64,
    parallel=1,
    capabilities=[],
    embedding_length=4,
    sampling={"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5},
    eog_tokens=[2, 3],
)


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    with gateway.http() as client:
        return client.post(path, json=body)


def whole(gateway: Gateway, path: str, **body: Any) -> dict[str, Any]:
    answer = post(gateway, path, **{**BODIES.get(path, {}), **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chunks(gateway: Gateway, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = post(gateway, path, **{**BODIES.get(path, {}), **body}, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- the fingerprint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_all_answers_of_a_model_have_one_fingerprint(gateway: Gateway, path: str) -> None:
    expected = whole(gateway, path)["system_fingerprint"]
    assert expected.startswith("b")
    assert {each["system_fingerprint"] for each in chunks(gateway, path)} == {expected}
    with gateway.http() as client:
        assert client.get("/props").json()["build_info"] == expected


def test_another_model_has_another_fingerprint() -> None:
    others = [
        attrs.evolve(MODEL, created_at=1.0),
        attrs.evolve(MODEL, size_bytes=2),
        attrs.evolve(MODEL, description="llama 1M Q8_0"),
    ]
    assert len({fingerprint_of(each) for each in (MODEL, *others)}) == 4


# -- timings and progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_timings_come_with_the_end_of_an_answer(gateway: Gateway, path: str) -> None:
    found = whole(gateway, path, cache_prompt=False)
    assert found["timings"]["prompt_n"] == found["usage"]["prompt_tokens"]
    assert found["timings"]["predicted_n"] == 5
    for usage in (False, True):
        *before, last = chunks(gateway, path, stream_options={"include_usage": usage})
        assert not any("timings" in each for each in before)
        assert last["timings"]["predicted_n"] == 5


@pytest.mark.parametrize("path", [*BODIES, "/completion"])
def test_timings_per_token(gateway: Gateway, path: str) -> None:
    body = BODIES.get(path, {"prompt": "a", "n_predict": 5, "ignore_eos": True})
    found = [each for each in chunks(gateway, path, **body, timings_per_token=True) if "timings" in each]
    counts = [each["timings"]["predicted_n"] for each in found]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5), "the first one comes with the prefill"
    assert len(found) > 5
    assert not any("prompt_progress" in each for each in found)


@pytest.mark.parametrize("path", BODIES)
def test_progress_begins_with_what_was_cached(gateway: Gateway, path: str) -> None:
    text = "One two three. " * 100
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    for is_again in (False, True):
        found = chunks(gateway, path, **body, return_progress=True)
        progress = [each["prompt_progress"] for each in found if "prompt_progress" in each]
        assert len(progress) >= 2
        assert progress[0]["cache"] == progress[0]["processed"]
        assert progress[-1]["processed"] == progress[-1]["total"]
        assert len({each["cache"] for each in progress}) == 1
        cached = found[-1]["timings"]["cache_n"]
        assert progress[0]["cache"] == cached
        assert (cached > 0) or not is_again
    assert not any("prompt_progress" in each for each in chunks(gateway, path, **body))


def test_each_of_several_prompts_has_its_own_progress(gateway: Gateway) -> None:
    found = chunks(gateway, "/completion", prompt=["a b c d", "e f g h"], n_predict=2, return_progress=True)
    progress = [each for each in found if "prompt_progress" in each]
    assert {each["index"] for each in progress} == {0, 1}


def test_responses_have_telemetry_too(gateway: Gateway) -> None:
    body = {"input": "What is the capital of France?", "return_progress": True, "timings_per_token": True}
    found = chunks(gateway, "/v1/responses", **body)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    progress = [each for each in found if "prompt_progress" in each]
    assert {each["type"] for each in progress} == {"response.in_progress"}
    assert progress[-1]["prompt_progress"]["processed"] == progress[-1]["prompt_progress"]["total"]
    assert all("timings" in each for each in found if each["type"] == "response.output_text.delta")
    assert found[-1]["timings"]["predicted_n"] == found[-1]["response"]["usage"]["output_tokens"]
    plain = chunks(gateway, "/v1/responses", input="What is the capital of France?")
    assert [each["type"] for each in plain if "timings" in each] == ["response.completed"]


def test_live_timings_follow_the_clock() -> None:
    times = iter([10.0, 10.5, 11.0, 11.25])
    extras = Extras(SamplingFields(stream=True, timings_per_token=True), now=lambda: next(times))
    first = extras.of(PrefillProgress(id="r", prefilled_tokens=4, prompt_tokens=10))["timings"]
    assert (first["cache_n"], first["prompt_n"], first["prompt_ms"]) == (4, 0, 0)
    second = extras.of(PrefillProgress(id="r", prefilled_tokens=10, prompt_tokens=10))["timings"]
    assert (second["cache_n"], second["prompt_n"], second["prompt_ms"]) == (4, 6, 500)
    third = extras.of(Token(id="r", text="a"))["timings"]
    assert (third["prompt_ms"], third["predicted_n"], third["predicted_ms"]) == (1000, 1, 0)
    fourth = extras.of(Token(id="r", text="b"))["timings"]
    assert (fourth["prompt_ms"], fourth["predicted_n"], fourth["predicted_ms"]) == (1000, 2, 250)


# -- __verbose, parameters ----------------------------------------------------------------------------------


def test_verbose_has_the_prompt_of_the_request(gateway: Gateway) -> None:
    rendered = post(gateway, "/apply-template", messages=[QUESTION]).json()["prompt"]
    assert "__verbose" not in whole(gateway, CHAT)
    found = whole(gateway, CHAT, verbose=True)
    about = found["__verbose"]
    assert about["prompt"] == rendered
    assert about["content"] == found["choices"][0]["message"]["content"]
    assert about["generation_settings"]["n_predict"] == 5
    *before, last = chunks(gateway, CHAT, verbose=True)
    assert not any("__verbose" in each for each in before)
    assert (last["__verbose"]["prompt"], last["__verbose"]["content"]) == (rendered, about["content"])
    assert whole(gateway, TEXT, verbose=True)["__verbose"]["prompt"] == QUESTION["content"]


def test_generation_settings_have_all_parameters() -> None:
    found = generation_settings(MODEL, {"top_k": 9, "top_p": None, "logit_bias": {"5": -100.0, "6": 2.0}})
    assert (found["temperature"], found["top_k"], found["repeat_penalty"]) == (0.5, 9, 1.5)
    assert found["logit_bias"] == [{"token": 5, "bias": None}, {"token": 6, "bias": 2.0}]
    assert (found["n_predict"], found["seed"], found["stop"], found["ignore_eos"]) == (-1, -1, [], False)
    without_end = generation_settings(MODEL, {"ignore_eos": True, "stop": "x", "max_tokens": 3})
    assert without_end["logit_bias"] == [{"token": 2, "bias": None}, {"token": 3, "bias": None}]
    assert (without_end["n_predict"], without_end["stop"]) == (3, ["x"])


def test_the_defaults_are_those_of_the_daemon(verbose: Gateway) -> None:
    with verbose.http() as client:
        params = client.get("/props").json()["default_generation_settings"]["params"]
    settings = whole(verbose, "/completion", prompt="a", n_predict=1)["generation_settings"]
    assert (params["seed"], params["temperature"]) == (settings["seed"], settings["temperature"]) == (7, 0.25)
    assert params["logit_bias"] == []


@pytest.fixture(scope="module")
def verbose() -> Iterator[Gateway]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    options = ("--http-verbose", "--seed", "7", "--temp", "0.25")
    with real_daemon("--parallel", "2", "--http", "0", *options) as daemon:
        yield Gateway.of(daemon)


def test_all_requests_can_be_verbose(verbose: Gateway) -> None:
    for path in BODIES:
        assert QUESTION["content"] in whole(verbose, path)["__verbose"]["prompt"]


# -- continued messages -------------------------------------------------------------------------------------


def test_a_last_message_of_the_assistant_is_continued(gateway: Gateway) -> None:
    begun = {"role": "assistant", "content": "The capital of"}
    found = whole(gateway, CHAT, messages=[QUESTION, begun], max_tokens=20, verbose=True)
    assert found["choices"][0]["message"]["content"] == " France is Paris."
    assert found["__verbose"]["prompt"].endswith("The capital of")
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    for fields in ({}, explicit):
        assert post(gateway, "/apply-template", messages=[QUESTION, begun], **fields).json()["prompt"].endswith("of")
        again = whole(gateway, CHAT, messages=[QUESTION, begun], max_tokens=20, verbose=True, **fields)
        assert again["__verbose"]["prompt"] == found["__verbose"]["prompt"]
    for fields in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        new = whole(gateway, CHAT, messages=[QUESTION, begun], verbose=True, **fields)
        assert not new["__verbose"]["prompt"].endswith("The capital of")


def test_calls_of_tools_are_not_continued(gateway: Gateway) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    begun = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    found = post(gateway, CHAT, messages=[QUESTION, begun], max_tokens=2)
    assert found.status_code == 200, found.text
    refused = post(gateway, CHAT, messages=[QUESTION, begun], continue_final_message=True)
    assert refused.status_code == 400


def test_a_message_cannot_be_new_and_continued(gateway: Gateway) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    begun = {"role": "assistant", "content": "The"}
    for path in (CHAT, "/apply-template", "/tokenize"):
        refused = post(gateway, path, messages=[QUESTION, begun], **both)
        assert refused.status_code == 400
        assert "leave one of them out" in refused.json()["error"]["message"]


def test_a_chat_can_be_rendered_without_the_beginning_of_an_answer(gateway: Gateway) -> None:
    with_it = post(gateway, "/apply-template", messages=[QUESTION]).json()["prompt"]
    without = post(gateway, "/apply-template", messages=[QUESTION], add_generation_prompt=False).json()["prompt"]
    assert with_it.startswith(without)
    assert len(without) < len(with_it)
    assert whole(gateway, CHAT, add_generation_prompt=False, verbose=True)["__verbose"]["prompt"] == without


# -- counting, pieces, slots --------------------------------------------------------------------------------


def test_the_tokens_of_a_chat_are_counted(gateway: Gateway) -> None:
    usage = whole(gateway, CHAT)["usage"]
    for path in (f"{CHAT}/input_tokens", "/chat/completions/input_tokens"):
        found = whole(gateway, path, messages=[QUESTION])
        assert found == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}


def test_tokens_with_their_pieces(gateway: Gateway) -> None:
    text = "Ada sees 媽 and 🤗"
    plain = post(gateway, "/tokenize", content=text).json()
    found = post(gateway, "/tokenize", content=text, with_pieces=True).json()
    assert [each["id"] for each in found["tokens"]] == plain["tokens"]
    pieces = [each["piece"] for each in found["tokens"]]
    spelled = b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in pieces)
    assert spelled.decode().strip() == text
    assert any(isinstance(each, list) for each in pieces), "some tokens are parts of a character"


def keys(*args: object) -> str:
    result = CliRunner().invoke(main, ["keys", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_slots_show_a_tenant_its_own_requests_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    alice, bob = (keys("create", name, "--file", file) for name in ("alice", "bob"))
    with real_daemon("--parallel", "2", "--http", "0", "--http-keys", str(file)) as daemon:
        gateway = Gateway.of(daemon)
        body = {"prompt": "a", "n_predict": 1500, "ignore_eos": True, "stream": True}
        with (
            gateway.http(headers={"x-api-key": alice}) as of_alice,
            gateway.http(headers={"x-api-key": bob}) as of_bob,
            gateway.http(headers={"x-api-key": alice}) as other,
            of_alice.stream("POST", "/completion", json=body) as answer,
        ):
            next(lines := answer.iter_lines())
            busy = [each["is_processing"] for each in other.get("/slots").json()]
            idle = [each["is_processing"] for each in of_bob.get("/slots").json()]
            fields = {name for each in of_bob.get("/slots").json() for name in each}
            next(lines)
    assert (busy, idle) == ([True, False], [False, False])
    assert fields == {"id", "n_ctx", "is_processing"}
