"""The bench ``mixed_load.py`` as a command: output, CSV, exit codes.  Durations are not judged."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.random_models import random_model
from tests.support.real_daemon import real_daemon

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benches" / "mixed_load.py"
THROUGHPUT = ROOT / "benches" / "throughput.py"
PEERS = Path(os.environ.get("LLAMA_PEERS_DIR") or ROOT / "build" / "peers" / "bin")
SMALL = ("--streams", "2", "--tokens", "40", "--long-words", "60", "--long-tokens", "8", "--long-after", "5")


@pytest.fixture
def folder():
    """The temporary folder of the servers, to check that they leave nothing; short, because paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


@pytest.fixture
def peers():
    """llama.cpp's own programs."""
    if not (PEERS / "llama-server").exists():
        pytest.skip(f"there is no llama-server in {PEERS}: ./build_llama.sh --peers builds it")


def bench(*arguments, folder, script=BENCH):
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def read(file):
    with file.open() as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("protocol", ["json", "cbor"])
def test_mixed_load_on_the_embedded_model(library, tmp_path, folder, protocol):
    out = tmp_path / "tokens.csv"
    done = bench(*SMALL, "--protocol", protocol, "--csv", out, "--", "--parallel", "4", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for text in ("cpu  ", "llama.cpp", "--parallel 4", "| interactive", "| long", "tok/s", " ticks; "):
        assert text in done.stdout
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


def test_mixed_load_on_a_random_model_through_a_running_daemon(library, folder):
    model = random_model("2x64")
    with real_daemon("--model", str(model)) as daemon:
        done = bench(*SMALL, "--socket", daemon.socket, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"model {model.stem}, json" in done.stdout
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


# -- next to llama.cpp's own programs ------------------------------------------------------------


def test_mixed_load_and_llama_server(library, peers, tmp_path, folder):
    out, plot = tmp_path / "runs.csv", tmp_path / "pareto.png"
    settings = (
        "--rival-batch",
        "2048,64",
        "--ours",
        "--target-itl-ms 50",
        "--repeat",
        "2",
        "--long",
        "2",
        "--long-every",
        "0.05",
    )
    done = bench(*SMALL, "--rival", "llama-server", *settings, "--csv", out, "--plot", plot, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for text in (
        "pin  ",
        "| llama-server -b 2048 ",
        "| uma-trio --target-itl-ms 50 ",
        "| times llama-server",
        "at least as good",
    ):
        assert text in done.stdout
    rows = read(out)
    assert [(row["server"], row["setting"]) for row in rows] == 2 * [
        ("llama-server", "-b 2048"), ("uma-trio", "--target-itl-ms 50"), ("llama-server", "-b 64")
    ]  # fmt: skip
    assert [row["run"] for row in rows] == ["1"] * 3 + ["2"] * 3
    for row in rows:
        assert float(row["wall_s"]) > 0
        assert float(row["itl_p50_ms"]) <= float(row["itl_p99_ms"]) <= float(row["itl_max_ms"])
        assert 0 < float(row["ttft_p50_ms"]) <= float(row["ttft_max_ms"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(folder.iterdir()) == [], "the servers' files are gone"


def test_throughput_and_llama_cpp(library, peers, tmp_path, folder):
    out = tmp_path / "runs.csv"
    shape = ("--streams", "1,3", "--tokens", "20", "--prompt-words", "10", "--repeat", "2")
    done = bench(*shape, "--csv", out, folder=folder, script=THROUGHPUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    rows = read(out)
    programs = ["uma-trio", "llama-server", "llama-batched-bench"]
    assert [(row["streams"], row["run"], row["program"]) for row in rows] == [
        (streams, run, program) for streams in "13" for run in "12" for program in programs
    ]
    assert all(float(row["decode_tokens_per_s"]) > 0 for row in rows)
    assert len({row["prompt_tokens"].split(".")[0] for row in rows if row["streams"] == "1"}) == 1, "the same prompt"
    assert list(folder.iterdir()) == []


def test_throughput_without_rivals(library, folder):
    done = bench(
        "--streams", "2", "--tokens", "10", "--no-rivals", "--", "--flash-attn", "on", folder=folder, script=THROUGHPUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| uma-trio " in done.stdout
    assert "llama-server" not in done.stdout


@pytest.mark.parametrize("arguments", [(BENCH, "--rival", "llama-server"), (THROUGHPUT,)], ids=["mixed", "throughput"])
def test_a_missing_rival_is_one_line(folder, arguments):
    script, *options = arguments
    done = bench(*options, "--rival-bin", folder, folder=folder, script=script)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: there is no llama-server in ")
    assert "./build_llama.sh --peers" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_rival_that_does_not_come_up_says_why(peers, tmp_path, folder):
    model = tmp_path / "no.gguf"
    model.write_text("this is not a model")
    done = bench("--rival", "llama-server", "--model", model, folder=folder)
    assert done.returncode == 1
    assert "llama-server ended at its start" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--pin", "all"), ("--rival-batch", "many"), ("--ours", "--target-itl-ms 9"), ("--rival", "llama-server", "--socket", "s"),
    ],
    ids=lambda options: options[0],
)  # fmt: skip
def test_options_that_make_no_sense(folder, options):
    done = bench(*options, folder=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_llama_servers_own_tests(library, peers, folder):
    done = bench("test_tokenize", folder=folder, script=ROOT / "benches" / "llama_server_tests.py")
    assert done.returncode == 0, done.stdout + done.stderr
    listed, _, summary = done.stdout.partition("\n\n")
    outcomes = {line.split()[1].rpartition("::")[2]: line.split()[0] for line in listed.splitlines()}
    assert f"| all | {len(outcomes)} |" in summary
    assert outcomes["test_tokenize_detokenize"] == "pass"
    assert outcomes["test_tokenize_with_pieces"] == "pass"
    assert not list(folder.iterdir())
