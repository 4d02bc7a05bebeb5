"""The model card: ``card.json`` next to the model, and the exam as a table, of which docs/EMBEDDED_MODEL.md shows some rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from uma_trio.training.evaluate import Mark
from uma_trio.training.shape import Shape
from uma_trio.training.skills.tools import EXAM as EXAM_TOOLS

Card = dict[str, Any]


def card(model: Path, shape: Shape, run: dict[str, Any], marks: Sequence[Mark], margins: Sequence[float]) -> Card:
    """The content of ``card.json``.

    Args:
        run: device, seconds, recipe and final loss of the training.
        margins: best logit minus second, for all tokens of all right answers.
    """
    ordered = sorted(margins)
    return {
        "name": "uma-trio embedded",
        "licence": "MIT",
        "bytes": model.stat().st_size,
        "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "parameters": shape.parameters,
        "quantisation": "Q8_0",
        "shape": attrs.asdict(shape),
        "training": run,
        "exam": {
            "questions": (
                "held out by hash from training, one in twenty; greedy; the whole answer must be equal, "
                "and of calls of tools names and arguments as parsed JSON"
            ),
            **_sums(marks),
            "tools": _sums([mark for mark in marks if mark.skill in EXAM_TOOLS]),
            "margins_of_right_answers": {
                "tokens": len(ordered),
                **{
                    f"p{share:g}": round(ordered[int(len(ordered) * share / 100)], 3)
                    for share in (0.01, 0.1, 1, 10, 50)
                },
                "least": round(ordered[0], 3),
            }
            if ordered
            else {},
            "skills": [attrs.asdict(mark) for mark in marks],
        },
    }


def _sums(marks: Sequence[Mark]) -> dict[str, int]:
    return {"asked": sum(mark.asked for mark in marks), "right": sum(mark.right for mark in marks)}


def table(figures: Card) -> str:
    """The exam as a Markdown table."""
    lines = ["| skill | right | of | tokens | least margin, median | least margin |", "|---|---:|---:|---:|---:|---:|"]
    lines += [
        "| {skill} | {right} | {asked} | {tokens} | {margin_median:.1f} | {margin_least:.2f} |".format(**mark)
        for mark in figures["exam"]["skills"]
    ]
    exam = figures["exam"]
    if "tools" in exam:
        lines.append("| **tools** | **{right}** | **{asked}** | | | |".format(**exam["tools"]))
    lines.append(f"| **all** | **{exam['right']}** | **{exam['asked']}** | | | |")
    return "\n".join(lines)


def write_card(path: Path, figures: Card) -> None:
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
