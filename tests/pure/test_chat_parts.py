"""The parts of ``uma-trio chat``: which messages a request has, and how Markdown is shown while it streams."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

import pyte
import pytest
from rich.console import Console

from tests.support.cases import all_cases
from tests.support.profile import thorough
from tests.support.terminal import Screen
from uma_trio.cli import answer_view
from uma_trio.cli.answer import printable, warn_if_cut, warn_if_cut_elsewhere, warn_if_in_memory
from uma_trio.cli.answer_view import MarkdownView, PlainView, closed_size, render_lines
from uma_trio.cli.conversation import Conversation, Message, as_fields, as_json, as_markdown
from uma_trio.cli.shown_answer import ShownAnswer
from uma_trio.protocol.answers import SessionInfo
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.events import Eos, Reasoning, Token
from uma_trio.protocol.field_errors import convert
from uma_trio.protocol.messages import parse
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Timings, Usage


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}

# -- the conversation --------------------------------------------------------------------------------


def sent(conversation: Conversation, question: str, **options: Any) -> Any:
    fields = conversation.request(question, **options)
    assert isinstance(parse({"id": "a", **fields}), Generate)
    return fields


def test_without_a_session_each_request_has_all_messages() -> None:
    chat = Conversation(system="Be brief.")
    assert sent(chat, "a") == {"messages": [SYSTEM, user("a")]}
    chat.answered("a", model("A"))
    assert sent(chat, "b") == {"messages": [SYSTEM, user("a"), model("A"), user("b")]}
    chat.answered("b", model("B"))
    assert sent(chat, "b", retry=True) == sent(chat, "b") | {"messages": [SYSTEM, user("a"), model("A"), user("b")]}
    chat.answered("b", model("C"), retry=True)
    assert chat.transcript() == [SYSTEM, user("a"), model("A"), user("b"), model("C")]
    chat.system = None
    assert chat.transcript()[0] == user("a")


def test_with_a_session_a_request_has_what_is_new() -> None:
    chat = Conversation("s", "Be brief.")
    assert sent(chat, "a") == {"session_id": "s", "messages": [SYSTEM, user("a")]}
    chat.answered("a", model("A"))
    assert sent(chat, "b") == {"session_id": "s", "messages": [user("b")]}
    assert chat.last_question == "a"
    assert sent(chat, "a", retry=True) == {"session_id": "s", "messages": [user("a")], "drop_messages": 2}
    chat.answered("a", model("B"), retry=True)
    assert chat.transcript() == [SYSTEM, user("a"), model("B")]


def test_a_session_that_has_begun_keeps_its_system_message() -> None:
    chat = Conversation("s", "Be verbose.", [SYSTEM, user("a"), model("A")])
    assert chat.is_fixed
    assert sent(chat, "b") == {"session_id": "s", "messages": [user("b")]}
    assert chat.transcript() == [SYSTEM, user("a"), model("A")]


# -- Markdown ----------------------------------------------------------------------------------------

PAGE = """# Title

A paragraph
of two lines with **bold** text, <b>HTML</b> and a [link](http://example.org).

- one
- two

  more of two
- three

1. first

2. second

```python
def f():

    return "a"
```

| a | b |
|---|---|
| 1 | 2 |
| 333 | 4 |

> quoted

The end.
"""


class FakeTerminal(io.StringIO):
    def fileno(self) -> int:
        return 1

    def isatty(self) -> bool:
        return True


def shown(text: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch, *, width: int = 50, height: int = 12) -> str:
    """What a terminal shows of a streamed text, with all that has scrolled away."""
    monkeypatch.setattr(answer_view.os, "get_terminal_size", lambda _: os.terminal_size((width, height)))
    file = FakeTerminal()
    view = MarkdownView(file)
    at = 0
    for size in [*sizes, len(text)]:
        view.feed(text[at : at + size])
        view.refresh()
        at += size
    view.finish()
    screen = Screen(width, height)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    return "\n".join([*screen.above, *(line.rstrip() for line in screen.display)]).rstrip()


@pytest.mark.parametrize(
    ("sizes", "height"),
    [
        ([9] * 60, 7),
        ([1, 1, 1, 24, 40, 40], 12),
        ([1] * 100, 60),
        *(thorough([9] * 60, height) for height in (12, 60)),
        *(thorough([1, 1, 1, 24, 40, 40], height) for height in (7, 60)),
        *(thorough([1] * 100, height) for height in (7, 12)),
    ],
)
def test_streamed_markdown_looks_like_the_whole(sizes: list[int], height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(PAGE, sizes, monkeypatch, height=height) == shown(PAGE, [], monkeypatch)


def test_code_that_is_taller_than_the_terminal_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "```\n" + "".join(f"line {n}\n" for n in range(60)) + "```\n"
    found = shown(text, [17] * 40, monkeypatch)
    assert found.split() == " ".join(f"line {n}" for n in range(60)).split()


def test_html_links_and_line_breaks_are_not_lost() -> None:
    lines = ["".join(segment.text for segment in line) for line in render_lines(Console(width=80), PAGE)]
    assert "of two lines with bold text, <b>HTML</b> and a link (http://example.org)." in lines
    assert lines[-1] == "The end."


@all_cases(
    ("text", "closed"),
    [
        ("", ""),
        ("a paragraph", ""),
        ("a paragraph\n", ""),
        ("a paragraph\n\nb", ""),
        ("a paragraph\n\nb\n", "a paragraph\n\n"),
        ("- a\n\n- b\n", ""),
        ("- a\n\nb\nc", "- a\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n```\nb\n", "```\na\n```\n"),
        ("# a\n# b\n", "# a\n"),
        ("a\u2028b\n\nc\n", "a\u2028b\n\n"),
    ],
)
def test_blocks_that_no_longer_change(text: str, closed: str) -> None:
    assert text[: closed_size(text)] == closed


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x9b\x07é") == "a\ufffd[2Jb\tc\nd\ufffd\ufffdé"
    terminal, pipe = FakeTerminal(), io.StringIO()
    for file in (terminal, pipe):
        view = PlainView(file)
        view.feed("\x1b[2J")
        view.finish()
    assert (terminal.getvalue(), pipe.getvalue()) == ("\ufffd[2J\n", "\x1b[2J\n")


@all_cases(
    ("texts", "shown"),
    [
        (["", "o", "ne", " two"], "notice\none two\n"),
        (["o", "ne", " ", "two"], "one \nnotice\ntwo\n"),
        (["o", "ne tw", "o"], "one \nnotice\ntwo\n"),
        (["one ", "two"], "one \nnotice\ntwo\n"),
        (["\u4e00", "\u4e8c\u3002\u4e09"], "\u4e00\u4e8c\u3002\nnotice\n\u4e09\n"),
        (["o", "ne"], "one\n"),
    ],
)
def test_a_notice_about_an_answer_comes_between_two_words(
    texts: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", sys.stdout)
    view = PlainView(sys.stdout)
    messages: list[Message] = [model("")]
    answer = ShownAnswer(view, messages, show_reasoning=True)
    for n, text in enumerate(texts):
        answer.show(Token(id="a", text=text))
        if not n:
            answer.notify("notice")
    answer.close()
    view.finish()
    assert capsys.readouterr().out == shown
    assert messages == [model("".join(texts))]


def test_a_notice_does_not_wait_for_the_end_of_reasoning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", sys.stdout)
    messages: list[Message] = [model("")]
    answer = ShownAnswer(PlainView(sys.stdout), messages, show_reasoning=True)
    answer.show(Reasoning(id="a", text="hm"))
    answer.notify("notice")
    answer.show(Reasoning(id="a", text="m so"))
    answer.show(Token(id="a", text="one"))
    assert capsys.readouterr().out == "hmm \n\nnotice\nso\n\none"


# -- notices -----------------------------------------------------------------------------------------


def end(**fields: Any) -> Eos:
    return Eos(
        id="a", usage=Usage(prompt_tokens=1, completion_tokens=5), timings=Timings(queue_ms=0.0, total_ms=1.0), **fields
    )


@pytest.mark.parametrize(
    ("asked", "setting", "notice"),
    [
        (5, (), "cut at --max-tokens 5"),
        (None, (), "cut after 5 tokens"),
        (None, ("/set max_tokens",), "with /set max_tokens and a larger number"),
    ],
)
def test_the_notice_of_a_cut_answer_promises_nothing(
    asked: int | None, setting: tuple[str, ...], notice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_if_cut(end(reason="stop"), asked, *setting)
    assert capsys.readouterr().err == ""
    warn_if_cut(end(reason="length"), asked, *setting)
    shown = capsys.readouterr().err
    assert notice in shown
    assert "--ctx" not in shown, "the context may be that of the model already"


def test_the_notice_of_an_answer_that_another_command_asked_for_blames_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_if_cut_elsewhere(end(reason="stop"))
    assert capsys.readouterr().err == ""
    warn_if_cut_elsewhere(end(reason="length"))
    shown = capsys.readouterr().err
    assert "cut after 5 tokens" in shown
    assert "default" not in shown, "the number may be the user's"


@pytest.mark.parametrize(("turns", "durable", "is_shown"), [(0, False, False), (1, False, True), (1, True, False)])
def test_only_a_session_that_exists_is_said_to_be_in_memory(
    turns: int, durable: bool, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    session = SessionInfo(session_id="s", turns=turns, tokens=0, created_at=0, used_at=0, durable=durable)
    warn_if_in_memory(end(reason="cancelled", session=session))
    assert ("in memory only" in capsys.readouterr().err) == is_shown


def test_files_go_with_their_question_and_stay_when_it_is_asked_again():
    chat, parts = Conversation(), [{"type": kind, "data": b"file"} for kind in ("image", "audio")]
    chat.files += parts
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    assert chat.request("what?")["messages"] == [asked]
    chat.answered("what?", {"role": "assistant", "content": "a cat"})
    assert chat.last_question == "what?"
    assert chat.request("really?")["messages"][-1] == {"role": "user", "content": "really?"}
    assert chat.request("what is it?", retry=True)["messages"] == [
        {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}
    ]
    assert "[picture]\n\n[sound]\n\nwhat?" in as_markdown(chat.messages)
    assert json.loads(as_json(chat.messages))["messages"][0]["content"][0]["data"] == "ZmlsZQ=="
    [kept, _] = [as_fields(convert(each, ChatMessage)) for each in chat.messages]
    assert kept == asked
