"""The notebook runs from top to bottom on a recording of its own, and its figures are not empty."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook needs the dev extra: ./build_llama.sh --dev")
nbclient = pytest.importorskip("nbclient", reason="the notebook needs the dev extra: ./build_llama.sh --dev")
image = pytest.importorskip("matplotlib.image", reason="the notebook needs the dev extra: ./build_llama.sh --dev")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "latency.ipynb"
FIGURES = 3


@pytest.fixture(scope="module")
def written():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.benches
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own libraries warn
def test_it_runs_and_draws(library, written, tmp_path, monkeypatch):
    nbformat.validate(written)
    monkeypatch.setenv("MIXED_LOAD_CSV", str(tmp_path / "tokens.csv"))
    client = nbclient.NotebookClient(
        written, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    ran = client.execute()
    outputs = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == FIGURES
    for picture in pictures:
        pixels = image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3]
        coloured = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2  # neither background nor text
        assert coloured.mean() > 0.001
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "prefill of the long prompt: " in printed
    assert " ticks; " in printed, "the bench ran, since there was no recording"
