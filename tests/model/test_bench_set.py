"""The benches of ``uma-trio bench`` and the command itself with small loads: output, CSV, exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.benches
pytest.importorskip("psutil", reason="the benches need the dev extra: ./build_llama.sh --dev")

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("LLAMA_PEERS_DIR") or ROOT / "build" / "peers" / "bin")


@pytest.fixture
def folder():
    """The temporary folder of the servers, to check that they leave nothing; short, because paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        yield Path(name)


@pytest.fixture(params=[pytest.param(False, id="ours"), pytest.param(True, id="rival")])
def rival(request):
    """Without llama-server, and with it if it is built."""
    if request.param and not (PEERS / "llama-server").exists():
        pytest.skip(f"there is no llama-server in {PEERS}: ./build_llama.sh --peers builds it")
    return request.param


def run(*command, folder, timeout=240):
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=timeout
    )


def bench(script, *arguments, folder):
    """Run a bench that must succeed, without warnings and without leaving files."""
    done = run(ROOT / "benches" / script, *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "llama.cpp" in done.stdout
    assert list(folder.iterdir()) == []
    return done.stdout


def read(file):
    with file.open() as opened:
        return list(csv.DictReader(opened))


def either(rival):
    return "--rival" if rival else "--no-rival"


def test_fanout(library, tmp_path, folder, rival):
    out = tmp_path / "runs.csv"
    shape = ("--requests", "3", "--prefix-tokens", "300", "--tail-tokens", "8", "--tokens", "4")
    bench("fanout.py", *shape, "--rival-flags", "", "--csv", out, either(rival), folder=folder)
    computed = {(row["server"], row["setting"]): float(row["prompts_computed"]) for row in read(out)}
    assert len(computed) == 5 if rival else 4
    for layout in ("on", "off"):
        assert computed["uma-trio", f"--kv-unified {layout}"] < 1.5
        assert computed["uma-trio", f"--kv-unified {layout} --no-prefix-reuse"] == pytest.approx(3, abs=0.01)


def test_sessions(library, tmp_path, folder):
    out = tmp_path / "sessions.csv"
    printed = bench("sessions.py", "--tokens", "2000", "--repeat", "2", "--csv", out, folder=folder)
    rows = read(out)
    assert len(rows) == 2
    for row in rows:
        assert float(row["warm_ms"]) > 0
        assert float(row["cold_ms"]) > 0
    n_read = sum(float(row["state_mb"]) > 0 for row in rows)
    assert f"after a restart {n_read} of 2 were read" in printed


def test_sessions_about_pictures(library, tmp_path, folder):
    printed = bench("sessions.py", "--tokens", "32", "--repeat", "2", "--picture", "tiny", folder=folder)
    assert "pictures before the restart: 2 encoded, 0 from disk" in printed
    assert "pictures after the restart: 0 encoded, 2 from disk" in printed


def test_moved_sessions(library, tmp_path, folder):
    out = tmp_path / "moved.csv"
    bench("moved_sessions.py", "--tokens", "2000", "--repeat", "1", "--csv", out, folder=folder)
    [row] = read(out)
    assert row["same_text"] == "True"
    assert float(row["prefilled"]) < 0.1 * float(row["tokens"])


def test_more_sessions_than_there_is_room_for(library, tmp_path, folder):
    out = tmp_path / "churn.csv"
    shape = ("--sessions", "12", "--room", "3", "--turns", "3", "--first", "200", "--hour", "0.001")
    printed = bench("sessions.py", "--churn", *shape, "--csv", out, folder=folder)
    assert [int(row["turns"]) for row in read(out)] == [3] * 12
    assert "lost          0" in printed


def test_long_ctx(library, tmp_path, folder, rival):
    out, everything = tmp_path / "ctx.csv", tmp_path / "all.csv"
    shape = ("--contexts", "64,256", "--tokens", "8", "--repeat", "1", "--kv-unified", "off,on")
    bench("long_ctx.py", *shape, "--csv", out, "--csv-all", everything, either(rival), folder=folder)
    assert out.read_text().splitlines()[0] == "ctx,tps"
    assert [row["ctx"] for row in read(out)] == ["64", "256"]
    assert all(float(row["tps"]) > 0 for row in read(out))
    found = read(everything)
    assert len(found) == (8 if rival else 4)
    assert all(int(row["ctx"]) - 12 <= int(row["prompt_tokens"]) <= int(row["ctx"]) - 8 for row in found)


def test_ipc_overhead(library, tmp_path, folder, rival):
    out = tmp_path / "ipc.csv"
    shape = ("--requests", "3", "--streams", "2", "--tokens", "20", "--repeat", "1")
    bench("ipc_overhead.py", *shape, "--csv", out, either(rival), folder=folder)
    assert out.read_text().splitlines()[0] == "path,ttft_ms,cpu_pct"
    assert [row["path"] for row in read(out)] == ["uds-json", "uds-cbor", "http-sse"][: 3 if rival else 2]


def test_cancel(library, tmp_path, folder, rival):
    out = tmp_path / "cancel.csv"
    printed = bench("cancel.py", "--long-tokens", "2000", "--repeat", "2", "--csv", out, either(rival), folder=folder)
    found = [(row["server"], row["moment"], row["way"]) for row in read(out)]
    assert len(found) == 2 * len(set(found)) == (12 if rival else 8)
    ours = [line.split("|") for line in printed.splitlines() if line.startswith("| uma-trio")]
    assert len(ours) == 4
    assert all(float(line[4]) > 0 for line in ours), "the server reports when the cells were free"


def test_lookup(library, tmp_path, folder, rival):
    out = tmp_path / "lookup.csv"
    flags = ("--rival-flags", "", "--rival-flags", "--spec-type ngram-simple") if rival else ()
    printed = bench(
        "lookup.py", "--questions", "1", "--tokens", "200", "--repeat", "1", "--csv", out, *flags, folder=folder
    )
    assert "DIFFERS" not in printed
    found = {(row["server"], row["setting"], row["task"].split()[0]): row for row in read(out)}
    assert len(found) == (8 if rival else 4)
    assert float(found["uma-trio", "--speculation", "copying"]["accepted"]) > 0
    assert float(found["uma-trio", "--no-speculation", "copying"]["drafted"]) == 0


SMALL_MIX = ("--short-words", "6", "--short-tokens", "6", "--long-words", "60", "--long-tokens", "4")


def test_goodput(library, tmp_path, folder, rival):
    out, plot = tmp_path / "runs.csv", tmp_path / "plot.png"
    rates = ("--rates", "5,20", "--seconds", "2", "--drain", "2")
    printed = bench("goodput.py", *rates, *SMALL_MIX, "--csv", out, "--plot", plot, either(rival), folder=folder)
    assert "most      uma-trio" in printed
    found = read(out)
    assert len(found) == (4 if rival else 2)
    for row in found:
        assert float(row["arrived"]) > 0
        assert float(row["good"]) <= float(row["arrived"])
        assert float(row["rss_end_mib"]) > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_goodput_when_there_is_too_much(library, tmp_path, folder):
    out = tmp_path / "runs.csv"
    load = (
        "--overload",
        "4",
        "--seconds",
        "2",
        "--overload-s",
        "3",
        "--max-queue",
        "0",
        "--parallel",
        "1",
        "--no-rival",
    )
    bench("goodput.py", *load, *SMALL_MIX, "--csv", out, folder=folder)
    (row,) = read(out)
    assert row["setting"] == "--max-queue 0"
    assert 0 < float(row["refused"]) < float(row["arrived"])
    assert float(row["refused_p50_ms"]) > 0


def test_two_tenants(library, folder):
    done = run(ROOT / "benches" / "goodput.py", "--tenants", "--seconds", "2", *SMALL_MIX, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    if os.geteuid():
        assert "skipped   --tenants: only root" in done.stdout
        return
    assert "| user 60001 |      18 |" in done.stdout
    assert "| user 60002 |       6 |" in done.stdout
    assert "service   " in done.stdout
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("goodput.py", ("--rates", "many")),
        ("goodput.py", ("--tenants", "--tenant-clients", "0,4")),
        ("long_ctx.py", ("--contexts", "32")),
        ("long_ctx.py", ("--flash-attn", "perhaps")),
        ("cancel.py", ("--pin", "all")),
    ],
)
def test_options_that_make_no_sense(folder, script, options):
    done = run(ROOT / "benches" / script, *options, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["fanout.py", "goodput.py", "long_ctx.py", "ipc_overhead.py", "cancel.py"])
def test_a_missing_rival_is_one_line(library, folder, script):
    done = run(ROOT / "benches" / script, "--rival-bin", folder, folder=folder)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: there is no llama-server in ")
    assert len(done.stderr.splitlines()) == 1


# -- uma-trio bench --------------------------------------------------------------------------------


def command(*arguments, folder):
    return run("-m", "uma_trio", "bench", *arguments, folder=folder)


class Page(HTMLParser):
    """The tags and links of a report."""

    def __init__(self):
        super().__init__()
        self.tags, self.sources = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def test_a_report_is_self_contained(library, tmp_path, folder):
    pytest.importorskip("matplotlib", reason="plots need the dev extra: ./build_llama.sh --dev")
    out = tmp_path / "a folder"
    chosen = ("--only", "mixed", "--only", "long_ctx", "--only", "ipc")
    done = command("--quick", "--model", "embedded", "--out", out, *chosen, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str(out / "report.html")
    text = (out / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("img") == 3, "latencies, ticks, and speed against context"
    assert page.tags.count("table") == 4, "the table of contents, and one of each bench"
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in page.sources)
    assert "llama.cpp" in text
    for name in ("mixed", "long_ctx", "ipc"):
        assert (out / f"{name}.csv").exists()
        assert (out / f"{name}.txt").exists()
    assert list(folder.iterdir()) == []


def test_a_bench_that_fails_is_in_the_report(library, tmp_path, folder):
    model = tmp_path / "no.gguf"
    model.write_text("this is not a model")
    done = command(
        "--quick", "--only", "long_ctx", "--only", "ipc", "--model", model, "--out", tmp_path / "out", folder=folder
    )
    assert done.returncode == 1
    assert "long_ctx   failed with 1" in done.stdout
    assert "ipc        done" in done.stdout, "it uses the embedded model"
    assert "no.gguf" in done.stderr
    assert "Traceback" not in done.stderr
    text = (tmp_path / "out" / "report.html").read_text()
    assert "failed with 1" in text
    assert "uds-cbor" in text


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--benches", "/nowhere"), "clone the repository"),
        (("--model", "/nowhere.gguf"), "there is no model at /nowhere.gguf"),
        (("--only", "pareto", "--model", "embedded"), "add --rival"),
        (("--gpu", "--quick", "--only", "tensors"), "layers and tensors need two GPUs"),
    ],
)
def test_what_it_cannot_run(tmp_path, folder, options, remedy):
    done = command("--out", tmp_path, *options, folder=folder)
    assert done.returncode == 2
    assert remedy in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_set_for_a_gpu_runs_to_its_end_without_one(library, tmp_path, folder):
    done = command("--gpu", "--quick", "--out", tmp_path, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    names = ["streams", "stairs", "contexts", "restore", "gap", "fit", "adapters", "constraints"]
    assert [step["name"] for step in results["steps"]] == names, "mixed compares with llama-server"
    for number, step in enumerate(results["steps"], 1):
        assert step["state"] == "done", step
        assert step["rows"], step
        assert f"{number} of {len(names)}  {step['name']}: " in done.stderr
    assert results["model"] == "embedded"
    assert "CPU" in {device["name"] for device in results["devices"]}
    assert list(folder.iterdir()) == []


def test_the_set_for_a_gpu_compares_with_llama_server(library, tmp_path, folder):
    if not (PEERS / "llama-server").exists():
        pytest.skip(f"there is no llama-server in {PEERS}: ./build_llama.sh --peers builds it")
    done = command(
        "--gpu", "--quick", "--rival", "--only", "mixed", "--only", "streams", "--out", tmp_path, folder=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    mixed, streams = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert {row["server"] for row in mixed["rows"]} == {"uma-trio", "llama-server"}
    assert len({row["program"] for row in streams["rows"]}) == 3


def test_a_set_whose_time_is_over_keeps_what_it_has(library, tmp_path, folder):
    done = command("--gpu", "--quick", "--minutes", "0.01", "--out", tmp_path, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "streams    cut off in" in done.stdout
    assert "contexts   not begun: the 0.01 minutes are over" in done.stdout
    [step] = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert step["state"] == "cut off"
    assert list(folder.iterdir()) == []


def test_the_set_for_a_gpu_says_at_once_what_it_lacks(library, tmp_path, folder):
    done = command("--gpu", "--out", tmp_path / "out", folder=folder)
    assert done.returncode == 2
    assert "make_model.py --shape 7b" in done.stderr
    assert not (tmp_path / "out").exists()
