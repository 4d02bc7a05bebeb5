"""An answer that continues the last message, with the real engine."""

import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def begun(text):
    return [*QUESTION, {"role": "assistant", "content": text}]


@pytest.mark.parametrize("stream", [True, False])
def test_the_answer_is_the_rest_of_the_message(daemon, stream):
    whole = daemon.ask(messages=QUESTION).text
    start = whole[: whole.index(" is")]
    answer = daemon.ask(messages=begun(start), continue_final_message=True, stream=stream)
    assert start + answer.text == whole
    assert answer.reason == "stop"


def test_otherwise_the_answer_is_a_message_of_its_own(daemon):
    rendered = [
        daemon.ask(messages=begun("The capital"), continue_final_message=continues, echo=True, max_tokens=1).text
        for continues in (False, True)
    ]
    assert rendered[0].rpartition("The capital")[2].count("assistant") == 1
    assert "assistant" not in rendered[1].rpartition("The capital")[2]


def test_a_session_goes_on_after_a_continued_message(daemon):
    first = daemon.ask(messages=begun("The capital of"), continue_final_message=True, session_id="trip")
    assert first.reason == "stop"
    second = daemon.ask(messages=[{"role": "user", "content": "And of Italy?"}], session_id="trip", echo=True)
    assert f"The capital of{first.text}" in second.text
    assert second.last["usage"]["cached_tokens"] > first.last["usage"]["prompt_tokens"]
    assert daemon.ask(type="sessions", action="close", session_id="trip").last["sessions"][0]["session_id"] == "trip"
