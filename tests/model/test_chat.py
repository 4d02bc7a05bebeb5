"""``uma-trio chat`` on a pseudo-terminal, and with lines on stdin."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import subprocess
import sys
from typing import Any

import attrs
import psutil
import pytest

from tests.support.commands import run_process
from tests.support.profile import thorough
from tests.support.real_daemon import LONG_CTX, Daemon, real_daemon
from tests.support.terminal import Terminal, terminal
from uma_trio.cli.stdio import wrapped

FRANCE, PERU = "What is the capital of France?", "And of Peru?"
CTRL_C, CTRL_D, ESCAPE = "\x03", "\x04", "\x1b"
LONG = "Count from 1 to 990."
PROMPT = r"^>\s*\Z"
"""An empty prompt at the end of the text."""


@attrs.frozen
class Shown:
    """The program on a terminal."""

    terminal: Terminal

    @property
    def text(self):
        return self.terminal.scrollback

    def wait_for(self, pattern):
        """Wait until a regular expression matches what was shown; returns all of it."""
        self.terminal.wait_for(lambda _: re.search(pattern, self.text, re.MULTILINE))
        return self.text

    def type(self, keys):
        self.terminal.type(keys)

    def wait(self):
        return self.terminal.wait()


@contextlib.contextmanager
def chatting(socket, *arguments, columns=200, lines=24):
    command = [sys.executable, "-m", "uma_trio", "chat", "--socket", str(socket), *map(str, arguments)]
    more = {"PROMPT_TOOLKIT_NO_CPR": "1"}  # pyte does not report the position of its cursor
    with terminal(command, columns=columns, lines=lines, environment=more) as found:
        yield Shown(found)


@pytest.fixture
def chat(daemon):
    return functools.partial(chatting, daemon.socket)


def run_lines(socket, *arguments, stdin):
    return run_process("chat", "--socket", socket, *arguments, stdin=stdin)


def messages_of(daemon: Daemon, session: str) -> list[dict[str, Any]]:
    """The messages of a session, without how they were generated."""
    with daemon.wire() as wire:
        wire.send(type="sessions", action="read", session_id=session)
        found = wire.receive()
    assert found is not None
    return [{name: value for name, value in each.items() if name != "generation"} for each in found["messages"]]


def closed(daemon, name):
    with daemon.wire() as wire:
        wire.send(type="sessions", action="close", session_id=name)
        wire.receive()


# -- on a terminal -----------------------------------------------------------------------------------


def test_two_turns_and_the_end(chat, daemon):
    with chat() as shown:
        shown.wait_for(PROMPT)
        shown.type(FRANCE + "\r")
        shown.wait_for(rf"^> {re.escape(FRANCE)}\nThe capital of France is Paris\.\n\n{PROMPT[1:]}")
        shown.type(PERU + "\r")
        shown.wait_for(rf"^The capital of Peru is Lima\.\n\n{PROMPT[1:]}")
        shown.type(CTRL_D)
        assert shown.wait() == 0
    daemon.settled()


def test_commands(chat, tmp_path):
    with chat("--system", "Answer in one word.") as shown:
        shown.wait_for(PROMPT)
        shown.type("/sav\r")
        shown.wait_for(r"no command /sav; did you mean /save\?")
        shown.type("/help\r")
        shown.wait_for(r"^/retry \[TEMPERATURE \[SEED\]\] +ask the last question again")
        shown.type("/retry\r")
        shown.wait_for("there is no question to ask again")
        shown.type(FRANCE + "\r")
        shown.wait_for(r"Paris.*\n\n" + PROMPT[1:])
        shown.type("/stats\r")
        shown.wait_for(r"\d+ prompt \+ \d+ tokens")
        for name in ("chat.json", "chat.md", "chat.txt", "chat.md"):
            shown.type(f"/save {tmp_path / name}\r")
            shown.wait_for(r"saved to|must end with \.md")
        shown.type("/new\r")
        shown.wait_for("a new conversation\n" + PROMPT[1:])
        shown.type(f"/save {tmp_path / 'new.json'}\r")
        shown.wait_for(r"saved to .*new\.json")
        shown.type("/quit\r")
        assert shown.wait() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[:2] == [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": FRANCE}]
    page = (tmp_path / "chat.md").read_text()
    assert page == f"## system\n\nAnswer in one word.\n\n## user\n\n{FRANCE}\n\n## assistant\n\n{saved[2]['content']}\n"
    assert not (tmp_path / "chat.txt").exists()
    assert [message["role"] for message in json.loads((tmp_path / "new.json").read_text())["messages"]] == ["system"]


def test_save_asks_before_it_overwrites_a_file_that_is_not_its_own(chat, tmp_path):
    path = tmp_path / "other.md"
    path.write_text("mine")
    with chat() as shown:
        shown.wait_for(PROMPT)
        shown.type(f"/save {tmp_path / 'empty.md'}\r")
        shown.wait_for("nothing to save yet")
        shown.type(FRANCE + "\r")
        shown.wait_for(r"Paris.*\n\n" + PROMPT[1:])
        shown.type(f"/save {path}\r")
        shown.wait_for(r"other\.md exists already\. Overwrite it\? \[y/N\]")
        shown.type("\r")
        shown.wait_for(r"other\.md stays as it is\n" + PROMPT[1:])
        own = tmp_path / "own.md"
        shown.type(f"/save {own}\r")
        shown.wait_for(r"saved to .*own\.md")
        shown.type("/new\r")
        shown.wait_for("a new conversation\n" + PROMPT[1:])
        shown.type(PERU + "\r")
        shown.wait_for(r"Lima.*\n\n" + PROMPT[1:])
        shown.type(f"/save {own}\r")
        shown.wait_for(r"own\.md exists already\. Overwrite it\?")
        assert FRANCE in own.read_text(), "another conversation does not replace it"
        shown.type("y\r")
        shown.wait_for(r"Overwrite it\? \[y/N\] y\n+saved to .*own\.md")
    assert PERU in own.read_text()
    assert not (tmp_path / "empty.md").exists()
    assert path.read_text() == "mine"


def test_what_is_typed_while_it_answers_interrupts_the_answer(chat, daemon):
    with chat("--max-tokens", 2000, "--session", "typed") as shown:
        shown.wait_for(PROMPT)
        shown.type(LONG + "\r")
        shown.wait_for(r"^1, 2, 3")
        shown.type("/nothing\r")
        shown.wait_for(r"\d,\nthere is no command /nothing; /help lists")
        shown.type(FRANCE + "\rtyped")
        shown.wait_for(rf"^> {re.escape(FRANCE)}\n+The capital of France is Paris\.\n\n> typed\s*\Z")
        shown.type(CTRL_C + CTRL_D)
        assert shown.wait() == 0
    messages = messages_of(daemon, "typed")
    assert [each["role"] for each in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[1]["content"].startswith("1, 2, 3")
    assert [each["content"] for each in messages[2:]] == [FRANCE, "The capital of France is Paris."]
    closed(daemon, "typed")


def test_lines_that_are_typed_ahead_run_in_their_order(chat, tmp_path):
    path = tmp_path / "chat.json"
    with chat("--max-tokens", 2000) as shown:
        shown.wait_for(PROMPT)
        shown.type(f"{LONG}\r/save {path}\r/new\r{FRANCE}\r")
        shown.wait_for(r"^1, 2, 3")
        shown.type("/stop\r")
        shown.wait_for(r"\d,\nends after this sentence; Ctrl-C ends it now\n")
        shown.type(f"/system Be brief.\r{PERU}\r/bye\r")
        shown.wait_for(r"(?s)\d,\nkept until the answer is complete: /system Be brief\..*^kept.*: /bye$")
        shown.type(CTRL_C)
        assert shown.wait() == 0
        order = [LONG, "^cancelled", "/save", "^saved to", "/new", "^a new conversation", re.escape(FRANCE), "Paris"]
        order += ["/system", "applies from the next", re.escape(PERU), "Lima", "/bye"]
        assert re.search("(?ms)" + ".*".join(order), shown.text), shown.text
    assert [each["content"] for each in json.loads(path.read_text())["messages"]][:1] == [LONG]


def test_an_interrupt_cancels_the_answer_and_keeps_what_has_come(chat, daemon, tmp_path):
    before = daemon.settled()["requests_total"].get("cancelled", 0)
    with chat("--max-tokens", 2000) as shown:
        shown.wait_for(PROMPT)
        shown.type(LONG + "\r")
        shown.wait_for(r"^1, 2, 3")
        shown.type(CTRL_C)
        shown.wait_for(r"^cancelled; what you see stays in the conversation\n\n" + PROMPT[1:])
        assert "^C" not in shown.text
        shown.type(f"/save {tmp_path / 'chat.json'}\r")
        shown.wait_for("saved")
        shown.type(CTRL_C)
        shown.wait_for(r"to leave, type /bye")
        shown.type("typed" + CTRL_C + FRANCE + "\r")
        shown.wait_for(r"Paris\.")
        assert "typedWhat" not in shown.text
        shown.type(CTRL_D)
        assert shown.wait() == 0
    assert daemon.settled()["requests_total"]["cancelled"] == before + 1
    [_, answer] = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert answer["content"].startswith("1, 2, 3")


def test_a_session_goes_on_in_another_chat(chat, daemon, tmp_path):
    with chat("--session", "travel") as shown:
        shown.wait_for("a new session travel\n" + PROMPT[1:])
        shown.type(FRANCE + "\r")
        shown.wait_for(r"Paris\.")
        shown.type(CTRL_D)
        shown.wait()
    with chat() as shown:
        shown.wait_for(PROMPT)
        shown.type("/session travel\r")
        text = shown.wait_for(r"Paris\.\n\n" + PROMPT[1:])
        assert "session travel: 1 turn" in text
        assert f"> {FRANCE}" in text
        shown.type("/system Be brief.\r")
        shown.wait_for("this session has begun")
        shown.type(PERU + "\r")
        shown.wait_for(r"The capital of Peru is Lima\.")
        shown.type("/retry\r")
        shown.wait_for(r"with temperature 0\.8, since the answer would be the same without\n[^>]+\n\n" + PROMPT[1:])
        shown.type("/retry\r")
        shown.wait_for(r"with temperature 1\.2, since the answer would be the same without\n[^>]+\n\n" + PROMPT[1:])
        shown.type("/set temperature 1.3\r")
        shown.wait_for(r"/set temperature 1\.3\n" + PROMPT[1:])
        shown.type("/retry\r")
        shown.wait_for(r"/set temperature 1\.3\n> /retry\n[^>]+\n\n" + PROMPT[1:])
        assert "nothing was drawn" not in shown.text
        shown.type(f"/save {tmp_path / 'chat.json'}\r")
        shown.wait_for("saved")
    kept = messages_of(daemon, "travel")
    assert kept == json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["content"] for message in kept if message["role"] == "user"] == [FRANCE, PERU]
    closed(daemon, "travel")


def test_a_message_of_several_lines(chat, tmp_path):
    with chat() as shown:
        shown.wait_for(PROMPT)
        shown.type("one" + ESCAPE + "\r" + "two\\\r" + "three\r")
        shown.wait_for(r"\n\n" + PROMPT[1:])
        shown.type(f"/save {tmp_path / 'chat.json'}\r")
        shown.wait_for("saved")
    [question, _] = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert question["content"] == "one\ntwo\nthree"


@pytest.mark.parametrize("arguments", [[], thorough(["--plain"])], ids=["markdown", "plain"])
def test_a_long_answer_scrolls_and_survives_a_resize(chat, arguments):
    with chat("--max-tokens", 300, *arguments, columns=60, lines=10) as shown:
        shown.wait_for(PROMPT)
        shown.type(LONG + "\r")
        shown.wait_for(r"\b20,")
        shown.terminal.resize(40, 12)
        shown.wait_for(PROMPT)
        shown.type(FRANCE + "\r")
        shown.wait_for(r"Paris\.\n\n" + PROMPT[1:])
        assert shown.text.count("Paris.") == 1


def test_every_line_of_a_long_answer_is_there_once(chat):
    with chat("--max-tokens", 200, columns=60, lines=10) as shown:
        shown.wait_for(PROMPT)
        shown.type(LONG + "\r")
        text = shown.wait_for(r"cut at /set\s+max_tokens\s+200[^>]*" + PROMPT[1:])
    numbers = [
        int(found) for found in re.findall(r"\b(\d+),", text.partition(LONG)[2].partition("the answer is not")[0])
    ]
    assert len(numbers) > 40
    assert numbers == [*range(1, len(numbers) + 1)]


def test_the_daemon_goes_away_and_comes_back(library, tmp_path):
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(real_daemon(folder=tmp_path))
        shown = stack.enter_context(chatting(tmp_path / "uma.sock", "--session", "a"))
        shown.wait_for(PROMPT)
        shown.type(FRANCE + "\r")
        shown.wait_for(r"Paris\.\n\n" + PROMPT[1:])
        daemon.signal(signal.SIGTERM)
        daemon.wait()
        shown.type(PERU + "\r")
        shown.wait_for(r"/retry asks again, and Up brings the message back\n\n" + PROMPT[1:])
        stack.enter_context(real_daemon(folder=tmp_path))
        shown.type("/retry\r")
        shown.wait_for(r"The capital of Peru is Lima\.\n\n" + PROMPT[1:])
        shown.type(CTRL_D)
        assert shown.wait() == 0


def test_the_daemon_dies_in_the_middle_of_an_answer(library, tmp_path):
    with (
        real_daemon(*LONG_CTX, folder=tmp_path) as daemon,
        chatting(tmp_path / "uma.sock", "--max-tokens", 2000) as shown,
    ):
        shown.wait_for(PROMPT)
        shown.type(LONG + "\r")
        shown.wait_for(r"^1, 2, 3")
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        shown.wait_for(r"the daemon went away; the conversation is as before\n/retry asks again.*\n\n" + PROMPT[1:])
        shown.type("/retry\r")
        shown.wait_for(r"^no daemon at")


def test_a_restart_of_the_engine_is_reported(library, tmp_path):
    with (
        real_daemon(folder=tmp_path) as daemon,
        chatting(tmp_path / "uma.sock", "--max-tokens", 300) as shown,
    ):
        shown.wait_for(PROMPT)
        shown.type(LONG + "\r")
        shown.wait_for(r"^1, 2, 3")
        psutil.Process(daemon.metrics()["engine"]["pid"]).kill()
        shown.wait_for(r"the engine was restarted; no text was lost\n\n" + PROMPT[1:])


def test_a_conversation_that_no_longer_fits(chat):
    with chat("--max-tokens", 4090) as shown:
        shown.wait_for(PROMPT)
        shown.type(FRANCE + "\r")
        shown.wait_for(r"E_LIMIT_CONTEXT[^>]*/new begins another conversation[^>]*\n/retry.*\n\n" + PROMPT[1:])
        shown.type("/new\r")
        shown.wait_for("^a new conversation")
        shown.type("\x1b[A\x1b[A")  # Up: over /new to the message that failed
        shown.wait_for(r"^> " + re.escape(FRANCE) + r"\s*\Z")


def test_another_model_and_settings_in_the_middle_of_a_chat(chat, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}))
    with chat() as shown:
        shown.wait_for(PROMPT)
        for typed, answer in (
            ("/model", r"^\* embedded +ready"),
            ("/model nothing", r"no model 'nothing'.*uma-trio pull downloads others"),
            ("/set temperature 1000", r"^temperature is a number from 0 to 100, or off"),
            ("/set temprature 0.5", r"did you mean temperature\?"),
            ("/set seed 7", PROMPT),
            ("/set temp 0.5", PROMPT),
            ("/set system Be brief.", "applies from the next message"),
            (f"/set json-schema {schema}", PROMPT),
            ("/show", r"^set: seed 7, temperature 0\.5, constraint .*json_schema"),
            ("Give me a record.", r'"n": ?7'),
            ("/set schema off", PROMPT),
            ("/set seed off", PROMPT),
            ("/show", r"^set: temperature 0\.5\notherwise: .*top_k"),
            ("/model embedded", "embedded answers from now on"),
            ("/new", "a new conversation"),
            (FRANCE, r"Paris\."),
        ):
            before = len(shown.text)
            shown.type(typed + "\r")
            shown.terminal.wait_for(lambda _, a=answer, b=before: re.search(a, shown.text[b:], re.MULTILINE))
            shown.wait_for(PROMPT)
        shown.type("/bye\r")
        assert shown.wait() == 0


@pytest.mark.parametrize("options", [(), thorough(("--session", "edited"))])
def test_a_question_and_an_answer_are_edited(chat, daemon, tmp_path, options):
    with chat(*options) as shown:
        shown.wait_for(PROMPT)
        shown.type("/edit\r")
        shown.wait_for("there is no question to edit\n" + PROMPT[1:])
        shown.type("What is the capital of Spain?\r")
        shown.wait_for(r"Madrid\.\n\n" + PROMPT[1:])
        shown.type("/edit\r")
        shown.wait_for(r"^> What is the capital of Spain\?\s*\Z")
        shown.type("\x7f" * len("Spain?") + "Peru?\r")
        shown.wait_for(r"Lima\.\n\n" + PROMPT[1:])
        shown.type("/retry 0.9 5\r")
        shown.wait_for(r"/retry 0\.9 5\n[^>]+\n\n" + PROMPT[1:])
        shown.type("/edit answer\r")
        shown.wait_for(r"^> [^W\n][^\n]+\Z")
        shown.type("\x15" + "It is Lima, as everybody knows.\r")
        shown.wait_for("goes on from this answer\n" + PROMPT[1:])
        shown.type(FRANCE + "\r")
        shown.wait_for(r"Paris\.\n\n" + PROMPT[1:])
        shown.type(f"/save {tmp_path / 'chat.json'}\r")
        shown.wait_for("saved")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["content"] for message in messages[:3]] == [
        "What is the capital of Peru?",
        "It is Lima, as everybody knows.",
        FRANCE,
    ]
    if options:
        assert messages_of(daemon, "edited") == messages
        closed(daemon, "edited")


# -- stdin is not a terminal -------------------------------------------------------------------------


def test_each_line_of_stdin_is_a_message(daemon):
    found = run_lines(daemon.socket, stdin=f"{FRANCE}\n{PERU}\n/nothing\n/quit\n{PERU}\n")
    assert (found.returncode, found.stdout) == (0, "The capital of France is Paris.\nThe capital of Peru is Lima.\n")
    assert found.stderr == (
        "there is no command /nothing; /help lists the commands. A message that begins with / is sent with //\n"
    )


@pytest.mark.parametrize("options", [(), thorough(("--session", "counting"))])
def test_a_cut_answer_is_continued(daemon, tmp_path, options):
    lines = ["/continue", "Count from 1 to 12.", *["/continue"] * 4, f"/save {tmp_path / 'a.json'}"]
    found = run_lines(daemon.socket, "--max-tokens", "15", *options, stdin="\n".join(lines))
    assert found.returncode == 0
    assert found.stderr.count("there is no answer to continue") == 1
    assert "the answer ends here" in found.stderr
    _, answer = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert answer["content"] == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."


def test_lines_end_with_the_first_error(daemon, tmp_path):
    found = run_lines(daemon.socket, "--max-tokens", "100000000", stdin=f"{FRANCE}\n{PERU}\n")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("E_LIMIT_MAX_TOKENS") == 1


def test_without_a_daemon(tmp_path):
    found = run_lines(tmp_path / "none", stdin="x")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1
    assert "uma-trio serve" in found.stderr


def test_ask_without_a_question_begins_a_chat(daemon):
    def command(*arguments):
        return [sys.executable, "-m", "uma_trio", "ask", "--socket", str(daemon.socket), *arguments]

    with terminal(command("--system", "Be brief."), columns=100, lines=24) as shown:
        shown.wait_for("/help lists the commands")
        shown.type("/system\r")
        shown.wait_for("Be brief.")
        shown.type(CTRL_D)
        assert shown.wait() == 0
    with terminal(command("--raw"), columns=100, lines=24) as shown:
        shown.wait_for("has no --raw")
        assert shown.wait() == 2


@pytest.mark.thorough
def test_retries_differ_also_with_a_seed_of_the_daemon(library: None, tmp_path):
    with real_daemon("--seed", "7", "--temp", "3", folder=tmp_path) as found:
        story = "Tell me a story about a fox."
        command = [sys.executable, "-m", "uma_trio", "chat", "--plain", "--socket", str(found.socket)]
        lines = f"{story}\n/retry\n/retry\n/save {tmp_path / 'a.json'}\n"
        done = subprocess.run(command, input=lines, text=True, capture_output=True, timeout=120, check=True)
        answers = [each for each in done.stdout.splitlines() if each]
        assert len({*answers}) > 1


def test_notices_about_an_answer_divide_no_word(chat) -> None:
    with chat("--max-tokens", "25", columns=44) as shown:
        shown.wait_for(PROMPT)
        shown.type("Count from 1 to 30\r")
        shown.wait_for("/continue goes on")
        assert re.search(r"/set\s+max_tokens\s+25;", shown.text)


def test_a_notice_divides_no_word() -> None:
    text = "the conversation no longer fits the context: its oldest 1,234 tokens were dropped"
    for width in (20, 33, 79, 200):
        lines = wrapped(text, width)
        assert " ".join(lines) == text
        assert all(len(line) <= width for line in lines)
