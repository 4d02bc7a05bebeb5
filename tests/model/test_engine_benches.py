"""The benches of the engine process: crashes under load, and the comparison of the two modes."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benches

BENCHES = Path(__file__).parents[2] / "benches"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


def test_recovery(library, tmp_path):
    out = tmp_path / "crashes.csv"
    done = run("recovery.py", "--count", 4, "--streams", 4, "--tokens", 60, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarts  4 for 4 crashes" in done.stdout
    for kind in ("greedy", "seeded", "choices", "sessions"):
        counts = re.search(rf"^\| {kind} +\| +1 \| +(\d+) \| +0 \| +0 \|", done.stdout, re.MULTILINE)
        assert counts is not None, done.stdout
        assert int(counts[1]) > 0
    found = rows(out)
    assert found[0]["moment"] == "any"
    assert [row["signal"] for row in found] == ["kill", "segv", "abrt", "stop"]
    for row in found:
        assert 0 < float(row["next_token_ms"]) <= float(row["all_streams_ms"])


def test_controllers_recovery(library, tmp_path):
    out = tmp_path / "crashes.csv"
    options = ("--count", 2, "--streams", 2, "--controlled", 2, "--tokens", 60)
    done = run("controllers_recovery.py", *options, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\| without a controller +\| +[1-9]\d* +\| +0 +\| +0 +\|", done.stdout, re.MULTILINE), (
        done.stdout
    )
    found = rows(out)
    assert [row["signal"] for row in found] == ["kill", "stop"]
    for row in found:
        assert 0 < float(row["noticed_ms"]) < float(row["first_token_ms"]) <= float(row["answered_ms"])


def test_engine_modes(library, tmp_path):
    out = tmp_path / "modes.csv"
    done = run("engine_modes.py", "--streams", "1,2", "--tokens", 20, "--rounds", 2, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("1 stream, process / thread", "2 streams, process / thread"):
        assert f"| {name}" in done.stdout
    found = rows(out)
    order = ["process", "thread", "thread", "process"]
    assert [(row["streams"], row["mode"]) for row in found] == [(n, mode) for n in "12" for mode in order]
    for row in found:
        assert float(row["ready_s"]) > 0
        assert float(row["tokens_per_s"]) > 0
        assert float(row["host_gap_p50_ms"]) > 0


def test_constrained(library, tmp_path):
    out = tmp_path / "constrained.csv"
    done = run(
        "constrained.py", "--no-rival", "--streams", "1,2", "--tokens", 60, "--repeat", 1, "--properties", "3", "--csv", out
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "time to first token" in done.stdout
    found = rows(out)
    assert [(row["server"], row["streams"], row["constrained"]) for row in found] == [
        ("uma-trio", count, constrained) for count in "12" for constrained in ("True", "False")
    ]
    assert all(float(row["tokens_per_s"]) > 0 for row in found)


def test_controllers(library, tmp_path):
    out = tmp_path / "controllers.csv"
    done = run("controllers.py", "--streams", "1,2", "--tokens", 40, "--repeat", 1, "--csv", out)
    assert done.returncode == 0, done.stderr
    found = rows(out)
    assert [(row["streams"], row["controller"]) for row in found] == [
        (count, controller) for count in "12" for controller in ("True", "False")
    ]
    assert all(float(row["mid_p50_ms_each"]) > 0 for row in found if row["controller"] == "True")


def test_stairs(library):
    done = run("stairs.py", "--threads", 1, "--ticks", 40, "--kv-unified", "off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^measured in \d+\.\d\d s$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^\| line +\| +[\d.,]+ \| +[\d.,]+ \| +[\d.,]+ \|$", done.stdout, re.MULTILINE), done.stdout


def test_host_time(library, tmp_path):
    out = tmp_path / "host.csv"
    done = run("host_time.py", "--streams", "1,2", "--temperatures", "0,0.8", "--steps", 10, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(out)
    assert [(row["streams"], row["temperature"]) for row in found] == [
        (streams, temperature) for temperature in ("0.0", "0.8") for streams in ("1", "2")
    ]
    assert all(0 < float(row["gap_p50_us"]) < float(row["host_p50_us"]) for row in found)


@pytest.mark.parametrize("options", [[], ["--calls"]])
def test_tick_time(tmp_path, options):
    out = tmp_path / "ticks.csv"
    done = run("tick_time.py", "--streams", "1,3", "--pass-ms", "5", "--ticks", 10, *options, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(out)
    assert [(row["streams"], float(row["tokens"])) for row in found] == [("1", 1.0), ("3", 3.0)]
    name = "python_calls" if options else "cpu_p50_us"
    assert all(float(row[name]) > 0 for row in found)


def test_gateway_time(tmp_path):
    out = tmp_path / "gateway.csv"
    apis = "chat,completions,responses,messages,ollama,llama"
    done = run("gateway_time.py", "--api", apis, "--streams", "2", "--steps", 10, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(out)
    assert [row["api"] for row in found] == apis.split(",")
    assert all(float(row["step_p50_us"]) > 0 for row in found)


def test_crowding(library, tmp_path):
    out = tmp_path / "crowding.csv"
    done = run("crowding.py", "--threads", 1, "--attack", "long", "--seconds", 2, "--csv", out)
    assert done.returncode == 0, done.stdout + done.stderr
    none, long = rows(out)
    assert (none["attack"], long["attack"]) == ("none", "long")
    assert int(none["preemptions"]) == 0
    assert int(long["preemptions"]) >= 1
