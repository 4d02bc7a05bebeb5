"""The benches and the demo as a user runs them: output, CSV, exit codes.  How fast is not judged here."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.real_daemon import real_daemon

pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benches" / "mixed_load.py"
SMALL = ("--streams", "2", "--tokens", "40", "--long-words", "60", "--long-tokens", "8", "--long-after", "5")


@pytest.fixture
def folder():
    """Where daemons put their sockets: tests see what is left behind.  Short, as sockets' paths must be."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


def bench(*arguments, folder):
    return subprocess.run(
        [sys.executable, BENCH, *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def read(file):
    with file.open() as opened:
        return list(csv.DictReader(opened))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["json", "cbor"])
def test_mixed_load_on_the_embedded_model(library, tmp_path, folder, protocol):
    out = tmp_path / "tokens.csv"
    done = bench(*SMALL, "--protocol", protocol, "--csv", out, "--", "--parallel", "4", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for said in ("cpu  ", "llama.cpp", "--parallel 4", "| interactive", "| long", "tok/s", "llama_decode calls"):
        assert said in done.stdout
    rows = read(out)
    assert list(rows[0]) == ["session_id", "token_idx", "ts_ms", "is_interactive"]
    counts = {name: [row for row in rows if row["session_id"] == name] for name in ("s1", "s2", "long1")}
    assert {name: len(found) for name, found in counts.items()} == {"s1": 40, "s2": 40, "long1": 8}
    for name, found in counts.items():
        assert [int(row["token_idx"]) for row in found] == list(range(len(found)))
        assert {row["is_interactive"] for row in found} == {"0" if name == "long1" else "1"}
        times = [float(row["ts_ms"]) for row in found]
        assert times == sorted(times)
    assert min(float(row["ts_ms"]) for row in rows) < 0 < float(counts["long1"][0]["ts_ms"])
    assert list(folder.iterdir()) == [], "the daemon's files are gone"


@pytest.mark.slow
def test_mixed_load_on_a_random_model_through_a_running_daemon(library, tmp_path, folder):
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "benches" / "make_model.py")
    make_model = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = make_model
    spec.loader.exec_module(make_model)
    if not make_model.DEFAULT_VOCABULARY.exists():
        pytest.skip(f"{make_model.DEFAULT_VOCABULARY} is not there: ./build_llama.sh unpacks it")
    model = tmp_path / "2x64.gguf"
    make_model.make_model(model, make_model.parse_shape("2x64"), "q8_0", ctx=1024)
    with real_daemon("--model", str(model)) as daemon:
        done = bench(*SMALL, "--socket", daemon.socket, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2x64.gguf" in done.stdout
    assert "cpu           server " in done.stdout
    assert "server -" not in done.stdout, "its process is known"


def test_a_prompt_that_does_not_fit_is_one_line(library, folder):
    done = bench("--long-words", "30000", folder=folder)
    assert done.returncode == 1
    assert "E_LIMIT" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []


def test_no_daemon_is_one_line(folder):
    done = bench("--socket", folder / "nobody.sock", folder=folder)
    assert done.returncode == 1
    assert "uma-trio serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_that_a_running_daemon_cannot_take(folder):
    done = bench("--socket", folder / "nobody.sock", "--threads", "2", folder=folder)
    assert done.returncode == 2


# -- the demo ------------------------------------------------------------------------------------


def demo(*arguments):
    return [sys.executable, "-m", "uma_trio", "demo", *arguments]


@pytest.mark.slow
def test_the_demo_and_its_gate(library, tmp_path, folder):
    """All but the one line that is about time: how busy the machine is, no test can know."""
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
    assert "chat 3" in picture.read_text().replace("&#160;", " ")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_gate_that_nobody_passes_exits_1(library):
    with real_daemon() as daemon:
        asked = demo("--no-live", "--max-gap-ms", "0.001", "--socket", str(daemon.socket))
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NO-GO" in done.stdout
    assert "FAIL  no chat froze" in done.stdout
    assert "PASS  same text as alone" in done.stdout
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(library, folder, number):
    running = subprocess.Popen(
        demo("--no-live"), env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
    )
    with running:
        try:
            assert "document" in running.stdout.readline(), "the first line comes when all streams run"
            (sockets,) = folder.iterdir()
            assert (sockets / "uma.sock").exists()
            running.send_signal(number)
            assert running.wait(30) == 128 + number
        finally:
            running.kill()
    assert list(folder.iterdir()) == []


def test_a_demo_without_a_server_says_so(folder):
    done = subprocess.run(demo("--socket", str(folder / "nobody.sock")), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "uma-trio serve" in done.stderr
