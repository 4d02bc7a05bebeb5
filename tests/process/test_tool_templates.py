"""Real chat templates, which llama.cpp's source has: what they take, and that the calls which they write are read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import pytest

from tests.support.profile import sampled, thorough
from tests.support.real_daemon import ROOT
from uma_trio.daemon.prompts.chat import ChatTemplate
from uma_trio.daemon.prompts.chosen_template import FOLDER as BUILT_IN
from uma_trio.daemon.prompts.control_tokens import ControlTokens
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.tool_formats import HERMES, find_tool_format, make_call_markers
from uma_trio.daemon.prompts.tool_prompts import ToolStyle, ToolSupport, find_style, template_chat
from uma_trio.daemon.text.regions import RegionAssembler
from uma_trio.daemon.text.tool_calls import ToolCalling
from uma_trio.protocol.chat import ChatMessage, Tool, ToolCall

pytestmark = pytest.mark.usefixtures("forked_children")

FOLDER = ROOT / "build" / "llama.cpp" / "models" / "templates"

TOOLS = [
    Tool(name="weather", description="The weather.", parameters={"properties": {"city": {"type": "string"}}}),
    Tool(name="nothing"),
]
CALLS = [
    ToolCall(id="aaaaaaaa1", name="weather", arguments={"city": 'Lima "é}'}),
    ToolCall(id="aaaaaaaa2", name="nothing", arguments={}),
]
QUESTION = ChatMessage(role="user", content="How warm is it?")
RESULTS = [ChatMessage(role="tool", content=f"result {call.id}", tool_call_id=call.id) for call in CALLS]

STYLES = {
    "Bielik-11B-v3.0-Instruct": ("hermes", ToolStyle(True, True)),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-args", ToolStyle(True, True, short_ids=True)),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ToolStyle(True, True)),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ToolStyle(True, True)),
    "Qwen-Qwen3-0.6B": ("hermes", ToolStyle(True, True)),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (
        "deepseek-json",
        ToolStyle(True, False, arguments_as_text=True, no_content=True),
    ),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", ToolStyle(True)),
    "google-gemma-4-31B-it": ("gemma", ToolStyle(True, True)),
    "ibm-granite-granite-4.0": ("hermes", ToolStyle(True, True)),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", ToolStyle(True, True, one_call=True)),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", ToolStyle(True, True, one_call=True)),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral-args", ToolStyle(True, True)),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ToolStyle(True, True, short_ids=True)),
    "openai-gpt-oss-120b": ("gpt-oss", ToolStyle(True, True, one_call=True)),
    "Qwen3-Coder": ("qwen3-coder", ToolStyle(True, True)),
    "Qwen3.5-4B": ("qwen3-coder", ToolStyle(True, True)),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3-coder", ToolStyle(True, True)),
    "StepFun3.5-Flash": ("qwen3-coder", ToolStyle(True, True)),
    "ByteDance-Seed-OSS": ("seed-oss", ToolStyle(True, True)),
    "GLM-4.6": ("glm", ToolStyle(True, True)),
    "GLM-4.7-Flash": ("glm", ToolStyle(True, True)),
    "inclusionai-ling-3.0-flash": ("glm", ToolStyle(True, True)),
    "poolside-Laguna-S-2.1": ("glm", ToolStyle(True, True)),
    "poolside-Laguna-XS-2.1": ("glm", ToolStyle(True, True)),
    "Spark2.5": ("glm", ToolStyle(True, True)),
    "moonshotai-Kimi-K2": ("kimi", ToolStyle(True, True, named_ids=True)),
    "Kimi-K2-Instruct": ("kimi", ToolStyle()),  # it changes lists, which the sandbox does not allow
    "Kimi-K2-Thinking": ("kimi", ToolStyle()),
    "MiniMax-M2": ("minimax", ToolStyle(True, True)),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek-v3.2", ToolStyle(True, True)),
    "deepseek-ai-DeepSeek-V4": ("deepseek-v4", ToolStyle(True, True)),
    "microsoft-Phi-3.5-mini-instruct": (None, ToolStyle()),
}


FIRST = {form: name for name, (form, _) in reversed(STYLES.items())}
"""A template of each format."""


@attrs.frozen
class Made:
    """A template of a name, and what it takes."""

    name: str
    source: str
    chat: ChatTemplate
    support: ToolSupport


@pytest.fixture(scope="module", params=[name if name in FIRST.values() else thorough(name) for name in STYLES])
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    source, chat = template(request.param)
    yield Made(request.param, source, chat, support_of(source, chat))
    chat.close()


def template(name: str) -> tuple[str, ChatTemplate]:
    path = FOLDER / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"there is no {path}: ./build_llama.sh --dev unpacks llama.cpp's source")
    return path.read_text(), ChatTemplate(path.read_text(), bos="<s>", eos="</s>")


def test_what_a_template_takes(made: Made) -> None:
    found = find_tool_format(made.source)
    style = find_style(made.chat.render, named_ids=found is not None and found.numbered)
    assert (None if found is None else found.name, style) == STYLES[made.name]


def support_of(source: str, chat: ChatTemplate) -> ToolSupport:
    found = find_tool_format(source) or HERMES
    style = find_style(chat.render, named_ids=found.numbered) if find_tool_format(source) else ToolStyle()
    return ToolSupport(found, style, make_call_markers(found, MarkerText(lambda _: None)))


def rendered(chat: ChatTemplate, support: ToolSupport, messages: Sequence[ChatMessage], **options: bool) -> str:
    return chat.render(*template_chat(messages, TOOLS, support), **options)


def test_calls_that_a_template_writes_are_read_again(made: Made) -> None:
    check_calls(made.chat, made.support)


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_calls_that_a_built_in_template_writes_are_read_again(name: str) -> None:
    source = (BUILT_IN / f"{name}.jinja").read_text()
    chat = ChatTemplate(source, bos="<s>", eos="</s>")
    check_calls(chat, support_of(source, chat))


def check_calls(chat: ChatTemplate, support: ToolSupport) -> None:
    answer = ChatMessage(role="assistant", tool_calls=CALLS[:1] if support.style.one_call else CALLS)
    prompt = rendered(chat, support, [QUESTION])
    assert "weather" in prompt
    assert "The weather." in prompt
    whole = rendered(chat, support, [QUESTION, answer], add_generation_prompt=False)
    output = whole.rpartition(QUESTION.text)[2]
    if support.format.bare:
        output = output[output.index("{") :]
    tools = {tool.name: tool.parameters for tool in TOOLS}
    calling = ToolCalling(markers=support.markers, tools=tools, make_id=lambda _: "x")
    assembler = RegionAssembler([], None, calling, is_open=False)
    for character in output:
        assembler.feed(-1, character.encode())
    assembler.finish()
    assert [(call.name, call.arguments) for call in assembler.calls] == [
        (call.name, call.arguments) for call in answer.tool_calls or ()
    ]


def test_a_conversation_with_calls_and_results(made: Made) -> None:
    messages = [
        ChatMessage(role="user", content="How warm is it?"),
        ChatMessage(role="assistant", tool_calls=[CALLS[0], CALLS[1]]),
        *RESULTS,
        ChatMessage(role="assistant", content="It is warm."),
        ChatMessage(role="user", content="And now?"),
        ChatMessage(role="assistant", tool_calls=[ToolCall(id="bbbbbbbb1", name="nothing", arguments={})]),
        ChatMessage(role="tool", content="cold", tool_call_id="bbbbbbbb1"),
    ]
    text = rendered(made.chat, made.support, messages)
    places = [
        text.index(word, text.index("How warm")) for word in ("result aaaaaaaa1", "It is warm.", "And now?", "cold")
    ]
    assert places == sorted(places)
    assert "result aaaaaaaa2" in text


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b", None])
@pytest.mark.parametrize("token", [thorough("<|im_end|>"), thorough("<|eot_id|>"), "name"])
def test_control_tokens_in_tools_stay_text(name: str | None, token: str) -> None:
    """Wherever a client puts one: in descriptions, schemas and their keys, arguments and their keys, results."""
    source = template(name)[0] if name is not None else (BUILT_IN / "chatml.jinja").read_text()
    controls = ControlTokens(["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start|>", token])
    chat = ChatTemplate(source, bos="<s>", eos="</s>", controls=controls)
    support = support_of(source, chat)
    tool = Tool(
        name="weather",
        description=f"a{token}b",
        parameters={
            "properties": {f"c{token}d": {"type": "string", "description": f"e{token}f", "enum": [f"g{token}h"]}}
        },
    )
    messages = [
        ChatMessage(role="user", content="x"),
        ChatMessage(
            role="assistant", tool_calls=[ToolCall(id="i", name="weather", arguments={f"k{token}l": [f"m{token}n"]})]
        ),
        ChatMessage(role="tool", content=f"o{token}p", tool_call_id="i"),
    ]
    parts = chat.parts(*template_chat(messages, [tool], support))
    text = "".join(part.text for part in parts)
    assert text == chat.render(*template_chat(messages, [tool], support))
    for before, after in zip("acegkmo", "bdfhlnp", strict=True):
        spelled = f"{before}{token}{after}"
        assert not any(spelled in part.text for part in parts if part.parse_special)


def test_system_messages_are_joined_in_front() -> None:
    chat = [
        ChatMessage(role="user", content="a"),
        ChatMessage(role="developer", content="b"),
        ChatMessage(role="assistant", content="c"),
        ChatMessage(role="system", content="d"),
    ]
    source = (BUILT_IN / "chatml.jinja").read_text()
    messages, tools = template_chat(chat, [], support_of(source, ChatTemplate(source, bos="", eos="")))
    assert messages == [
        {"role": "system", "content": "b\n\nd"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c"},
    ]
    assert tools == []


def test_calls_of_kimi_are_counted_and_named() -> None:
    """Its template takes the id for the name of the call.  The call of a later turn has the next number."""
    source = (
        "{% for message in messages %}<|im_{{ message.role }}|>{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for call in message.tool_calls or [] %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{% endif %}{{ message.content }}"
        "{% endfor %}"
    )
    chat = ChatTemplate(source, bos="", eos="")
    support = support_of(source, chat)
    assert support.style == ToolStyle(True, True, named_ids=True)
    later = ToolCall(id="bbbbbbbb1", name="weather", arguments={"city": "Rome"})
    messages = [
        QUESTION,
        ChatMessage(role="assistant", tool_calls=CALLS),
        *RESULTS[::-1],
        ChatMessage(role="assistant", tool_calls=[later]),
        ChatMessage(role="tool", content="warm", tool_call_id="bbbbbbbb1"),
    ]
    for style in (support.style, ToolStyle()):
        text = rendered(chat, ToolSupport(support.format, style, support.markers), messages)
        begun = [
            text.index(f"<|tool_call_begin|>functions.{name}<") for name in ("weather:0", "nothing:1", "weather:2")
        ]
        assert begun == sorted(begun)
    text = rendered(chat, support, messages)
    assert "## Return of functions.weather:0\nresult aaaaaaaa1" in text
    assert "## Return of functions.nothing:1\nresult aaaaaaaa2" in text
    assert "## Return of functions.weather:2\nwarm" in text


def test_ids_that_a_template_does_not_take_are_replaced() -> None:
    _, chat = template("mistralai-Mistral-Nemo-Instruct-2407")
    source = (FOLDER / "mistralai-Mistral-Nemo-Instruct-2407.jinja").read_text()
    support = support_of(source, chat)
    calls = [ToolCall(id=f"call_of_another_{n}", name="nothing", arguments={}) for n in range(2)]
    results = [ChatMessage(role="tool", content=str(n), tool_call_id=call.id) for n, call in enumerate(calls)]
    messages, _ = template_chat([QUESTION, ChatMessage(role="assistant", tool_calls=calls), *results], [], support)
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:]] == ids
    assert len({*ids}) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


WITHOUT_TOOLS = [
    path
    for path in (*FOLDER.glob("*.jinja"), *BUILT_IN.glob("*.jinja"))
    if "tool_use" not in path.stem and path.stem != "fireworks-ai-llama-3-firefunction-v2"
]


@pytest.mark.parametrize("path", sampled(sorted(WITHOUT_TOOLS), 6), ids=lambda path: path.stem)
def test_an_answer_continues_the_last_message(path):
    chat = ChatTemplate(path.read_text(), bos="<s>", eos="</s>")
    given = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    try:
        [part] = chat.parts(given, continue_final=True)
        assert part.text.endswith("One, two,")
        assert "Count." in part.text
    finally:
        chat.close()
