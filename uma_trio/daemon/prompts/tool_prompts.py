"""Tells a model of its tools, of its calls and of their results, through its chat template.

Templates differ in what they take, and few say so.  So a template is tried at load: ``find_style`` renders a small
conversation in some ways and looks for its words in the text.  A template that knows no tools, or whose calls nobody
here could read, gets them as text: a description at the end of the system message, calls in the assistant's content,
results as messages of the user.  This is better than to refuse: most models have seen such text in training.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.tool_formats import HERMES, ToolFormat, make_call_markers, write_calls, write_example
from uma_trio.errors import UmaError
from uma_trio.models.markers import CallMarkers
from uma_trio.protocol.chat import ChatMessage, Tool, ToolCall

ID_CHARS: Final = 9
"""Length of a call's id: the only one that Mistral's templates take."""

_ID_ALPHABET: Final = string.ascii_letters + string.digits

SYSTEM: Final = ("system", "developer")

Fields = dict[str, Any]
"""A message, or a tool, as templates know it."""


@attrs.frozen
class ToolStyle:
    """What a chat template takes."""

    native: bool = False
    """It takes calls and their results.  Otherwise they become text."""
    describes: bool = False
    """It tells the model of the tools.  Otherwise the system message does."""
    arguments_as_text: bool = False
    """Arguments are JSON text, not an object."""
    no_content: bool = False
    """A message with nothing but calls has ``None`` for a content, not an empty text."""
    one_call: bool = False
    """A message has one call at most."""
    short_ids: bool = False
    """Ids of calls have ``ID_CHARS`` letters and digits."""
    named_ids: bool = False
    """Ids of calls are ``functions.NAME:NUMBER``; the calls of a conversation are counted."""


@attrs.frozen
class ToolSupport:
    """How tools work with one model."""

    format: ToolFormat
    style: ToolStyle
    markers: CallMarkers


PLAIN_TOOLS: Final = ToolSupport(HERMES, ToolStyle(), make_call_markers(HERMES, MarkerText(lambda _: None)))
"""Tools as text, in the format that most models know."""


def call_ids(answer: str | None) -> Callable[[int], str]:
    """Make ids that no other call of a conversation has, from the numbers of calls in an answer.

    Args:
        answer: an id that no other answer has: then the same number gives the same id.  ``None``: ids are random.
    """

    def make(number: int) -> str:
        if answer is None:
            return "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_CHARS))
        digest = hashlib.sha256(f"{number}:{answer}".encode("utf-8", "surrogatepass")).digest()
        return "".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in digest[:ID_CHARS])

    return make


def find_style(render: Callable[[Sequence[Fields], Sequence[Fields]], str], *, named_ids: bool = False) -> ToolStyle:
    """Find out what a template takes.  Renders up to 18 times, in about 10 ms.

    Args:
        render: messages and tools to text.
        named_ids: as in ``ToolStyle``.
    """
    tools = [
        Tool(name="first_tool", parameters={"properties": {"key_one": {"type": "string"}}}),
        Tool(name="second_tool"),
    ]
    calls = [
        ToolCall(id="aaaaaaaa1", name="first_tool", arguments={"key_one": "value_one"}),
        ToolCall(id="aaaaaaaa2", name="second_tool", arguments={"key_two": "value_two"}),
    ]
    question = ChatMessage(role="user", content="question")
    results = [ChatMessage(role="tool", content=f"result_{call.name}", tool_call_id=call.id) for call in calls]
    chat = [question, ChatMessage(role="assistant", tool_calls=calls), *results]
    text = _rendered(render, [question], tools, ToolStyle(describes=True))
    describes = "first_tool" in text and "key_one" in text
    needed = (
        "first_tool",
        "second_tool",
        "key_one",
        "value_one",
        "value_two",
        "result_first_tool",
        "result_second_tool",
    )
    for one_call, no_content, as_text in itertools.product((False, True), repeat=3):
        style = ToolStyle(True, describes, as_text, no_content, one_call, named_ids=named_ids)
        text = _rendered(render, chat, tools, style)
        without_tools = _rendered(render, chat, [], style) or text  # some templates insist on tools
        if all(word in without_tools for word in needed) and "{'key_one" not in text:  # not as Python shows an object
            return attrs.evolve(style, short_ids=not _takes_other_ids(render, chat, tools, style))
    return ToolStyle()


def _takes_other_ids(
    render: Callable[..., str], chat: Sequence[ChatMessage], tools: Sequence[Tool], style: ToolStyle
) -> bool:
    longer = []
    for message in chat:
        calls = [attrs.evolve(call, id=f"call_{call.id}") for call in message.tool_calls or ()]
        answers = message.tool_call_id and f"call_{message.tool_call_id}"
        longer.append(attrs.evolve(message, tool_calls=calls or None, tool_call_id=answers))
    return bool(_rendered(render, longer, tools, style))


def _rendered(render: Callable[..., str], chat: Sequence[ChatMessage], tools: Sequence[Tool], style: ToolStyle) -> str:
    """The text, or an empty one if the template does not take this."""
    try:
        return render(*template_chat(chat, tools, attrs.evolve(PLAIN_TOOLS, style=style)))
    except UmaError:
        return ""


def template_chat(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], support: ToolSupport
) -> tuple[list[Fields], list[Fields]]:
    """Messages and tools for a template.

    Messages of the roles system and developer are joined, because templates know one, at the beginning.
    """
    offered = [_tool_fields(tool) for tool in tools]
    system = [message.text for message in messages if message.role in SYSTEM]
    if tools and not support.style.describes:
        system.append(_description(offered, support.format))
        offered = []
    rest = [message for message in messages if message.role not in SYSTEM]
    chat = [*_native(rest, support.style)] if support.style.native else [*_as_text(rest, support.format)]
    if system:
        chat.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return chat, offered


def _tool_fields(tool: Tool) -> Fields:
    parameters = {"type": "object", "properties": {}, **tool.parameters}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _fields(message: ChatMessage) -> Fields:
    """Role, content and reasoning.  Templates have two names for reasoning; most use it only in the latest turn."""
    fields = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        fields |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    return fields


# -- a template that knows tools -------------------------------------------------------------------


def _native(messages: Sequence[ChatMessage], style: ToolStyle) -> Iterator[Fields]:
    names: dict[str | None, str] = {}
    ids = _Ids(style)
    for message in _one_call_each(messages) if style.one_call else messages:
        fields = _fields(message)
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            fields["tool_calls"] = [_call_fields(call, ids.of_call(call), style) for call in message.tool_calls]
            if style.no_content and not message.text:
                fields["content"] = None
        if message.role == "tool":
            name = message.name or names.get(message.tool_call_id)
            fields |= {} if name is None else {"name": name}
            if message.tool_call_id is not None:
                fields["tool_call_id"] = ids.of_result(message.tool_call_id)
        yield fields


def _call_fields(call: ToolCall, call_id: str | None, style: ToolStyle) -> Fields:
    arguments = _json(call.arguments) if style.arguments_as_text else call.arguments
    function = {"name": call.name, "arguments": arguments}
    identity = {} if call_id is None else {"id": call_id}
    return {"type": "function", **identity, "function": function}


class _Ids:
    """Ids of a conversation's calls as its template takes them."""

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._named: dict[str | None, str] = {}
        self._n_calls = 0

    def of_call(self, call: ToolCall) -> str | None:
        if self._style.named_ids:
            self._named[call.id] = f"functions.{call.name}:{self._n_calls}"
            self._n_calls += 1
            return self._named[call.id]
        return None if call.id is None else self.of_result(call.id)

    def of_result(self, call_id: str) -> str:
        is_short = len(call_id) == ID_CHARS and call_id.isalnum()
        if self._style.short_ids and not is_short:
            return hashlib.blake2b(call_id.encode(), digest_size=ID_CHARS).hexdigest()[:ID_CHARS]
        return self._named.get(call_id, call_id)


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """The same conversation, as if the model had waited for each result before its next call."""
    waiting: list[ChatMessage] = []
    for n, message in enumerate(messages):
        if len(message.tool_calls or ()) < 2:
            if message.role == "tool" and message in waiting:
                waiting.remove(message)
            else:
                yield message
            continue
        following = itertools.takewhile(lambda message: message.role == "tool", messages[n + 1 :])
        waiting = list(following)
        content = message
        for call in message.tool_calls or ():
            yield attrs.evolve(content, tool_calls=[call])
            content = ChatMessage(role="assistant", content="")
            yield from (result for result in waiting if call.id is not None and result.tool_call_id == call.id)
        waiting = [
            result for result in waiting if any(result.tool_call_id == call.id for call in message.tool_calls or ())
        ]


# -- one that does not -----------------------------------------------------------------------------


def _description(tools: Sequence[Fields], form: ToolFormat) -> str:
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    return (
        f"# Tools\n\nYou can call functions. These are all of them, each as JSON:\n<tools>\n{lines}\n</tools>\n\n"
        "To call one, write this, with the function's name and with arguments that fit its parameters:\n"
        f"{write_example(form)}"
    )


def _as_text(messages: Sequence[ChatMessage], form: ToolFormat) -> Iterator[Fields]:
    results: list[str] = []
    n_calls = 0
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.text}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        fields = _fields(message)
        if message.tool_calls:
            whole = write_calls(form, [(call.name, call.arguments) for call in message.tool_calls], n_calls)
            n_calls += len(message.tool_calls)
            fields["content"] = "\n".join(filter(None, (message.text, whole)))
        yield fields
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
