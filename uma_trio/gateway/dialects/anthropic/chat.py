"""Chats of Anthropic's API in the socket protocol: messages and tools.

Source: the Anthropic API reference, and the types of Anthropic's Python client.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from uma_trio.gateway.dialects.common.contents import Picture, content_of, picture_of_url
from uma_trio.gateway.dialects.common.conversation import reasoning_kwargs
from uma_trio.gateway.endpoint import without_effect
from uma_trio.gateway.errors import invalid
from uma_trio.protocol.chat import MAX_MESSAGES, MAX_TOOLS

PARAGRAPH: Final = "\n\n"
"""Between the text blocks of a message."""

CUSTOM: Final = (None, "custom")
"""Types of tools that the client runs and describes.  Clients run or describe no others."""

OF_OTHER_SERVERS: Final = ("redacted_thinking", "server_tool_use")
"""Blocks of an earlier answer that only the server that made them can read."""


THINKING_TYPES: Final = ("enabled", "adaptive", "disabled")
DISPLAYS: Final = ("summarized", "omitted")
"""Values of ``thinking.type`` and ``thinking.display``.  Newer clients may send others."""


class Block(msgspec.Struct, kw_only=True):
    """A part of a message's content.  Which fields it has depends on ``type``."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    """The arguments of a ``tool_use``."""
    tool_use_id: str | None = None
    content: Any = None
    """The result of a tool, in a ``tool_result``: a text, or blocks."""
    is_error: bool | None = None
    source: Any = None
    """The content of a ``document`` or an ``image``."""


class Message(msgspec.Struct):
    """A message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """Whether the model reasons, if its chat template lets that be chosen, and whether the answer contains it."""

    type: str
    budget_tokens: int | None = None
    """Tokens of reasoning."""
    display: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether the client wants no reasoning."""
        return self.type == "disabled" or self.display == "omitted"

    @property
    def budget(self) -> int | None:
        """Tokens of reasoning; ``None``: no limit."""
        return 0 if self.type == "disabled" else self.budget_tokens

    def warnings(self) -> list[str]:
        """A warning for each value that is not known."""
        values = ((self.type, "type of thinking", THINKING_TYPES), (self.display, "display of thinking", DISPLAYS))
        return [
            warning
            for value, kind, known in values
            if value is not None and value not in known
            for warning in without_effect([value], kind, known)
        ]


class JsonFormat(msgspec.Struct):
    """What the answer must look like."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """More about the answer."""

    format: JsonFormat | None = None
    effort: str | None = None


class Chat(msgspec.Struct, kw_only=True):
    """What a request contains whether it is answered or only counted."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """An earlier place of ``output_config.format``."""
    cache_control: Any = None
    """Has no effect, as in blocks and tools: all prompts are cached."""
    context_management: Any = None
    """Has no effect: the client decides what the messages contain."""

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the chat template."""
        enabled = {"enabled": True, "disabled": False}.get(self.thinking.type) if self.thinking else None
        return reasoning_kwargs(self.output_config.effort if self.output_config else None, enabled=enabled) or None


class ChatMessages:
    """The chat of a request, as messages of the socket protocol.

    Consecutive messages of the user are one, as in Anthropic's API.  So is a ``system`` message between them: clients add
    such messages at the end of a chat, and at its front they would change the prefix of all that is in the KV cache.

    Raises:
        HttpError: something is not supported.
    """

    def __init__(self, chat: Chat) -> None:
        self.messages: list[dict[str, Any]] = []
        self.warnings: list[str] = [] if chat.thinking is None else chat.thinking.warnings()
        self._parts: list[list[str | Picture]] = []
        """Texts and pictures of each message."""
        self._tools: dict[str, str] = {}
        """Name of the tool that each call names."""
        if not chat.messages:
            raise invalid("messages is empty; send at least one", parameter="messages")
        if chat.system:
            self._add_part("system", self._text(chat.system, "system"))
        for index, message in enumerate(chat.messages):
            self._add(message, f"messages[{index}].content")
        for message_, parts in zip(self.messages, self._parts, strict=True):
            message_["content"] = content_of(parts, PARAGRAPH)
        if not self.messages:
            raise invalid("no message has any content; send a text", parameter="messages")
        if self.messages[-1].get("tool_calls"):
            raise invalid("the last message has a tool_use; send its tool_result after it", parameter="messages")

    @property
    def is_begun(self) -> bool | None:
        """``True`` if the answer continues the last message; otherwise ``None``."""
        return True if self.messages[-1]["role"] == "assistant" else None

    def _add(self, message: Message, parameter: str) -> None:
        content = message.content
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        match message.role:
            case "system" if all(earlier["role"] == "system" for earlier in self.messages):
                self._add_part("system", self._text(content, parameter))
            case "system":
                self._add_part("user", f"<system>\n{self._text(content, parameter)}\n</system>")
            case "user":
                self._add_blocks_of_user(blocks, parameter)
            case "assistant":
                self._add_blocks_of_assistant(blocks, parameter)

    def _add_part(self, role: str, part: str | Picture) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self._parts[-1].append(part)
        else:
            self._append({"role": role}, part)

    def _append(self, message: dict[str, Any], *parts: str | Picture) -> None:
        self.messages.append(message)
        self._parts.append([*parts])

    def _add_blocks_of_user(self, blocks: list[Block], parameter: str) -> None:
        for number, block in enumerate(blocks):
            place = f"{parameter}[{number}]"
            if block.type == "tool_result":
                self._add_result(block, place)
            else:
                self._add_part("user", self._part_of(block, place))

    def _add_result(self, block: Block, place: str) -> None:
        if block.tool_use_id is None:
            raise invalid("a tool_result needs the tool_use_id of its call", parameter=place)
        try:
            content = msgspec.convert(block.content or "", str | list[Block])
        except msgspec.ValidationError:
            raise invalid("content of a tool_result is a text or a list of blocks", parameter=place) from None
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        parts = [self._part_of(part, f"{place}.content[{n}]") for n, part in enumerate(blocks)]
        message = {"role": "tool", "tool_call_id": block.tool_use_id}
        if name := self._tools.get(block.tool_use_id):
            message["name"] = name
        if block.is_error:
            first, *rest = parts or [""]
            parts = [f"Error: {first}", *rest] if isinstance(first, str) else ["Error:", first, *rest]
        self._append(message, *parts)

    def _add_blocks_of_assistant(self, blocks: list[Block], parameter: str) -> None:
        texts, thoughts, calls = [], [], []
        for number, block in enumerate(blocks):
            place = f"{parameter}[{number}]"
            if block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type == "tool_use":
                if block.id is None or block.name is None:
                    raise invalid("a tool_use needs id, name and input", parameter=place)
                self._tools[block.id] = block.name
                calls.append({"id": block.id, "name": block.name, "arguments": block.input or {}})
            elif block.type in OF_OTHER_SERVERS or block.type.endswith("_tool_result"):
                self.warnings.append(f"{place}: a block of type {block.type!r} was skipped")
            else:
                texts.append(self._text_of(block, place))
        message: dict[str, Any] = {"role": "assistant"}
        if "".join(thoughts):
            message["reasoning"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._append(message, "".join(texts))

    def _text(self, content: str | list[Block], parameter: str) -> str:
        if isinstance(content, str):
            return content
        return PARAGRAPH.join(self._text_of(block, f"{parameter}[{n}]") for n, block in enumerate(content))

    def _part_of(self, block: Block, parameter: str) -> str | Picture:
        match block:
            case Block(type="image", source={"type": "base64", "data": str(data)}):
                return Picture(f"{parameter}.source.data", data)
            case Block(type="image", source={"type": "url", "url": str(url)}):
                return picture_of_url(url, f"{parameter}.source.url")
            case Block(type="image"):
                raise invalid(
                    "the source of an image is {type: base64, media_type, data} or {type: url, url}",
                    parameter=parameter,
                )
        return self._text_of(block, parameter)

    @staticmethod
    def _text_of(block: Block, parameter: str) -> str:
        match block:
            case Block(type="text", text=str(text)):
                return text
            case Block(type="document", source={"type": "text", "data": str(text)}):
                return text
        raise invalid(f"content of type {block.type!r} is not supported; send text", parameter=parameter)


def tool_fields(chat: Chat) -> tuple[dict[str, Any], list[str]]:
    """Fields of the socket protocol for the tools of a request, and warnings about those that are skipped.

    Raises:
        HttpError: a tool has no schema, or the choice names none.
    """
    tools: list[dict[str, Any]] = []
    warnings: list[str] = []
    for number, tool in enumerate(chat.tools or ()):
        if tool.type not in CUSTOM:
            warnings.append(f"tools[{number}]: the type {tool.type!r} needs Anthropic's server, and was skipped")
        elif tool.name is None or tool.input_schema is None:
            raise invalid("a tool needs name and input_schema", parameter=f"tools[{number}]")
        else:
            tools.append({"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema})
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    if (choice := chat.tool_choice) is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        fields["tool_choice"] = _choice(choice)
    return fields, warnings


def _choice(choice: ToolChoice) -> str | dict[str, str]:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("a tool_choice of type 'tool' needs a name", parameter="tool_choice.name")
        return {"name": choice.name}
    return "required" if choice.type == "any" else choice.type
