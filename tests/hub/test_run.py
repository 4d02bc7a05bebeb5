"""``uma-trio run`` by somebody whose home folder is empty: from nothing to a chat, and what is left afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.hub_server import FakeHub, Fault
from tests.support.model_home import Home
from tests.support.real_daemon import missing
from tests.support.terminal import Terminal, terminal
from uma_trio.models.packaged import EMBEDDED
from uma_trio.protocol.address import lock_path

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

NAME = "acme/Tiny-GGUF:Q8_0"
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
EVENT_S = 60.0


@pytest.fixture
def path(home: Home, tmp_path: Path) -> Iterator[Path]:
    """The socket that all commands of the home use.  Whatever serves there is stopped."""
    found = tmp_path / "s"
    home.environment["UMA_SOCKET"] = str(found)
    home.environment["XDG_STATE_HOME"] = str(tmp_path / ".local" / "state")  # a terminal has the variables of the tests
    yield found
    home.run("stop")


@pytest.fixture
def free_tcp_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def wait_for_end(path: Path) -> None:
    """Wait until the daemon has ended."""
    with contextlib.closing(open(lock_path(path))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def running(home: Home, *arguments: str, columns: int = 100) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "uma_trio", "run", *arguments]
    environment = {**home.environment, "PROMPT_TOOLKIT_NO_CPR": "1"}
    with terminal(command, columns=columns, lines=24, environment=environment) as screen:
        yield screen


@pytest.mark.thorough
def test_from_nothing_to_a_chat_then_from_ask_and_over_http(
    hub: FakeHub, home: Home, model: bytes, path: Path, free_tcp_port: int
) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    reached, go_on = threading.Event(), threading.Event()
    hub.faults.append(Fault(cut_after=5 << 20, hold=(reached, go_on)))
    at = f"http://127.0.0.1:{free_tcp_port}"
    with running(home, "acme/Tiny-GGUF", "--http", str(free_tcp_port)) as screen:
        try:
            assert reached.wait(EVENT_S)
            screen.wait_for("/7.3 MiB")
        finally:
            go_on.set()
        screen.wait_for(f"{NAME}; /help lists the commands")
        screen.type(QUESTION + "\r")
        screen.wait_for(PARIS)
        assert f"HTTP at {at}, with a page to chat: {at}/chat" in screen.scrollback
        for name in (NAME, "tiny"):
            assert home.run("ask", "--model", name, QUESTION).stdout == f"{PARIS}\n"
        url = f"{at}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": QUESTION}]}
        for name in (NAME, "embedded"):  # the second one is installed, and loaded by this request
            answer = httpx.post(url, json={**body, "model": name}, timeout=EVENT_S)
            assert answer.json()["choices"][0]["message"]["content"] == PARIS
        check_the_chat_page(f"{at}/chat?model={NAME}")
        shown = json.loads(home.run("ps", "--json").stdout)
        assert [(row["name"], row["state"], row["kv_cells_used"]) for row in shown] == [
            (NAME, "ready", 0),
            ("embedded", "ready", 0),
        ]
        assert all(row["devices"] and row["memory_bytes"] and row["idle_s"] >= 0 for row in shown)
        assert home.run("ps").stdout.splitlines()[1].split()[:2] == [NAME, "ready"]
        screen.type("/bye\r")
        assert screen.wait() == 0
    wait_for_end(path)
    assert home.run("ps").returncode == 2
    assert len(hub.file_requests()) == 1


def check_the_chat_page(url: str) -> None:
    """It answers, in a browser, if there is one."""
    from tests.support import browser

    if browser.find_chromium() is None:
        return
    with browser.opened_page() as page:
        page.goto(url)
        page.fill("#prompt", QUESTION)
        page.press("#prompt", "Enter")
        page.wait_for_selector(f"article.assistant:has-text('{PARIS}')")
        assert page.input_value("#model") == NAME


@pytest.mark.thorough
def test_the_daemon_ends_with_its_last_user_however_that_ends(home: Home, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(home, "embedded"))
        first.wait_for(lambda _: b"starting a daemon" in first.written)
        first.type(QUESTION + "\r")
        second = stack.enter_context(running(home, str(EMBEDDED)))
        for screen in (first, second):
            screen.wait_for("/help lists the commands")
        first.wait_for(PARIS)
        assert "starting" not in first.scrollback
        assert first.scrollback.count(QUESTION) == 1, "what is typed ahead appears at the prompt alone"
        first.type("/bye\r")
        assert first.wait() == 0
        second.type(QUESTION + "\r")
        second.wait_for(PARIS)
        second.process.send_signal(signal.SIGKILL)
        wait_for_end(path)


def test_a_daemon_that_is_kept_is_used_and_stopped(home: Home, path: Path, tmp_path: Path) -> None:
    assert home.run("models", "alias", "small", "embedded").returncode == 0
    answered = home.run("run", "small", "--keep", QUESTION)
    assert (answered.returncode, answered.stdout) == (0, f"{PARIS}\n"), answered.stderr
    assert home.run("run", "embedded", QUESTION).stdout == f"{PARIS}\n"
    assert [row["name"] for row in json.loads(home.run("ps", "--json").stdout)] == ["small"], "one copy of one file"
    other = tmp_path / "other.gguf"
    other.write_bytes(EMBEDDED.read_bytes())
    refused = home.run("run", str(other), QUESTION)
    assert refused.returncode == 2
    assert "does not serve" in refused.stderr
    assert "--socket PATH" in refused.stderr
    assert home.run("stop").returncode == 0
    assert home.run("stop").returncode == 2


@pytest.mark.thorough
def test_keep_also_counts_for_a_daemon_that_another_run_has_started(home: Home, path: Path) -> None:
    with running(home, "embedded") as first:
        first.wait_for("/help lists the commands")
        assert home.run("run", "--keep", "embedded", QUESTION).stdout == f"{PARIS}\n"
        first.type("/bye\r")
        assert first.wait() == 0
    assert home.run("ask", QUESTION).stdout == f"{PARIS}\n"


@pytest.mark.thorough
def test_ctrl_c_in_the_download_leaves_what_goes_on(hub: FakeHub, home: Home, model: bytes, path: Path) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    reached, go_on = threading.Event(), threading.Event()
    hub.faults.append(Fault(cut_after=5 << 20, hold=(reached, go_on)))
    with running(home, NAME) as screen:
        try:
            assert reached.wait(EVENT_S)
            screen.wait_for(lambda text: re.search(r"[1-5]\.\d/7\.3 MiB", text))
            screen.type("\x03")
            screen.wait_for(f"stopped; uma-trio run {NAME} goes on with the download")
            assert screen.wait() == 130
        finally:
            go_on.set()
    assert not lock_path(path).exists(), "no daemon was started"
    assert home.run("run", NAME, QUESTION).stdout == f"{PARIS}\n"
    assert hub.file_requests()[-1].headers["range"].startswith("bytes=")


def test_what_cannot_be_run_says_why_and_leaves_nothing(hub: FakeHub, home: Home, path: Path, tmp_path: Path) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": b""})
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for model, code, reason in (
        ("tiny", 1, "the hub has acme/Tiny-GGUF; take one of them"),
        ("acme/Nothing", 1, "acme/Nothing"),
        (str(tmp_path / "broken.gguf"), 1, "broken.gguf"),
    ):
        refused = home.run("run", model, QUESTION)
        assert (refused.returncode, reason in refused.stderr) == (code, True), refused.stderr
        assert refused.stderr.startswith("uma-trio run: ")
    offline = home.run("run", "--offline", "acme/Tiny-GGUF", QUESTION)
    assert (offline.returncode, "uma-trio pull acme/Tiny-GGUF" in offline.stderr) == (1, True), offline.stderr
    assert not lock_path(path).exists()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = home.run("run", "embedded", "--http", str(taken.getsockname()[1]), QUESTION)
    assert refused.returncode == 2
    assert "the daemon did not start" in refused.stderr
    assert "in use" in refused.stderr
    path.write_text("mine")
    no_socket = home.run("run", "embedded", QUESTION)
    assert (no_socket.returncode, "is not a socket" in no_socket.stderr) == (2, True)
    assert path.read_text() == "mine"
    unwritable = home.run("run", "embedded", QUESTION, XDG_STATE_HOME=os.devnull)
    assert (unwritable.returncode, "XDG_STATE_HOME" in unwritable.stderr) == (2, True)
