"""A conversation as its client sees it: the messages so far, and those that the next request sends.  Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

import attrs

from uma_trio.cli.answer import call_line
from uma_trio.protocol.chat import ChatMessage

Message = dict[str, Any]
Part = dict[str, Any]
"""A part of a content: a text, a picture or sound."""

FILES: Final = {"image": "[picture]", "audio": "[sound]"}
"""Types of parts that are files, and what stands for them on a page."""


def text_of(content: str | Sequence[Part]) -> str:
    """The text of a message's content, without its files."""
    return content if isinstance(content, str) else "".join([part.get("text") or "" for part in content])


def files_of(content: str | Sequence[Part]) -> list[Part]:
    """The pictures and sounds of a message's content."""
    return [] if isinstance(content, str) else [part for part in content if part["type"] in FILES]


@attrs.define
class Conversation:
    """The messages of a chat, and where they are kept.

    The daemon keeps those of a session, and a request sends only what is new.  Without a session this object is all
    there is, and each request sends everything; the daemon finds the beginning in its KV cache.
    """

    session: str | None = None
    """Name of the session; ``None``: a conversation that ends with the program."""
    system: str | None = None
    """The system message, if ``messages`` does not have one yet."""
    messages: list[Message] = attrs.field(factory=list)
    """All that was answered so far, a system message of a session included."""
    files: list[Part] = attrs.field(factory=list)
    """Pictures and sounds of the next question."""
    is_edited: bool = False
    """Whether the last answer is no longer the one that the daemon has of a session."""

    @property
    def is_fixed(self) -> bool:
        """Whether the system message can no longer change, because the daemon has it."""
        return self.session is not None and bool(self.messages)

    @property
    def last_question(self) -> str | None:
        """The latest message of the user, if it is answered."""
        if len(self.messages) < 2 or self.messages[-2]["role"] != "user":
            return None
        return text_of(self.messages[-2]["content"])

    def request(self, question: str, *, retry: bool = False) -> dict[str, object]:
        """Fields of the request that asks ``question``.

        Args:
            retry: replace the latest question and its answer.
        """
        new = self._question_message(question, retry)
        if self.session is None:
            return {"messages": [*self._system, *self._earlier_messages(retry), new]}
        fields: dict[str, object] = {"session_id": self.session}
        fields["messages"] = [new] if self.messages else [*self._system, new]
        if retry:
            fields["drop_messages"] = 2
        elif self.is_edited:
            fields |= {"messages": [self.messages[-1], new], "drop_messages": 1}
        return fields

    @property
    def last_answer(self) -> str:
        """The text of the last message, if it is the assistant's and has no calls; otherwise empty."""
        last = self.messages[-1] if self.messages else {}
        return last["content"] if last.get("role") == "assistant" and not last.get("tool_calls") else ""

    def continuation(self) -> dict[str, object]:
        """Fields of the request that continues the last answer."""
        if self.session is None:
            return {"messages": self.transcript(), "continue_final_message": True}
        last = {"session_id": self.session, "messages": self.messages[-1:], "drop_messages": 1}
        return {**last, "continue_final_message": True}

    def edit_answer(self, text: str) -> None:
        """Replace the text of the last answer.  The next request tells the daemon."""
        self.messages[-1] = {"role": "assistant", "content": text}
        self.is_edited = True

    def continued(self, rest: Message, *others: Message) -> None:
        """Add what the daemon has answered to a ``continuation``; ``others`` as in ``answered``."""
        self.is_edited = False
        last = self.messages[-1]
        self.messages[-1:] = [{**last, "content": last["content"] + rest["content"]}, *others]

    def answered(self, question: str, *answer: Message, retry: bool = False) -> None:
        """Add a turn that the daemon has answered.

        Args:
            answer: one message; or, if messages of the user have interrupted it, these and the parts between them.
        """
        self.is_edited = False
        system = self._system if self.session is not None and not self.messages else []
        self.messages = [*system, *self._earlier_messages(retry), self._question_message(question, retry), *answer]
        if not retry:
            self.files = []

    def transcript(self) -> list[Message]:
        """All messages, the system message first."""
        return [*(self._system if not self.is_fixed else []), *self.messages]

    def _question_message(self, question: str, retry: bool) -> Message:
        """``question`` as a message.  One that is asked again keeps its files."""
        files = files_of(self.messages[-2]["content"]) if retry else self.files
        content = [*files, {"type": "text", "text": question}] if files else question
        return {"role": "user", "content": content}

    @property
    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _earlier_messages(self, retry: bool) -> Sequence[Message]:
        return self.messages[:-2] if retry else self.messages


def as_fields(message: ChatMessage) -> Message:
    """A message as a request has it; without fields that it does not have."""
    optional = {"reasoning": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    fields: Message = {
        "role": message.role,
        "content": _content(message),
        **{k: v for k, v in optional.items() if v is not None},
    }
    if message.tool_calls:
        fields["tool_calls"] = [json.loads(call_line(call)) for call in message.tool_calls]
    return fields


def _content(message: ChatMessage) -> str | list[Part]:
    if not message.n_pictures or not isinstance(message.content, list):
        return message.text
    return [
        {"type": part.type, **({"text": part.text} if part.data is None else {"data": part.data})}
        for part in message.content
    ]


def as_json(messages: Sequence[Message]) -> str:
    """The messages as JSON, in the form of a request."""
    text = json.dumps(
        {"messages": messages}, ensure_ascii=False, indent=2, default=lambda data: base64.b64encode(data).decode()
    )
    return text + "\n"


def as_markdown(messages: Sequence[Message]) -> str:
    """The messages as a Markdown page with one section a message; reasoning is folded away."""
    return (
        "\n\n".join(
            f"## {message['role']}\n\n{_folded(message)}{_content_text(message['content'])}{_calls(message)}"
            for message in messages
        )
        + "\n"
    )


def _content_text(content: str | Sequence[Part]) -> str:
    return "\n\n".join([*[FILES[file["type"]] for file in files_of(content)], text_of(content)])


def _calls(message: Message) -> str:
    if not message.get("tool_calls"):
        return ""
    lines = "\n".join(json.dumps(call, ensure_ascii=False) for call in message["tool_calls"])
    return ("\n\n" if message["content"] else "") + f"```json\n{lines}\n```"


def _folded(message: Message) -> str:
    if not message.get("reasoning"):
        return ""
    return f"<details><summary>Reasoning</summary>\n\n{message['reasoning']}\n\n</details>\n\n"
