"""How commands end when the output, an argument or Ctrl-C stops them; the same for all of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests.support.cases import all_cases
from uma_trio.cli import COMMANDS, LazyGroup, stdio
from uma_trio.cli.client_options import HINTS, reporting_errors
from uma_trio.cli.exits import FAILED, INTERRUPTED, OUTPUT_CLOSED, PROTOCOL_ERROR, SERVER_ERROR
from uma_trio.client import BrokenProtocol, Failure, ServerError
from uma_trio.errors import all_errors


@pytest.fixture
def ends_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Run a command that raises an error."""

    def run(error: BaseException) -> Result:
        @click.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(LazyGroup, "get_command", lambda *_: command)
        monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output of the tests stays
        return CliRunner().invoke(LazyGroup("uma-trio"), ["serve"])

    return run  # type: ignore[return-value]


def test_a_full_disk_is_one_line(ends_with) -> None:  # type: ignore[no-untyped-def]
    found = ends_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (found.exit_code, found.stderr) == (FAILED, "uma-trio: cannot write the output: No space left on device\n")


def test_a_closed_pipe_is_quiet(ends_with) -> None:  # type: ignore[no-untyped-def]
    found = ends_with(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert (found.exit_code, found.output) == (OUTPUT_CLOSED, "")


def test_an_interrupt_is_quiet(ends_with) -> None:  # type: ignore[no-untyped-def]
    found = ends_with(KeyboardInterrupt())
    assert (found.exit_code, found.output) == (INTERRUPTED, "")


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "x"), OSError(errno.ENOSPC, "full", "a/file")])
def test_other_errors_keep_their_traceback(ends_with, error: OSError) -> None:  # type: ignore[no-untyped-def]
    assert ends_with(error).exception is error


WITH_TEXT = {"ask": ["ask", "a\udcff"], "sessions": ["sessions", "describe", "a\udcff"]}


@all_cases("arguments", WITH_TEXT.values())
def test_an_argument_that_is_not_utf8_is_refused(arguments: list[str]) -> None:
    from uma_trio.cli import main

    found = CliRunner().invoke(main, arguments, env={"UMA_SOCKET": "/nowhere/uma.sock"})
    assert found.exit_code == 2
    assert "is not UTF-8 (byte 1)" in found.stderr


@all_cases("variables", [{"PYTHONUTF8": "0"}, {"PYTHONUTF8": "1"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}])
def test_an_argument_is_utf8_in_any_locale(variables: dict[str, str]) -> None:
    code = (
        "import click, sys; from uma_trio.cli.exits import Text; command = click.Command('x', callback=lambda text: "
        "sys.stdout.buffer.write(text.encode()), params=[click.Argument(['text'], type=Text())]); command()"
    )
    environment = {**os.environ, "LC_ALL": "C", **variables}
    found = subprocess.run(
        [sys.executable, "-c", code, "Größe ✓".encode()], capture_output=True, env=environment, check=True
    )
    assert found.stdout.decode() == "Größe ✓"


def test_every_text_parameter_refuses_what_is_not_utf8() -> None:
    from uma_trio.cli import main

    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for part in (command, *getattr(command, "commands", {}).values()):
            assert not [each.name for each in part.params if each.type is click.STRING], name


# -- errors of the daemon -----------------------------------------------------------------------------------


def test_no_parameter_takes_nan() -> None:
    from uma_trio.cli import main

    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for part in (command, *getattr(command, "commands", {}).values()):
            assert not [each.name for each in part.params if type(each.type) is click.FloatRange], name
    found = CliRunner().invoke(main, ["ask", "--top-p", "nan", "hi"])
    assert (found.exit_code, "nan is not a number" in found.stderr) == (2, True)


@all_cases(
    "arguments",
    [
        ("perf", "report"), ("controllers", "run", "jsctrl"), ("controllers", "upload"), ("aicirt", "-m"),
        ("rerank", "q", "-f"), ("ask", "--grammar"), ("ask", "--json-schema"), ("ask", "--tools"),
    ],
)  # fmt: skip
def test_a_pipe_that_nobody_writes_into_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    from uma_trio.cli import main

    pipe = tmp_path / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    result = CliRunner().invoke(main, [*arguments, str(pipe), *(["hi"] if arguments[0] == "ask" else [])])
    assert result.exit_code != 0
    assert "nobody writes into this pipe" in result.output


@pytest.mark.parametrize("command", [["ask"], ["tokenize"], ["rerank", "q", "-f", "-"]])
def test_what_is_piped_in_has_a_bound(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from uma_trio.cli import main

    monkeypatch.setattr(stdio, "MAX_BYTES", 4)
    found = CliRunner().invoke(main, command, input="hello")
    assert (found.exit_code, "send less" in found.stderr) == (2, True)


@all_cases("command", [["ask"], ["tokenize"], ["rerank", "q", "-f", "-"]])
def test_binary_input_is_said(command: list[str]) -> None:
    from uma_trio.cli import main

    piped = b"\x80PDF\xff\n\xef\xbf\xbd"  # the last character is U+FFFD itself, which is valid
    found = CliRunner().invoke(main, command, input=piped, env={"UMA_SOCKET": "/nowhere/uma.sock"})
    assert "the text that is piped in is not UTF-8: 2 of 7 characters are unreadable" in found.stderr


def test_hints_are_for_codes_that_there_are() -> None:
    assert set(HINTS) <= {error.code for error in all_errors()}


@pytest.mark.parametrize(
    ("event", "code", "shown"),
    [
        (Failure(code="E_MODEL_NO_CHAT_TEMPLATE", message="m"), SERVER_ERROR, "m; use --raw"),
        (Failure(code="E_LIMIT_QUEUE", message="m", retry_after_ms=2600), SERVER_ERROR, "m; try again in 3 s"),
        (Failure(code="E_NEW", message="m"), SERVER_ERROR, "the daemon at /x answers E_NEW: m\n"),
        (None, PROTOCOL_ERROR, "the daemon at /x: broken\n"),
    ],
)
def test_an_error_names_the_daemon_and_the_remedy(
    event: Failure | None, code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, reporting_errors("ask", "/x"):
        raise BrokenProtocol("broken") if event is None else ServerError(event)
    assert ended.value.code == code
    found = capsys.readouterr().err
    assert found.startswith("uma-trio ask: ")
    assert shown in found
    assert found.count("\n") == 1


@all_cases("seconds", [1e300, -1e300, float("nan"), float("inf"), 1e17])
def test_a_time_that_no_calendar_has_is_unknown(seconds: float) -> None:
    from uma_trio.cli.stdio import when

    assert when(seconds) == "unknown"
