"""Everything that was reported as durable survives kills, a full disk and a folder that becomes read-only."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import uma_trio
from tests.support.state_files import content_of
from tests.support.store_child import SESSIONS, after, journal, state_folder, state_of, tokens_of

ROOT = Path(uma_trio.__file__).parents[1]
CHILD = [sys.executable, "-m", "tests.support.store_child"]
KILLS = 100
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@contextmanager
def children(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks a child that writes, for each line of its input."""
    with subprocess.Popen(
        [*CHILD, "fork", str(folder)],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        yield parent
        assert parent.stdin is not None
        parent.stdin.close()
    assert parent.returncode == 0


def killed(parent: subprocess.Popen[str], after_s: float) -> tuple[list[str], list[int]]:
    """Kills a child after a while; returns what it reported: names of states, and turns of each session."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    word, pid = parent.stdout.readline().split()
    assert word == "begun"
    time.sleep(after_s)
    os.kill(int(pid), signal.SIGKILL)
    states, turns = [], [0] * len(SESSIONS)
    while (line := parent.stdout.readline().split()) != ["over"]:
        if line[0] == "state":
            states.append(line[1])
        else:
            turns[int(line[1])] = int(line[2])
    return states, turns


def test_a_killed_process_loses_nothing_that_it_reported(tmp_path: Path) -> None:
    rng = random.Random(5)
    promised = [0] * len(SESSIONS)
    leftovers, saved, said = 0, 0, ""
    with children(tmp_path) as parent:
        for _ in range(KILLS):
            reported, turns = killed(parent, rng.expovariate(1 / 0.03))
            leftovers += len(list(tmp_path.glob("*/*.tmp")))

            states = state_folder(tmp_path)
            found = {state.name: state for state in states.scan()}
            assert states.problems == []
            assert not reported or reported[-1] in found
            for name, state in found.items():
                assert state.tokens.tolist() == tokens_of(int(state.adapters)).tolist()
                assert content_of(states.open(name)) == state_of(state.tokens)
            on_disk = sum(path.stat().st_size for path in (tmp_path / "states").glob("*.state"))
            assert states.used_bytes == on_disk <= states.max_bytes
            states.close()

            sessions = journal(tmp_path)
            there = {session.key.id: session for session in sessions.load()}
            assert all("cut off" in problem for problem in sessions.problems), sessions.problems
            for i, name in enumerate(SESSIONS):
                promised[i] = max(promised[i], turns[i])
                if name not in there:
                    assert promised[i] == 0
                    continue
                session = there[name]
                assert promised[i] <= session.n_turns <= promised[i] + 1
                promised[i] = session.n_turns
                contents = tuple(message.content for message in session.messages)
                assert (tuple(session.tokens.tolist()), contents) == after(name, session.n_turns)
            sessions.close()
            assert not [*tmp_path.glob("*/*.tmp"), *tmp_path.glob("*/*.bad")]
            saved += len(reported)
            said = f"{saved} states and {sum(promised)} turns, {leftovers} files cut short in {KILLS} kills"
    assert leftovers, f"no kill came in the middle: {said}"
    assert saved > KILLS / 10, said  # how many depends on the machine
    assert sum(promised) > KILLS / 10, said


def run(*command: str, folder: Path) -> list[str]:
    found = subprocess.run(
        [*command, str(folder)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.splitlines()


def test_a_file_size_limit_breaks_nothing(tmp_path: Path) -> None:
    *refused, last = run(*CHILD, "limited", folder=tmp_path)
    assert [line.split(":")[0] for line in refused] == ["write", "begin", "finish", "compact"]
    for line in refused:
        assert str(tmp_path) in line
        assert "ulimit -f" in line
    assert last == "as before"


def test_a_full_disk_breaks_nothing(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "--map-root-user"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True).returncode
    ):
        pytest.skip("needs a disk of its own: unshare, and the right to mount in a user namespace")
    *refused, last = run(*inside, *CHILD, "full", folder=tmp_path)
    assert [line.split(":")[0] for line in refused] == ["begin", "write"]
    for line in refused:
        assert str(tmp_path) in line
        assert "free some space" in line
    assert last == "goes on"


def test_folders_that_become_read_only_can_be_read() -> None:
    with tempfile.TemporaryDirectory() as folder:  # the parent of tmp_path is inaccessible for other users
        *refused, last = run(*CHILD, "unwritable", folder=Path(folder))
    assert len(refused) == 8
    for line in refused:
        assert folder in line
        assert "choose a folder that this user can write to" in line
    assert last == "goes on"
