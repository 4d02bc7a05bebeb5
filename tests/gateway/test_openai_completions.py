"""Plain completions of OpenAI's API."""

from __future__ import annotations

import json

import openai
import pytest

from tests.gateway.conftest import Gateway

PROMPT = "The capital of France is"


def complete(gateway: Gateway, prompt: object = PROMPT, **fields: object) -> openai.types.Completion:
    found = gateway.openai().completions.create(**{"model": "embedded", "prompt": prompt, "max_tokens": 4, **fields})
    assert isinstance(found, openai.types.Completion)
    return found


def streamed(gateway: Gateway, prompt: object, n_answers: int, **fields: object) -> list[str]:
    """The texts of all answers."""
    fields = {"model": "embedded", "prompt": prompt, "max_tokens": 4, "stream": True, **fields}
    texts = [""] * n_answers
    for chunk in gateway.openai().completions.create(**fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def tokens_of(gateway: Gateway, text: str) -> list[int]:
    with gateway.http() as client:
        return client.post("/v1/tokenize", json={"text": text}).json()["tokens"]


def test_a_text_goes_on_whole_and_streamed(gateway: Gateway) -> None:
    found = complete(gateway)
    assert (found.object, found.model) == ("text_completion", "embedded")
    assert found.choices[0].text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 4
    assert streamed(gateway, PROMPT, 1) == [found.choices[0].text]


def test_without_a_limit_an_answer_has_sixteen_tokens(gateway: Gateway) -> None:
    found = complete(gateway, max_tokens=openai.NOT_GIVEN, extra_body={"ignore_eos": True})
    assert found.usage.completion_tokens == 16


def test_tokens_go_on_like_their_text(gateway: Gateway) -> None:
    text, tokens = complete(gateway).choices[0].text, tokens_of(gateway, PROMPT)
    assert complete(gateway, tokens).choices[0].text == text
    assert [choice.text for choice in complete(gateway, [tokens, tokens]).choices] == [text, text]


def test_several_prompts_have_their_answers_in_order(gateway: Gateway) -> None:
    prompts = [f"The number {n} is followed by" for n in range(20)]
    alone = [complete(gateway, prompt).choices[0].text for prompt in prompts]
    together = complete(gateway, prompts)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == list(range(20))
    assert together.usage.completion_tokens == sum(complete(gateway, each).usage.completion_tokens for each in prompts)
    assert streamed(gateway, prompts, 20) == alone


def test_several_answers_to_several_prompts(gateway: Gateway) -> None:
    prompts, fields = [PROMPT, "Once upon a time"], {"n": 2, "temperature": 1.0, "seed": 7}
    found = complete(gateway, prompts, **fields)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    alone = [choice.text for prompt in prompts for choice in complete(gateway, prompt, **fields).choices]
    assert [choice.text for choice in found.choices] == alone
    assert streamed(gateway, prompts, 4, **fields) == alone
    one_each = [complete(gateway, prompt).usage.prompt_tokens for prompt in prompts]
    assert found.usage.prompt_tokens == sum(one_each)


def test_one_prompt_that_is_refused_refuses_all_and_leaves_nothing(gateway: Gateway) -> None:
    prompts = [PROMPT, "one two three " * 30_000, PROMPT]
    with pytest.raises(openai.APIStatusError) as refused:
        complete(gateway, prompts, max_tokens=2000, extra_body={"ignore_eos": True})
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    gateway.daemon.settled()


def test_a_client_that_leaves_cancels_all_its_prompts(gateway: Gateway) -> None:
    body = {"prompt": [PROMPT] * 20, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with gateway.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    gateway.daemon.settled()


def test_an_echo_begins_with_the_prompt(gateway: Gateway) -> None:
    text = PROMPT + complete(gateway).choices[0].text
    assert complete(gateway, echo=True).choices[0].text == text
    assert streamed(gateway, PROMPT, 1, echo=True) == [text]


def test_log_probabilities_in_the_shape_of_text_completions(gateway: Gateway) -> None:
    found = complete(gateway, logprobs=2).choices[0]
    got = found.logprobs
    assert "".join(got.tokens) == found.text
    assert got.text_offset[:2] == [0, len(got.tokens[0])]
    assert len(got.token_logprobs) == len(got.top_logprobs) == len(got.tokens)
    assert all(
        len(top) == 2 and top[token] == p
        for top, token, p in zip(got.top_logprobs, got.tokens, got.token_logprobs, strict=True)
    )
    fields = {"model": "embedded", "prompt": PROMPT, "max_tokens": 4, "logprobs": 2, "stream": True}
    chunks = [chunk.choices[0].logprobs for chunk in gateway.openai().completions.create(**fields)]
    pieces = [piece for piece in chunks if piece is not None]
    assert [token for piece in pieces for token in piece.tokens] == got.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == got.text_offset


def test_the_usage_of_a_stream(gateway: Gateway) -> None:
    fields = {"model": "embedded", "prompt": [PROMPT, PROMPT], "max_tokens": 4, "stream": True}
    *_, last = gateway.openai().completions.create(**fields, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens) == ([], 8)


def test_an_answer_may_be_constrained(gateway: Gateway) -> None:
    for extra in (
        {"guided_choice": ["Paris", "Rome"]},
        {"structured_outputs": {"regex": "Paris|Rome"}},
        {"grammar": 'root ::= "Paris" | "Rome"'},
        {"json_schema": {"enum": ["Paris", "Rome"]}},
    ):
        assert complete(gateway, max_tokens=20, extra_body=extra).choices[0].text.strip('"') in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wrong", "parameter"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", None]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"suffix": " the end"}, "suffix"),  # the vocabulary has no tokens for it
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"extra_body": {"grammar": "x", "guided_regex": "y"}}, "grammar"),
    ],
)
def test_what_is_not_supported_is_refused(
    gateway: Gateway, wrong: dict[str, object], parameter: str, stream: bool
) -> None:
    fields = {"model": "embedded", "prompt": PROMPT, "stream": stream}
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai().completions.create(**{**fields, **wrong})
    assert refused.value.body["param"] == parameter


@pytest.mark.parametrize(
    ("path", "field", "wanted"),
    [
        ("/v1/completions", "prompt", "one"),
        ("/v1/embeddings", "input", "one"),
        ("/v1/chat/completions", "messages", "a list of at most 1024 objects"),
        ("/v1/responses", "input", "a text or a list of items"),
        ("/v1/responses/input_tokens", "input", "a text or a list of items"),
    ],
)
def test_a_required_field_that_is_missing_is_named(gateway: Gateway, path: str, field: str, wanted: str) -> None:
    other = "prompt" if field == "messages" else "messages"
    with gateway.http() as client:
        for body in ({}, {other: "Hi"}):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["message"], error["param"]) == (f"{field} is missing; give {wanted}", field)


def test_a_session_continues_as_the_client_says(gateway: Gateway) -> None:
    first = complete(gateway, extra_body={"session_id": "text"}).choices[0].text
    again = complete(gateway, PROMPT + first, extra_body={"session_id": "text"})
    assert again.choices[0].text == complete(gateway, PROMPT + first).choices[0].text


def test_every_chunk_has_a_choice_also_with_warnings(gateway: Gateway) -> None:
    with gateway.http() as client:
        body = {"prompt": "Once", "n_predict": 3, "ignore_eos": True, "stream": True, "nonsense": 1}
        text = client.post("/v1/completions", json=body).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert [chunk.get("warnings") for chunk in chunks] == [
        ["the parameter 'nonsense' is not known and had no effect"],
        *[None] * (len(chunks) - 1),
    ]
