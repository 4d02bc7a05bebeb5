"""A home folder of its own for commands about models: nothing of the user's is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs

from tests.support.forked import can_fork, run_forked
from tests.support.real_daemon import ROOT
from tests.support.run import SETTINGS_OF_DAEMONS

HIDDEN = ("HF_", "HUGGING", "OLLAMA_", "UMA_", "XDG_", "TRANSFORMERS_")


@attrs.frozen
class Home:
    """A home folder, and commands that run there."""

    folder: Path
    environment: dict[str, str]

    @property
    def models(self) -> Path:
        return self.folder / ".local" / "share" / "uma-trio" / "models"

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """A command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "uma_trio", *arguments],
            cwd=ROOT,
            env=self.environment | variables,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        if can_fork(variables):
            return run_forked(arguments, ROOT, self.environment | variables, timeout_s=120)
        process = self.start(*arguments, **variables)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def listed(self, **variables: str) -> list[dict[str, Any]]:
        """What ``uma-trio models --json`` lists, without the models of the package."""
        listed = json.loads(self.run("models", "--json", **variables).stdout)
        return [each for each in listed if each["origin"] != "the package"]

    def files(self) -> list[str]:
        """What is in the folder of models."""
        return sorted(path.relative_to(self.models).as_posix() for path in self.models.rglob("*") if path.is_file())


def make_home(folder: Path, endpoint: str) -> Home:
    """A home in ``folder``, for which the hub is at ``endpoint``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    return Home(
        folder,
        clean
        | {
            "HOME": str(folder),
            "HF_ENDPOINT": endpoint,
            **SETTINGS_OF_DAEMONS,
            "NO_PROXY": "127.0.0.1",
        },
    )
