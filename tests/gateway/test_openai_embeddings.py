"""Embeddings of OpenAI's API."""

from __future__ import annotations

import math

import openai
import pytest

from tests.gateway.conftest import Gateway

TEXTS = ["What is the capital of France?", "Once upon a time"]


def embed(gateway: Gateway, given: object, **fields: object) -> list[list[float]]:
    found = gateway.openai().embeddings.create(model="embedded", input=given, **fields)
    assert [each.index for each in found.data] == list(range(len(found.data)))
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0
    return [each.embedding for each in found.data]


def test_14_base64_which_openais_client_asks_for_is_the_same_as_floats(gateway: Gateway) -> None:
    packed, plain = embed(gateway, TEXTS), embed(gateway, TEXTS, encoding_format="float")
    assert all(
        math.isclose(a, b, rel_tol=1e-6) for x, y in zip(packed, plain, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-3) for vector in plain)


def test_a_text_a_list_and_their_tokens_are_the_same(gateway: Gateway) -> None:
    with gateway.http() as client:
        tokens = [client.post("/v1/tokenize", json={"text": text}).json()["tokens"] for text in TEXTS]
    [alone], together = embed(gateway, TEXTS[0]), embed(gateway, TEXTS)
    for other in (together[0], embed(gateway, tokens[0])[0], embed(gateway, tokens)[0]):
        assert sum(a * b for a, b in zip(alone, other, strict=True)) > 0.999
    assert sum(a * b for a, b in zip(*together, strict=True)) < 0.999


def test_the_forms_of_llama_server_are_the_same_text(gateway: Gateway) -> None:
    first, rest = TEXTS[0][:12], TEXTS[0][12:]
    [alone] = embed(gateway, TEXTS[0])
    for form in ({"prompt_string": TEXTS[0]}, {"content": [{"type": "text", "text": each} for each in (first, rest)]}):
        assert embed(gateway, form) == [alone]
        assert embed(gateway, [form, TEXTS[1]])[0] == pytest.approx(alone, abs=1e-3)
    with gateway.http() as client:
        of_first = client.post("/v1/tokenize", json={"text": first}).json()["tokens"]
        of_rest = client.post("/v1/tokenize", json={"text": rest, "add_special": False}).json()["tokens"]
    assert embed(gateway, [*of_first, rest]) == embed(gateway, [*of_first, *of_rest])


def test_fewer_dimensions(gateway: Gateway) -> None:
    [short], [whole] = embed(gateway, TEXTS[0], dimensions=8), embed(gateway, TEXTS[0])
    assert len(short) == 8 < len(whole)
    assert math.isclose(math.hypot(*short), 1, rel_tol=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": []},
        {"input": [[]]},
        {"input": ["a", None]},
        {"input": {"content": "a"}},
        {"input": {"content": [{"type": "image_url", "image_url": {"url": "a"}}]}},
        {"input": ["a"] * 2049},
        {"input": "a", "dimensions": 0},
        {"input": "a", "dimensions": 10**6},
        {"input": "a", "encoding_format": "hex"},
        {"input": [10**9]},
        {"input": ["a", "one two three " * 20_000]},
    ],
)
def test_what_cannot_be_embedded_is_refused(gateway: Gateway, wrong: dict[str, object]) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        gateway.openai().embeddings.create(**{"model": "embedded", **wrong})
    assert refused.value.status_code in (400, 413)
    assert refused.value.body["message"]
    gateway.daemon.settled()
