"""``uma-trio serve`` when the engine process dies while it loads the model."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from tests.support import aborting_engine
from uma_trio.cli.serve import command
from uma_trio.daemon import server
from uma_trio.engine.link import EngineLink, ProcessLauncher
from uma_trio.models.loaded import EMBEDDED


class CountingLauncher(ProcessLauncher):
    """Starts engines that abort, and counts them."""

    n_started = 0

    def launch(self, model: str) -> EngineLink:
        CountingLauncher.n_started += 1
        return super().launch(model)


@pytest.fixture
def aborting(monkeypatch):
    """Make ``serve`` start an engine that aborts."""
    CountingLauncher.n_started = 0
    for name in [name for name in os.environ if name.startswith("UMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        server, "make_launcher", lambda config, nursery: CountingLauncher(nursery, "tests.support.aborting_engine")
    )


def test_a_model_on_which_the_library_aborts_is_one_sentence_and_exit_code_1(aborting, tmp_path):
    path = tmp_path / "s"
    result = CliRunner().invoke(command, ["--socket", str(path), "--log-level", "error"])
    assert result.exit_code == 1
    assert result.output == (
        f"uma-trio serve: cannot load {EMBEDDED}: the engine process was ended by SIGABRT: {aborting_engine.ASSERTION}\n"
    )
    assert CountingLauncher.n_started == 1
    assert not path.exists()


def test_the_log_has_the_lines_of_the_library_and_no_traceback(aborting, tmp_path):
    result = CliRunner().invoke(command, ["--socket", str(tmp_path / "s"), "--log-format", "json"])
    events = [json.loads(line)["event"] for line in result.output.splitlines() if line.startswith("{")]
    assert aborting_engine.ASSERTION in events
    assert "Traceback" not in result.output
