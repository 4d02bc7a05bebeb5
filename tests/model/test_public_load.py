"""The bench ``public_load.py`` as a command, with aiperf if it is installed.  Durations are not judged."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
import pytest

from tests.support.bench_scripts import FOLDER, bench_script
from tests.support.random_models import random_model

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

PEERS = Path(os.environ.get("LLAMA_PEERS_DIR") or FOLDER.parent / "build" / "peers" / "bin")


@pytest.fixture
def environment():
    """A virtual environment that has aiperf: ``$AIPERF``, or the one that the bench has made."""
    name = bench_script("public_generator").REQUIREMENT.replace("==", "-")
    found = Path(os.environ.get("AIPERF") or Path(platformdirs.user_cache_dir("uma-trio"), "bench", name))
    if not (found / "bin" / "aiperf").exists():
        pytest.skip(f"there is no aiperf in {found}: set AIPERF, or run benches/public_load.py once")
    return found


@pytest.fixture
def folder():
    """The temporary folder of the servers; short, because paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


def bench(*arguments, folder):
    return subprocess.run(
        [sys.executable, FOLDER / "public_load.py", *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.timeout(620)
def test_both_servers(library, environment, tmp_path, folder):
    if not (PEERS / "llama-server").exists():
        pytest.skip(f"there is no llama-server in {PEERS}: ./build_llama.sh --peers builds it")
    out = tmp_path / "runs.csv"
    cells = ("completions/30/4/2", "chat/60/4/2/turns=2")
    flags = [part for cell in cells for part in ("--cell", cell)]
    done = bench(
        "--aiperf", environment, "--model", random_model("2x64"), *flags, "--requests", "4", "--rounds", "1", "--csv", out,
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    assert "tokenizer 0 of 5 samples" in done.stdout
    with out.open() as file:
        rows = list(csv.DictReader(file))
    servers = ("llama-server", "uma-trio")
    assert [(row["cell"], row["server"]) for row in rows] == [(cell, name) for cell in cells for name in servers]
    for row in rows:
        assert (float(row["answer_tokens"]), float(row["errors"])) == (4, 0)
        assert float(row["ttft_ms"]) <= float(row["latency_ms"])
        assert f"| {row['cell']} {row['server']}" in done.stdout
    assert {float(row["prompt_tokens"]) for row in rows[:2]} == {31}, "BOS, and the tokens that were asked for"
    assert list(folder.iterdir()) == [], "the files of the servers and of aiperf are gone"


async def test_aiperf_has_the_ids_of_the_servers(library, environment, tmp_path):
    from uma_trio.models.packaged import EMBEDDED
    from uma_trio.tokenizer.tokenizer import open_vocabulary

    generator = bench_script("public_generator")
    for model in (EMBEDDED, random_model("2x64")):
        with open_vocabulary(model) as vocabulary:
            found = generator.Generator(environment)
            assert await generator.write_tokenizer(found, model, vocabulary.tokenizer, tmp_path) == 0


def test_a_folder_without_aiperf_is_one_line(tmp_path, folder):
    done = bench("--aiperf", tmp_path, "--no-rival", folder=folder)
    assert done.returncode == 1
    assert "or omit --aiperf" in done.stderr
    assert "Traceback" not in done.stderr
