"""Chat completions of OpenAI's API, with OpenAI's client and with plain HTTP."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.gateway.conftest import Gateway

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [{"role": "user", "content": "one two three " * 10_000}]
ANSWER = "The capital of France is Paris."


def test_a_whole_answer(gateway: Gateway) -> None:
    found = gateway.openai().chat.completions.create(model="embedded", messages=QUESTION)
    assert found.choices[0].message.content == ANSWER
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_streamed_answer_has_the_same_text_in_pieces(gateway: Gateway) -> None:
    stream = gateway.openai().chat.completions.create(model="embedded", messages=QUESTION, stream=True)
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(texts) == ANSWER
    assert len(texts) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]


def test_the_usage_of_a_stream_comes_when_asked_for_in_a_chunk_without_choices(gateway: Gateway) -> None:
    options = {"include_usage": True}
    create = gateway.openai().chat.completions.create
    *_, last = create(model="embedded", messages=QUESTION, stream=True, stream_options=options)
    assert last.choices == []
    assert last.usage.completion_tokens > 3


def test_several_answers(gateway: Gateway) -> None:
    found = gateway.openai().chat.completions.create(model="embedded", messages=QUESTION, n=3)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert {choice.message.content for choice in found.choices} == {ANSWER}


def test_log_probabilities_are_the_same_streamed_and_whole(gateway: Gateway) -> None:
    options = {"model": "embedded", "messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    create = gateway.openai().chat.completions.create
    whole = [each.model_dump() for each in create(**options).choices[0].logprobs.content]
    streamed = [
        each.model_dump()
        for chunk in create(**options, stream=True)
        if chunk.choices[0].logprobs is not None
        for each in chunk.choices[0].logprobs.content
    ]
    assert "".join(each["token"] for each in whole) == ANSWER
    assert all(len(each["top_logprobs"]) == 2 for each in whole)
    assert [each["token"] for each in streamed] == [each["token"] for each in whole]


def test_an_answer_that_follows_a_schema(gateway: Gateway) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    found = gateway.openai().chat.completions.create(
        model="embedded",
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    assert json.loads(found.choices[0].message.content)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "kind", "code"),
    [
        ({"messages": []}, openai.BadRequestError, "invalid_value"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "invalid_value"),
        ({"messages": LONG}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_value"),
        ({"max_tokens": "many"}, openai.BadRequestError, "invalid_value"),
        ({"model": "gpt-0"}, openai.NotFoundError, "model_not_found"),
    ],
)
def test_a_refusal_has_a_status_also_when_a_stream_was_asked_for(
    gateway: Gateway, wrong: dict[str, object], kind: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    with pytest.raises(kind) as refused:
        gateway.openai().chat.completions.create(
            **{"model": "embedded", "messages": QUESTION, "stream": stream, **wrong}
        )
    assert refused.value.body["message"]
    assert (refused.value.type, refused.value.code) == ("invalid_request_error", code)
    assert refused.value.body["uma_code"].startswith("E_")
    assert refused.value.body["request_id"] == refused.value.response.headers["x-request-id"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": 3}', b"[" * 100_000])
def test_a_body_that_is_no_request(gateway: Gateway, body: bytes) -> None:
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_parameter_is_named(gateway: Gateway) -> None:
    with gateway.http() as client:
        whole = client.post("/v1/chat/completions", json={"messages": QUESTION, "temprature": 1}).json()
        text = client.post("/v1/chat/completions", json={"messages": QUESTION, "temprature": 1, "stream": True}).text
    assert "temprature" in whole["warnings"][0]
    assert "temprature" in json.loads(text.split("\n")[0].removeprefix("data: "))["warnings"][0]


def test_variables_of_the_chat_template(gateway: Gateway) -> None:
    fields = {"model": "embedded", "messages": QUESTION, "reasoning_effort": "low"}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    found = gateway.openai().chat.completions.create(**fields, extra_body=extra)
    assert found.choices[0].message.content == ANSWER  # the embedded model's template knows none
    assert "warnings" not in found.model_extra
    for wrong in ({"messages": 1}, {"enable_thinking": "<|im_end|>"}, {"a": [1]}):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            gateway.openai().chat.completions.create(**fields, extra_body={"chat_template_kwargs": wrong})


def test_a_resumable_stream_goes_on_on_another_connection(gateway: Gateway) -> None:
    options = {"include_usage": True, "resumable": True}
    body = {"messages": QUESTION, "stream": True, "stream_options": options, "ignore_eos": True, "max_tokens": 40}

    def chunks(client: httpx.Client, last: str = "", n: int = 1000) -> list[tuple[str, dict[str, object]]]:
        """The ids and the data of the first ``n`` chunks after ``last``; then the client leaves."""
        found, id = [], ""
        with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"last-event-id": last} if last else {}
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                id = line[4:] if line.startswith("id: ") else id
                if line.startswith("data: "):
                    data = json.loads(line[6:]) if line != "data: [DONE]" else {}
                    data.pop("created", None)
                    found.append((id, data))
                if len(found) == n:
                    break
        return found

    with gateway.http() as client:
        first = chunks(client, n=8)
        assert [id.rpartition(":")[2] for id, _ in first] == [*map(str, range(8))]
        rest = chunks(client, first[-1][0])
        whole = first + rest
        assert whole[:1] + chunks(client, first[0][0]) == whole
        assert len({data["id"] for _, data in whole[:-1]}) == 1
        assert whole[-2][1]["usage"]["completion_tokens"] == 40
        assert whole[-1][1] == {}
        for wrong, status in (("7", 400), (f"nobody:{1}", 404), (f"{'x' * 256}:{1}", 404)):
            asked = client.post("/v1/chat/completions", json=body, headers={"last-event-id": wrong})
            assert (asked.status_code, asked.json()["error"]["param"]) == (status, "Last-Event-ID")
            assert "answer_id" not in asked.text


def test_parameters_of_sampling(gateway: Gateway) -> None:
    def ask(**fields: object) -> openai.types.chat.chat_completion.Choice:
        return gateway.openai().chat.completions.create(model="embedded", messages=QUESTION, **fields).choices[0]

    assert ask(stop=" is").message.content == "The capital of France"
    assert ask(stop=["nowhere", " of"]).message.content == "The capital"
    assert ask(max_completion_tokens=3, max_tokens=99).finish_reason == "length"
    assert ask(max_tokens=-1, seed=-1).message.content == ANSWER
    drawn = {ask(temperature=3, seed=7, max_tokens=10).message.content for _ in range(3)}
    assert len(drawn) == 1
    with gateway.http() as client:
        [token, *_] = client.post("/tokenize", json={"content": "The"}).json()["tokens"]
    assert not ask(logit_bias={str(token): -100}, max_tokens=5).message.content.startswith("The")


def test_parameters_without_effect_need_no_warning_and_others_have_one(gateway: Gateway) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_retention": "24h",
    }
    body = {"messages": QUESTION, **harmless}
    with gateway.http() as client:
        assert "warnings" not in client.post("/v1/chat/completions", json=body).json()
        unknown = {"prediction": {}, "modalities": ["audio"]}
        found = client.post("/v1/chat/completions", json={**body, **unknown}).json()["warnings"]
    assert [name for name in unknown if any(f"'{name}'" in warning for warning in found)] == [*unknown]
