"""Why a prompt was computed again: over HTTP, over the socket, on the command line; the real engine answers."""

from __future__ import annotations

import typing

import attrs
import msgspec
from click.testing import CliRunner

from tests.gateway.conftest import Gateway
from uma_trio.cli import main
from uma_trio.cli.explain import in_words
from uma_trio.gateway.dialects.native.shapes import ExplainedPrompt
from uma_trio.protocol.usage import Explanation, Obstacle

RULES = "You answer briefly, in whole sentences, and you never joke. " * 6


def ask(gateway: Gateway, date: str, question: str, **fields: object) -> tuple[str, dict[str, object]]:
    """The id of a request whose system prompt has a date, and its usage."""
    system = f"Today is {date}. {RULES}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.json()["usage"]


def test_a_date_in_the_system_prompt_is_found(gateway: Gateway) -> None:
    ask(gateway, "2026-11-27", "What is the capital of France?")
    name, usage = ask(gateway, "2026-11-28", "What is the capital of France?", explain=True)
    with gateway.http() as client:
        answer = client.get(f"/v1/requests/{name}/explain")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    found = msgspec.convert(body, ExplainedPrompt)
    assert (found.reason, found.again_tokens > 50, found.cost_ms > 0) == ("changed", True, True)
    change = body["change"]
    assert (change["kind"], change["message_index"], change["role"]) == ("date", 0, "system")
    assert (change["was"][:10], change["now"][:10]) == ("2026-11-27", "2026-11-28")
    assert change["before"].endswith("Today is ")
    assert usage["explanation"] == body
    shown = CliRunner().invoke(main, ["explain", f"chatcmpl-{name}", "--socket", str(gateway.daemon.socket)])
    assert shown.exit_code == 0, shown.output
    assert "a date or a time, in message 0 (system)" in shown.output
    assert "2026-11-27" in shown.output


def test_a_prompt_that_goes_on_was_not_computed_again(gateway: Gateway) -> None:
    ask(gateway, "2031-01-01", "What is the capital of France?")
    _, usage = ask(gateway, "2031-01-01", "What is the capital of France?", explain=True)
    found = usage["explanation"]
    assert isinstance(found, dict)
    assert (found["reason"], found["again_tokens"], found["prompt_tokens"] - found["cached_tokens"]) == ("cached", 0, 1)
    assert ask(gateway, "2031-01-01", "Hello")[1].get("explanation") is None, "only who asks gets it"


def test_what_is_cached_from_before_the_start_begins_like_no_prompt_that_is_known() -> None:
    new = Explanation(request_id="r", reason="new", prompt_tokens=20, cached_tokens=0, common_tokens=0)
    assert in_words(new)[1] == "no earlier prompt that is known begins like it"
    cached = in_words(attrs.evolve(new, cached_tokens=19))[1]
    assert "nothing is known of the prompt that they belonged to" in cached
    assert "has forgotten it" in cached, "many others may have come since"


def test_each_obstacle_has_words() -> None:
    found = Explanation(request_id="r", reason="not_shared", prompt_tokens=60, cached_tokens=0, common_tokens=42)
    texts = {in_words(attrs.evolve(found, obstacle=each))[2] for each in typing.get_args(Obstacle)}
    assert len(texts) == len(typing.get_args(Obstacle)) > 1


def test_nothing_is_known_of_other_requests(gateway: Gateway) -> None:
    with gateway.http() as client:
        missing = client.get("/v1/requests/nobody/explain")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "E_ANSWER_NOT_FOUND")
    shown = CliRunner().invoke(main, ["explain", "nobody", "--socket", str(gateway.daemon.socket)])
    assert shown.exit_code == 2
