"""Shell completion in the real shells, on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import program
from tests.support.real_daemon import Daemon, real_daemon
from tests.support.terminal import Terminal, terminal
from uma_trio.daemon.doors.claim import locked

SETUP = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        "PS1='> '; bind 'set show-all-if-ambiguous on'; bind 'set enable-bracketed-paste off'; "
        "source <(uma-trio completion bash)",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        "PS1='> '; unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -d zcompdump; "
        "source <(uma-trio completion zsh)",
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        "function fish_prompt; echo '> '; end; function fish_greeting; end; uma-trio completion fish | source",
    ),
}


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}: apt install {shell}")


SHELLS = [pytest.param(shell, marks=needs(shell)) for shell in SETUP]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with files, and ``uma-trio`` of this tree in ``.bin``: each Tab runs it."""
    for name in ("model.gguf", "my model.gguf", "notes.txt", "uma.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    (tmp_path / ".bin").mkdir()
    with program(tmp_path / ".bin"):
        yield tmp_path


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UMA_", "XDG_"))}
    return kept | {"PATH": f"{folder / '.bin'}:{os.environ['PATH']}", "HOME": str(folder), "LC_ALL": "C.UTF-8"}


@contextlib.contextmanager
def shell(name: str, folder: Path) -> Iterator[Terminal]:
    """A shell at a prompt, with the script sourced."""
    command, setup = SETUP[name]
    start = ["env", "-C", str(folder), *command]
    with terminal(start, columns=100, lines=30, environment=environment(folder)) as found:
        found.type(f"{setup}; echo re''ady\n")
        found.wait_for("ready\n")
        found.type("\x0c")  # an empty screen
        found.wait_for(lambda text: "ready" not in text and ">" in text)
        yield found


def completes(found: Terminal, line: str, completed: str) -> None:
    """Type ``line`` and Tab, and check that it becomes ``completed``."""
    found.type(line + "\t")
    found.wait_for(completed.rstrip())
    found.type("END")
    found.wait_for(f"> {completed}END")
    found.type("\x15\x0c")  # an empty line and screen
    found.wait_for(lambda text: "END" not in text and ">" in text)


@pytest.mark.parametrize("name", SHELLS)
def test_words_are_completed(folder: Path, name: str) -> None:
    with shell(name, folder) as found:
        completes(found, "uma-trio tok", "uma-trio tokenize ")
        completes(found, "uma-trio serve --kv-uni", "uma-trio serve --kv-unified ")
        completes(found, "uma-trio serve --type-k q8", "uma-trio serve --type-k q8_0 ")
        completes(found, "uma-trio serve --type-k=q8", "uma-trio serve --type-k=q8_0 ")
        completes(found, "uma-trio ask --priority back", "uma-trio ask --priority background ")
        completes(found, "uma-trio service install -- --type-v q4", "uma-trio service install -- --type-v q4_0 ")
        completes(found, "echo x | uma-trio ask --prio", "echo x | uma-trio ask --priority ")


@pytest.mark.parametrize("name", SHELLS)
def test_files_are_completed(folder: Path, name: str) -> None:
    with shell(name, folder) as found:
        completes(found, "uma-trio serve --config um", "uma-trio serve --config uma.yaml ")
        completes(found, "uma-trio serve -m model.", "uma-trio serve -m model.gguf ")
        completes(found, "uma-trio serve --model my", "uma-trio serve --model my\\ model.gguf ")
        completes(found, "uma-trio tokenize --model=my", "uma-trio tokenize --model=my\\ model.gguf ")
        completes(found, "uma-trio serve --model not", "uma-trio serve --model notes.txt ")
        completes(found, "uma-trio serve --state-dir mo", "uma-trio serve --state-dir models/")
        found.type("uma-trio serve --model \t\t")
        text = found.wait_for(lambda text: "my" in text and "models/" in text)
        assert "notes.txt" not in text or text.index("my") < text.index("notes.txt"), "GGUF files come first"


STORED = f"resp_{'0' * 32}"
"""The session of a stored response."""


@pytest.fixture(scope="module")
def chatted(library: None) -> Iterator[Daemon]:
    with real_daemon() as daemon:
        for session in ("cooking", STORED, "travel plans", "a:b"):
            daemon.ask(prompt="Hello", session_id=session, max_tokens=1)
        yield daemon


@pytest.mark.parametrize("name", SHELLS)
def test_sessions_of_the_daemon_are_completed(chatted: Daemon, folder: Path, name: str) -> None:
    (folder / "s").symlink_to(chatted.socket)
    (folder / "s.lock").symlink_to(f"{chatted.socket}.lock")
    with shell(name, folder) as found:
        completes(found, "uma-trio sessions show --socket s coo", "uma-trio sessions show --socket s cooking ")
        completes(
            found, "uma-trio sessions --socket s close a tra", "uma-trio sessions --socket s close a travel\\ plans "
        )
        completes(found, "uma-trio ask --socket s --session coo", "uma-trio ask --socket s --session cooking ")
        completes(found, "uma-trio sessions export --socket s a:", "uma-trio sessions export --socket s a:b ")


# -- without a shell --------------------------------------------------------------------------------


def completions(line: str, folder: Path) -> list[str]:
    found = subprocess.run(
        ["uma-trio"],
        env=environment(folder) | {"_UMA_TRIO_COMPLETE": "lines_complete", "_UMA_TRIO_LINE": line},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stderr) == (0, "")
    return [line.split("\t")[1] for line in found.stdout.splitlines() if line]


def test_a_session_is_offered_once_and_the_last_used_first(chatted: Daemon, folder: Path) -> None:
    line = f"uma-trio sessions --socket '{chatted.socket}' close "
    assert completions(line, folder) == ["a:b", "travel plans", "cooking"]
    assert completions(f"{line} cooking ", folder) == ["a:b", "travel plans"]
    assert completions(f"{line} 'travel p", folder) == ["travel plans"]
    assert completions(f"{line} resp", folder) == [STORED], "but not to those who have typed nothing"


def test_without_a_daemon_no_session_is_offered_and_nothing_is_started(folder: Path) -> None:
    path = folder / "uma.sock"
    line = f"uma-trio sessions show --socket {path} "
    assert completions(line, folder) == []
    with socket.socket(socket.AF_UNIX) as systemd:  # listens for a daemon that does not run
        systemd.bind(str(path))
        systemd.listen(1)
        systemd.setblocking(False)
        assert completions(line, folder) == []
        with pytest.raises(BlockingIOError):
            systemd.accept()
        with locked(path):  # a daemon that loads its model
            assert completions(line, folder) == []
            systemd.accept()[0].close()
