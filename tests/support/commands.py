"""Commands of ``uma-trio``, in this process or in one of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from click.testing import CliRunner

from tests.support.forked import UMA_TRIO, can_fork, run_forked
from tests.support.real_daemon import ROOT
from tests.support.run import SETTINGS_OF_DAEMONS
from uma_trio.cli import main


def environment(**more: str) -> dict[str, str]:
    """The environment without the user's settings, with those of the run."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}
    return clean | SETTINGS_OF_DAEMONS | more


def invoke(*arguments: object, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: a third of a second faster, where pipes and signals do not matter.

    Args:
        variables: of the environment.
    """
    found = CliRunner(env=variables).invoke(main, [*map(str, arguments)], input=stdin, prog_name="uma-trio")
    assert isinstance(found.exception, SystemExit | None), found.exception
    return subprocess.CompletedProcess(arguments, found.exit_code, found.stdout, found.stderr)


def run_process(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as users do."""
    return run_command(arguments, environment(), stdin=stdin)


def run_command(
    arguments: Sequence[object], variables: Mapping[str, str], *, stdin: str = "", folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """As ``run_process``, with these variables alone."""
    if can_fork({}):
        return run_forked(arguments, folder, variables, stdin=stdin)
    command = [*UMA_TRIO, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=variables, input=stdin, text=True, capture_output=True, timeout=60)
