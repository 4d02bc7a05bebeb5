"""Notebooks run from top to bottom, and their figures are not empty."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook needs the dev extra: ./build_llama.sh --dev")
nbclient = pytest.importorskip("nbclient", reason="the notebook needs the dev extra: ./build_llama.sh --dev")
image = pytest.importorskip("matplotlib.image", reason="the notebook needs the dev extra: ./build_llama.sh --dev")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def outputs_of(name, n_figures):
    """What a notebook prints in a run."""
    written = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(written)
    client = nbclient.NotebookClient(
        written, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    ran = client.execute()
    outputs = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == n_figures
    for picture in pictures:
        pixels = image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3]
        coloured = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2  # neither background nor text
        assert coloured.mean() > 0.001
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.benches
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own libraries warn
def test_latencies(library, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXED_LOAD_CSV", str(tmp_path / "tokens.csv"))
    printed = outputs_of("latency.ipynb", 3)
    assert "prefill of the long prompt: " in printed
    assert " ticks; " in printed, "the bench ran, since there was no recording"


@pytest.mark.benches
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_forks(library):
    assert "chosen tokens for 6 answers" in outputs_of("forks.ipynb", 2)
