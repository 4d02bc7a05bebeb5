"""Whatever the files contain that a daemon finds in its folders, it starts, serves, and says what it did not use."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.documents import ROOT
from tests.support.profile import sampled
from tests.support.real_daemon import Daemon, real_daemon

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
HARMS: Mapping[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "garbage": lambda data: random.Random(0).randbytes(3000),
    "a version that nobody knows": lambda data: b'{"version": 999, "format": 999}',
    "deep nesting": lambda data: b"[" * 60_000,
}


def environment(home: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")}


def command(daemon: Daemon, home: Path, *words: str) -> str:
    """What a command of the user prints."""
    variables = {"PATH": "/bin", "PYTHONPATH": str(ROOT), "UMA_SOCKET": str(daemon.socket), **environment(home)}
    done = run_command(words, variables)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def lived(library: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a daemon that has kept something of every kind."""
    home = tmp_path_factory.mktemp("lived")
    with real_daemon("--http", "0", folder=home, environment=environment(home)) as daemon:
        daemon.http_url()
        assert "Paris" in daemon.ask(session_id="trip", messages=QUESTION).text
        module = ROOT / "uma_trio" / "aici" / "controllers" / "yesno.wasm"
        command(daemon, home, "controllers", "upload", str(module), "--tag", "mine")
        command(daemon, home, "models", "alias", "small", "embedded")
    for left in home.glob("uma.sock*"):
        left.unlink()
    (home / "log").unlink()
    return home


def kept(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file() and path.name != "lock")


def test_something_of_every_kind_is_kept(lived: Path) -> None:
    found = {path.relative_to(lived).parts[0] for path in kept(lived)}
    assert found == {"cache", "data", "state-home"}
    names = {path.name for path in kept(lived)}
    assert {"aliases.json", "mine.json", "usage.sqlite"} < names


@pytest.mark.parametrize("harm", sampled(HARMS.values(), len(HARMS)), ids=HARMS)
def test_damaged_files_are_refused_in_a_sentence(lived: Path, tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    home = tmp_path / "home"
    shutil.copytree(lived, home)
    for path in kept(home):
        path.write_bytes(harm(path.read_bytes()))
    with real_daemon("--http", "0", "--on-demand", folder=home, environment=environment(home)) as daemon:
        daemon.http_url()
        assert "Paris" in daemon.ask(session_id="trip", messages=QUESTION).text
        assert daemon.ask(model="small", messages=QUESTION).code == "E_MODEL_NOT_FOUND"
        assert "mine" not in command(daemon, home, "controllers", "list")
        daemon.logged("no model can be looked up by name")
        daemon.logged("a measurement cannot be used, so it is made again")
    problems = [str(line) for line in daemon.log_lines() if line["level"] in ("warning", "error")]
    for name in ("aliases.json", "the tag mine is ignored"):
        assert any(name in line for line in problems), problems
