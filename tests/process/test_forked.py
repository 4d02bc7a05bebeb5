"""Commands that start in a fork are as those that start as users start them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.forked import UMA_TRIO, Forked, can_fork, program, run_forked
from tests.support.terminal import terminal

pytestmark = pytest.mark.skipif(
    not can_fork({}), reason="commands start in forks on Linux, unless coverage is measured"
)


@pytest.mark.thorough
def test_output_exit_code_folder_and_environment_are_those_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "uma.yaml").write_text("limits: {max_queue: 7}\n")
    environment = {**os.environ, "UMA_PARALLEL": "3"}
    for arguments in (
        ["serve", "--config", "uma.yaml", "--print-config"],
        ["--version"],
        ["nonsense"],
        ["ask", "a\udcff"],
    ):
        command = [*UMA_TRIO, *arguments]
        started = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        forked = run_forked(arguments, tmp_path, environment)
        assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_this_process_is_the_parent(tmp_path: Path) -> None:
    with Forked([*UMA_TRIO, "tokenize"], stdin=subprocess.PIPE, process_group=0) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid()
        assert (os.getpgid(process.pid), os.getsid(process.pid)) == (process.pid, os.getsid(0))
        assert process.poll() is None, "it waits for its stdin"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_a_terminal_is_that_of_the_command() -> None:
    with terminal([*UMA_TRIO, "tokenize"], columns=80, lines=24) as shown:
        shown.type("\x03")
        assert shown.wait() != 0


def test_a_program_for_shells(tmp_path: Path) -> None:
    with program(tmp_path) as file:
        line = f"echo hello | {file} nonsense; echo $?; {file} --help | head -1; cd /; {file} serve --config none.yaml"
        found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        assert found.returncode == 2
        assert found.stdout.splitlines() == ["2", "Usage: uma-trio [OPTIONS] COMMAND [ARGS]..."]
        assert "cannot read none.yaml" in found.stderr
