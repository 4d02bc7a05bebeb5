"""``uma-trio metrics --watch`` on a terminal and on a pipe, against the real daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios

import pytest

from tests.support.real_daemon import real_daemon
from tests.support.terminal import Terminal, terminal

WATCH = (sys.executable, "-m", "uma_trio", "metrics", "--watch", "--interval", "0.05", "--socket")
LEAVES_SCREEN = b"\x1b[?1049l"
SHOWS_CURSOR = b"\x1b[?25h"


@pytest.fixture
def watched(daemon):
    with terminal([*WATCH, str(daemon.socket)], columns=80, lines=24) as shown:
        shown.wait_for("offload")
        yield shown


def figure(screen: str, row: str, label: str) -> str:
    """What is behind a label; nothing while the screen is being drawn."""
    line = next((line for line in screen.splitlines() if line.startswith(row)), "")
    return next(iter(line.partition(f" {label} ")[2].split()), "")


def rate(screen: str) -> float:
    """Generated tokens a second."""
    shown = next(iter(screen.partition("generated")[2].split()), "0")
    return float(shown.replace(",", ""))


def ended_well(shown: Terminal) -> bool:
    return LEAVES_SCREEN in shown.written and SHOWS_CURSOR in shown.written


def test_tokens_show_up_as_a_rate(daemon, watched):
    with daemon.wire() as asking:  # its end cancels the request
        asking.send(id="r", prompt="Count from 1 to 300.", max_tokens=4000, ignore_eos=True)
        shown = watched.wait_for(
            lambda text: figure(text, "streams", "running") == "1" and "█" in text and rate(text) > 0
        )
        assert figure(shown, "engine", "restarts") == "0"


def test_q_ends_it_and_leaves_the_terminal_as_it_was(watched):
    before = termios.tcgetattr(watched.keyboard)
    assert not before[3] & termios.ECHO, "keys are not shown"
    watched.type("q")
    assert watched.wait() == 0
    assert ended_well(watched)
    assert termios.tcgetattr(watched.keyboard)[3] & termios.ECHO


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_end_it_cleanly(watched, number, code):
    watched.process.send_signal(number)
    assert watched.wait() == code
    assert ended_well(watched)
    assert "Traceback" not in watched.text


def test_another_size_of_the_terminal_is_used_at_once(daemon):
    command = [*WATCH[:-3], "--interval", "1000", "--socket", str(daemon.socket)]
    with terminal(command, columns=80, lines=24) as shown:
        shown.wait_for("every 1000 s")
        shown.resize(120, 40)
        shown.wait_for(lambda text: text.splitlines()[0].endswith("q quits") and len(text.splitlines()[0]) == 120)


def test_it_survives_a_restart_of_the_daemon(library, tmp_path):
    with real_daemon(folder=tmp_path) as first:
        first.ask(prompt="hello", max_tokens=3)
        with terminal([*WATCH, str(first.socket)], columns=80, lines=24) as shown:
            shown.wait_for("offload")
            first.signal(signal.SIGTERM)
            shown.wait_for("the daemon is gone")
            first.wait()  # until then the socket is its own
            with real_daemon(folder=tmp_path):
                shown.wait_for("the daemon was restarted")
                shown.wait_for(lambda text: "generated        0.0 tokens/s" in text)
                shown.type("q")
                assert shown.wait() == 0


def test_on_a_pipe_it_prints_json_and_survives_a_restart(library, tmp_path):
    with real_daemon(folder=tmp_path) as first:
        command = [*WATCH, str(first.socket)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as watching:
            assert json.loads(watching.stdout.readline())["model"] == "embedded"
            first.signal(signal.SIGTERM)
            while b"the daemon is gone" not in (line := watching.stderr.readline()):
                assert b"the server is shutting down" in line
            first.wait()
            with real_daemon(folder=tmp_path):
                assert b"the daemon" in watching.stderr.readline()
                assert json.loads(watching.stdout.readline())
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=60)
        assert watching.returncode == 0


def test_without_a_daemon_there_is_no_screen(tmp_path):
    with terminal([*WATCH, str(tmp_path / "none")], columns=200, lines=24) as shown:
        assert shown.wait() == 2
        assert "start one with: uma-trio serve" in shown.text
        assert LEAVES_SCREEN not in shown.written
