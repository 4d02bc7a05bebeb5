"""Notebooks run from top to bottom, on what real daemons write, and their figures are not empty."""

from __future__ import annotations

import base64
import io
import re
import threading
from pathlib import Path

import pytest

from tests.support.profile import thorough
from tests.support.real_daemon import real_daemon
from uma_trio.telemetry.perf_records import decode

nbformat = pytest.importorskip("nbformat", reason="the notebook needs the dev extra: ./build_llama.sh --dev")
nbclient = pytest.importorskip("nbclient", reason="the notebook needs the dev extra: ./build_llama.sh --dev")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LIMIT_S = 300
"""For the start of a kernel, and for a cell: imports and the fonts of matplotlib take long on a busy machine."""
NO_DATA = ("no finished request", "no ticks", "no predicted ticks")


def run(name, folder=NOTEBOOKS):
    """A notebook that has run in ``folder``."""
    written = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(written)
    client = nbclient.NotebookClient(
        written,
        timeout=LIMIT_S,
        startup_timeout=LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def outputs_of(notebook, n_figures):
    """What a notebook has printed."""
    import matplotlib.image

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == n_figures
    for picture in pictures:
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3]
        coloured = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2  # neither background nor text
        assert coloured.mean() > 0.001
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.fixture(scope="module")
def perf_log(library, tmp_path_factory):
    """The perf log of a daemon that served four streams, one of them with a long prompt."""
    log = tmp_path_factory.mktemp("perf") / "perf.jsonl"
    with real_daemon("--perf-log", str(log), "--parallel", "4") as daemon:
        prompts = ["one two three four five " * (100 if n == 3 else 1) for n in range(4)]
        asking = [
            threading.Thread(target=daemon.ask, kwargs={"prompt": each, "max_tokens": 60, "ignore_eos": True})
            for each in prompts
        ]
        for each in asking:
            each.start()
        for each in asking:
            each.join(60)
        daemon.settled()
    return log


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")  # Jupyter's own libraries warn
def test_perf(perf_log, tmp_path, monkeypatch):
    [found] = decode(perf_log.read_bytes())
    damaged = tmp_path / "perf.jsonl"
    damaged.write_bytes(perf_log.read_bytes().replace(b'{"kind":"tick"', b'{"kind"', 1))
    monkeypatch.setenv("PERF_LOG", str(damaged))
    printed = outputs_of(run("perf.ipynb", tmp_path), 4)
    assert f"{len(found.ticks) - 1} ticks in " in printed
    assert "incomplete: 1 lines are damaged" in printed
    assert re.search(r"prefill +\d+ ticks", printed)


@pytest.mark.filterwarnings("default")
def test_the_plots_of_a_log_have_data(perf_log):
    from uma_trio.cli.perf_plots import draw

    [found] = decode(perf_log.read_bytes())
    texts = [text.get_text() for axes in draw(found).axes for text in axes.texts]
    assert any(text.startswith("p99  ") for text in texts)
    assert not [text for text in texts if text.startswith(NO_DATA)]


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["perf", thorough("latency")])
def test_outside_of_a_checkout_they_say_what_is_missing(name, tmp_path, monkeypatch):
    for variable in ("PERF_LOG", "MIXED_LOAD_CSV"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="or run this in a checkout"):
        run(f"{name}.ipynb", tmp_path)


@pytest.mark.benches
@pytest.mark.filterwarnings("default")
def test_latencies(library, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXED_LOAD_CSV", str(tmp_path / "tokens.csv"))
    printed = outputs_of(run("latency.ipynb"), 3)
    assert "prefill of the long prompt: " in printed
    assert " ticks; " in printed, "the bench ran, since there was no recording"


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_forks(library):
    printed = outputs_of(run("forks.ipynb"), 2)
    assert "chosen tokens for 6 answers" in printed
    for animal in ("fox", "bear", "owl"):
        assert printed.count(f" {animal} with a ") == 2, "the model answers what it was asked"
