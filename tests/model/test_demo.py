"""``uma-trio demo`` as a command: scorecard, exit codes, signals.  Durations are not judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.profile import thorough
from tests.support.real_daemon import real_daemon


@pytest.fixture
def folder():
    """The temporary folder of the command; short, because paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


def demo(*arguments):
    return [sys.executable, "-m", "uma_trio", "demo", *arguments]


@pytest.mark.thorough
def test_the_demo_and_its_gate(library, tmp_path, folder):
    """All checks of the scorecard except the one on time, which depends on the load of the machine."""
    picture = tmp_path / "demo.svg"
    done = subprocess.run(
        demo("--json", "--max-gap-ms", "60000", "--picture", str(picture)),
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads(done.stdout)
    assert card["go"]
    assert len(card["checks"]) == 5
    assert [stream["interactive"] for stream in card["streams"]] == [True, True, True, False]
    assert all(stream["tokens"] > 0 for stream in card["streams"])
    assert card["streams"][3]["prompt_tokens"] > 2000
    assert card["average_batch"] >= 1.5
    assert card["cpu"]["cores"] >= 1
    drawn = picture.read_text()
    assert "chat 3" in drawn
    assert "@keyframes" in drawn
    assert list(folder.iterdir()) == []


@pytest.mark.thorough
def test_a_gate_that_nobody_passes_exits_1(library):
    with real_daemon("--ctx", "65536") as daemon:
        asked = demo("--no-live", "--max-gap-ms", "0.001", "--socket", str(daemon.socket))
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NO-GO" in done.stdout
    assert "FAIL  no chat froze" in done.stdout
    assert "PASS  same text as alone" in done.stdout
    assert "Other programs used" in done.stdout
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"


@pytest.mark.parametrize("number", [signal.SIGINT, thorough(signal.SIGTERM)])
def test_an_interrupted_demo_leaves_nothing_behind(library, folder, number):
    running = subprocess.Popen(
        demo("--no-live"), env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
    )
    with running:
        try:
            assert running.stdout.readline(), "the first line comes when one stream has ended and the others run"
            (sockets,) = folder.iterdir()
            assert (sockets / "uma.sock").exists()
            running.send_signal(number)
            assert running.wait(60) == 128 + number
        finally:
            running.kill()
    assert list(folder.iterdir()) == []


def test_a_demo_without_a_server_says_so(folder):
    done = subprocess.run(demo("--socket", str(folder / "nobody.sock")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "uma-trio serve" in done.stderr


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(folder):
    done = subprocess.run(
        demo("--picture", str(folder / "missing" / "demo.svg"), "--socket", str(folder / "nobody.sock")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"mkdir -p {folder / 'missing'}" in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run(demo("--picture", str(folder)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert list(folder.iterdir()) == []
    os.mkfifo(folder / "pipe")
    done = subprocess.run(demo("--picture", str(folder / "pipe")), capture_output=True, text=True, timeout=60)
    assert (done.returncode, "is not a regular file" in done.stderr) == (2, True)
