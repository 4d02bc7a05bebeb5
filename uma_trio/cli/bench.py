"""``uma-trio bench``: the command of ``benches/suite.py`` in a checkout.  The benchmarks are not in the wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

BENCHES = Path(__file__).resolve().parents[2] / "benches"


def _suite(folder: Path) -> click.Command:
    sys.path.append(str(folder))
    command: click.Command = importlib.import_module("suite").command
    return command


@click.command("bench", context_settings={"ignore_unknown_options": True})
@click.option("--benches", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder of the benchmarks.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def without_checkout(folder: Path | None, arguments: tuple[str, ...]) -> None:
    """Run the benchmarks of a checkout, and write a report.  In a checkout, --help lists the options of the suite."""
    benches = folder or BENCHES
    if not (benches / "suite.py").exists():
        click.echo(
            f"uma-trio bench: there are no benchmarks in {benches}, since they are not part of the installed package: clone "
            "the repository, run ./build_llama.sh --dev in it and uma-trio bench from there, or give the folder with "
            "--benches",
            err=True,
        )
        raise SystemExit(2)
    _suite(benches.resolve())(arguments, prog_name="uma-trio bench")


command = _suite(BENCHES) if (BENCHES / "suite.py").exists() else without_checkout
