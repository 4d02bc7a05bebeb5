"""Responses that are stored, continued, made in the background, read again and cancelled, with OpenAI's client."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner, Result

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import real_daemon
from uma_trio.cli import main

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ASK: dict[str, Any] = {"model": "embedded", "input": QUESTION}
LONG: dict[str, Any] = {
    "model": "embedded",
    "input": "Tell me a story about a fox.",
    "text": {
        "format": {
            "type": "json_schema",
            "name": "x",
            "schema": {"type": "array", "items": {"enum": ["fox"]}, "minItems": 100, "maxItems": 100},
        }
    },
}


def ended(client: openai.OpenAI, name: str) -> Any:
    """The response when it has ended."""
    until = time.monotonic() + 60
    while (found := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def test_a_response_is_stored_unless_the_client_says_otherwise(gateway: Gateway) -> None:
    client = gateway.openai()
    made = client.responses.create(**ASK)
    assert (made.output_text, made.store) == (ANSWER, True)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    other = client.responses.create(**ASK, store=False)
    assert (other.output_text, other.store) == (ANSWER, False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)


def test_lists_for_people_leave_stored_responses_out(gateway: Gateway) -> None:
    name = gateway.openai().responses.create(**ASK).id
    shell = CliRunner()

    def listed(*command: str) -> Result:
        found = shell.invoke(main, [*command, "--socket", str(gateway.daemon.socket)])
        assert found.exit_code == 0, found.output
        return found

    for command in (["attach"], ["sessions"], ["sessions", "list"]):
        found = listed(*command)
        assert "resp_" not in found.stdout
        assert "stored responses of OpenAI's API; --all lists them" in found.stderr
        assert name in listed(*command, "--all").stdout
        assert name in listed(*command, "--json").stdout, "programs get all"


def test_errors_about_an_earlier_response_name_the_field_of_the_request(gateway: Gateway) -> None:
    with gateway.http() as client:
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            for name in ("nobody", "x" * 1000):
                found = client.post(path, json={"input": QUESTION, "previous_response_id": name})
                assert found.json()["error"]["param"] == "previous_response_id", found.text
                assert "answer_id" not in found.text


def test_what_is_stored_may_go_on_without_input(gateway: Gateway) -> None:
    client = gateway.openai()
    made = client.responses.create(**ASK)
    again = client.responses.create(model="embedded", previous_response_id=made.id)
    assert again.status == "completed"
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        client.responses.create(model="embedded", instructions="Be brief.")


def test_a_response_in_the_background(gateway: Gateway) -> None:
    client = gateway.openai()
    made = client.responses.create(**ASK, background=True, metadata={"a": "b"})
    assert (made.status, made.output, made.background) == ("queued", [], True)
    found = ended(client, made.id)
    assert (found.status, found.output_text, found.metadata) == ("completed", ANSWER, {"a": "b"})
    assert found.usage.output_tokens > 3


def test_a_stream_in_the_background_goes_on_after_any_event(gateway: Gateway) -> None:
    client = gateway.openai()
    with client.responses.create(**LONG, background=True, stream=True) as stream:
        begun = [next(stream) for _ in range(7)]
    name = begun[0].response.id
    whole = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in whole[:7]] == [event.to_dict() for event in begun]
    assert [event.sequence_number for event in whole] == [*range(len(whole))]
    for after in (0, 1, 2, 6, 50, len(whole) - 2):
        rest = list(client.responses.retrieve(name, stream=True, starting_after=after))
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in whole[after + 1 :]]
    assert whole[-1].response.to_dict() == client.responses.retrieve(name).to_dict()


def test_a_response_is_cancelled_and_what_it_has_stays(gateway: Gateway) -> None:
    client = gateway.openai()
    with client.responses.create(**LONG, background=True, stream=True) as stream:
        name = next(event.response.id for event in stream if event.type == "response.created")
        next(event for event in stream if event.type == "response.output_text.delta")
        cancelled = client.responses.cancel(name)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert client.responses.cancel(name).to_dict() == cancelled.to_dict() == client.responses.retrieve(name).to_dict()
    gateway.daemon.settled()


def test_a_response_continues_an_earlier_one(gateway: Gateway) -> None:
    client = gateway.openai()
    rules = "You know all countries and their capitals, and your answers are as short as possible."
    first = client.responses.create(**ASK, instructions=rules)
    second = client.responses.create(model="embedded", input="And of Italy?", previous_response_id=first.id)
    branch = client.responses.create(model="embedded", input="And of Japan?", previous_response_id=first.id)
    assert (second.previous_response_id, branch.previous_response_id) == (first.id, first.id)
    items = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Japan?"},
    ]
    same = client.responses.create(model="embedded", input=items, store=False)
    assert branch.output_text == same.output_text
    assert branch.usage.input_tokens == same.usage.input_tokens, "instructions are not carried over"
    third = client.responses.create(model="embedded", input="Thanks!", previous_response_id=second.id, background=True)
    assert ended(client, third.id).status == "completed"
    counted = client.responses.input_tokens.count(model="embedded", input="Hi", previous_response_id=third.id)
    assert counted.input_tokens > second.usage.input_tokens


def test_what_was_computed_for_a_response_is_not_computed_again(gateway: Gateway) -> None:
    client = gateway.openai()
    text = "The fox is red. " * 40
    first = client.responses.create(model="embedded", input=text)
    second = client.responses.create(model="embedded", input="And?", previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_tool_call_is_answered_with_its_result_alone(gateway: Gateway) -> None:
    client = gateway.openai()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "parameters": parameters}]
    ask = {"model": "embedded", "tools": tools}
    first = client.responses.create(**ask, input="How warm is it in Lima?", tool_choice="required")
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = client.responses.create(**ask, input=[result], previous_response_id=first.id, tool_choice="none")
    items = [{"role": "user", "content": "How warm is it in Lima?"}, call.to_dict(), result]
    same = client.responses.create(**ask, input=items, store=False, tool_choice="none")
    assert (second.output_text, second.usage.input_tokens) == (same.output_text, same.usage.input_tokens)


def test_a_conversation_keeps_its_turns(gateway: Gateway) -> None:
    client = gateway.openai()
    conversation = client.conversations.create()
    first = client.responses.create(**ASK, conversation=conversation.id)
    second = client.responses.create(model="embedded", input="And of Italy?", conversation={"id": conversation.id})
    assert first.conversation.id == second.conversation.id == conversation.id
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.conversations.retrieve(conversation.id).id == conversation.id
    with pytest.raises(openai.BadRequestError, match="name that as conversation"):
        client.responses.create(**ASK, previous_response_id=first.id)
    assert client.conversations.delete(conversation.id).deleted
    for ask in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            ask(conversation.id)


@pytest.mark.parametrize(
    ("wrong", "status", "parameter"),
    [
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, 400, "conversation"),
        ({"conversation": 3}, 400, "conversation"),
        ({"background": True, "store": False}, 400, "store"),
        ({"conversation": "conv_1", "store": False}, 400, "store"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    gateway: Gateway, wrong: dict[str, Any], status: int, parameter: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        gateway.openai().responses.create(**{**ASK, **wrong})
    assert (refused.value.status_code, refused.value.param) == (status, parameter)


@pytest.mark.parametrize("after", ["-1", "x", "99999999999"])
def test_a_wrong_number_of_an_event_is_refused(gateway: Gateway, after: str) -> None:
    name = gateway.openai().responses.create(**ASK).id
    with gateway.http() as client:
        found = client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": after})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "starting_after")
    assert ("from 0 to 2147483647" in found.json()["error"]["message"]) == (after == "99999999999")


def test_a_background_response_that_fails_says_why(gateway: Gateway) -> None:
    client = gateway.openai()
    made = client.responses.create(model="embedded", input="a b " * 50_000, background=True)
    found = ended(client, made.id)
    assert (found.status, found.error.code) == ("failed", "context_length_exceeded")
    *_, last = client.responses.retrieve(made.id, stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="has no answer to continue"):
        client.responses.create(**ASK, previous_response_id=made.id)


def test_a_response_outlives_the_daemon_and_the_gateway(tmp_path: Path) -> None:
    """``kill -9`` of the daemon in the middle of a stream, which ends the gateway; the numbers of the events go on."""
    flags = ("--http", "0", "--state-dir", str(tmp_path / "state"), "--kv-unified", "off", "--flash-attn", "off")
    ask: dict[str, Any] = {**LONG, "background": True}
    seen: list[Any] = []
    with real_daemon(*flags) as daemon:
        client = openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none")
        whole = client.responses.create(**LONG)
        with client.responses.create(**ask, stream=True) as stream:
            seen += [next(stream) for _ in range(20)]
        daemon.process.kill()
        daemon.process.wait()
    name = seen[0].response.id
    with real_daemon(*flags) as daemon:
        client = openai.OpenAI(base_url=f"{daemon.http_url()}/v1", api_key="none")
        rest = list(client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
        assert [event.sequence_number for event in [*seen, *rest]] == [*range(len(seen) + len(rest))]
        text = "".join(each.delta for each in [*seen, *rest] if each.type == "response.output_text.delta")
        assert text == whole.output_text == rest[-1].response.output_text
        assert client.responses.retrieve(name).output_text == text
        assert client.responses.retrieve(whole.id).output_text == text
        after = client.responses.create(model="embedded", input="Thanks!", previous_response_id=name)
        assert after.usage.input_tokens > whole.usage.total_tokens
