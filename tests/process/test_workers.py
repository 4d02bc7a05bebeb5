"""Tests in several processes: each runs once, in order, and what happens in a process is seen in the first one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import json, os
from pathlib import Path

import pytest
from tests.support.workers import Workers

def pytest_configure(config):
    config.pluginmanager.register(Workers(2, lambda number: os.environ.update(WORKER=str(number))))

@pytest.fixture(scope="session", autouse=True)
def session():
    yield
    Path(f"ended-{os.environ['WORKER']}").touch()

@pytest.fixture(scope="module", autouse=True)
def module(request):
    yield
    Path(f"{request.path.name}-ended-in-{os.environ['WORKER']}").touch()

@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    found = {name: [report.nodeid for report in reports] for name, reports in reporter.stats.items() if name}
    Path("outcomes.json").write_text(json.dumps(found))
"""
TESTS = {
    "test_1.py": """
import os, pytest

def test_passes(tmp_path): print("hello")
def test_fails(): assert "worker" in os.environ
def test_ends(): os.kill(os.getpid(), 9)
def test_after(): pass
""",
    "test_2.py": """
import pytest

def test_is_skipped(): pytest.skip("why")
def test_writes(capfd):
    print("some text")
    assert capfd.readouterr().out == "some text\\n"
""",
    "test_3.py": "def test_passes(): pass",
}


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in TESTS.items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--disable-plugin-autoload",
        "-rA",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        *flags,
        str(folder),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_each_runs_once_and_all_outcomes_are_known(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert {name: sorted(tests) for name, tests in outcomes.items()} == {
        "passed": [
            "test_1.py::test_after",
            "test_1.py::test_passes",
            "test_2.py::test_writes",
            "test_3.py::test_passes",
        ],
        "failed": ["test_1.py::test_ends", "test_1.py::test_fails"],
        "skipped": ["test_2.py::test_is_skipped"],
    }
    assert "its process ended with -9" in ended.stdout
    assert "hello" in ended.stdout, "what a test printed"
    assert 'assert "worker" in' in ended.stdout
    assert not ended.stderr
    # The third process ran what the killed one left; fixtures of the two others were torn down, once in each.
    ended_in = {path.name for path in tmp_path.glob("*ended*")}
    assert {"ended-1", "ended-2", "test_1.py-ended-in-2", "test_2.py-ended-in-1"} <= ended_in
    assert len(ended_in) == 5, "also where the third module ran"


def test_the_first_failure_may_end_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "-x")
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert outcomes["failed"] == ["test_1.py::test_fails"]
    assert "stopping after 1 failures" in ended.stdout
