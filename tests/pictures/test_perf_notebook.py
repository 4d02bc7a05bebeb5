"""notebooks/perf.ipynb runs from top to bottom on a log that it is given, and its figures show something."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest

from tests.support.perf_runs import encode_run, simulated

NEEDS = "the notebook needs the dev extra: ./build_llama.sh --dev"
nbformat = pytest.importorskip("nbformat", reason=NEEDS)
nbclient = pytest.importorskip("nbclient", reason=NEEDS)
image = pytest.importorskip("matplotlib.image", reason=NEEDS)

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "perf.ipynb"
FIGURES = 4


@pytest.fixture(scope="module")
def written():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what Jupyter's own libraries deprecate is not ours
def test_it_runs_and_draws(written, tmp_path, monkeypatch):
    nbformat.validate(written)
    log = tmp_path / "perf.jsonl"
    log.write_bytes(encode_run(simulated()).replace(b'{"kind":"tick"', b'{"kind"', 1))
    monkeypatch.setenv("PERF_LOG", str(log))
    client = nbclient.NotebookClient(
        written, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    ran = client.execute()
    outputs = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == FIGURES
    for picture in pictures:
        pixels = image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3]
        coloured = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.2  # neither paper nor ink
        assert coloured.mean() > 0.001
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "1239 ticks in 30.8 s" in printed
    assert "incomplete: 1 lines are damaged" in printed
    assert "prefill" in printed
