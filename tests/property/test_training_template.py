"""The chat template of the embedded model: ChatML, with tools as Hermes and Qwen have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from uma_trio.daemon.prompts.chosen_template import FOLDER
from uma_trio.daemon.prompts.template_worker import Renderer
from uma_trio.training.chat import TEMPLATE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def render(**variables: Any) -> str:
    return Renderer(TEMPLATE, 1 << 20).render("2026-01-01", variables)


@pytest.mark.parametrize("generating", [True, False])
@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
def test_a_chat_without_tools_is_rendered_as_chatml(tools: dict[str, Any], generating: bool) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    chatml = Renderer((FOLDER / "chatml.jinja").read_text(), 1 << 20)
    variables = {"messages": messages, "add_generation_prompt": generating}
    assert render(**variables, **tools) == chatml.render("2026-01-01", variables)


def test_a_chat_with_tools_is_rendered_as_hermes_and_qwen_do() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": '{"sky": "clear"}'},
    ]
    text = render(messages=messages, tools=[WEATHER], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert text.count("<|im_start|>system") == 1
    assert f"\n<tools>\n{json.dumps(WEATHER)}\n</tools>\n" in text
    called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert text.endswith(
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        '<tool_response>\n{"sky": "clear"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


def test_the_template_takes_other_forms_of_calls_too() -> None:
    """Arguments as JSON text, as OpenAI's API has them, calls without ``function``, and text before a call."""
    user = {"role": "user", "content": "Weather?"}
    wanted = render(
        messages=[user, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]
    )
    for call in ({"function": {"name": "f", "arguments": '{"a": 1}'}}, {"name": "f", "arguments": {"a": 1}}):
        assert render(messages=[user, {"role": "assistant", "content": "", "tool_calls": [call]}]) == wanted
    spoken = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    assert render(messages=[user, spoken]) == wanted.replace("assistant\n", "assistant\nLet me see.\n")
