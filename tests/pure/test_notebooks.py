"""The notebooks are kept with the outputs of a run, so that they can be read on the web."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.cases import all_cases
from tests.support.documents import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@all_cases("notebook", NOTEBOOKS)
def test_it_has_the_outputs_of_one_run(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    n_figures = sum("plt.show()" in "".join(cell["source"]) for cell in cells)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == n_figures > 0


@all_cases("notebook", NOTEBOOKS)
def test_it_is_small_and_names_no_folder_of_a_machine(notebook: Path) -> None:
    assert notebook.stat().st_size < 300_000
    texts = ["".join(output.get("text", "")) for cell in code_cells(notebook) for output in cell["outputs"]]
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|usr)/", "\n".join(texts))


@all_cases("notebook", NOTEBOOKS)
def test_the_readme_links_it(notebook: Path) -> None:
    assert f"(notebooks/{notebook.name})" in (ROOT / "README.md").read_text()
