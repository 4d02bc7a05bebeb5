"""``uma-trio bench``: the benches of a checkout, one after another, and a report of what they found."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from uma_trio.cli.bench_runs import BENCHES, Bench, Outcome, Settings, chosen

CHECKOUT = Path(__file__).resolve().parents[2]
PEERS_VARIABLE = "LLAMA_PEERS_DIR"


@click.command("bench", short_help="Measure this machine, and write a report.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bench-out"),
    show_default=True,
    help="Folder for report.html, the CSV files and what each bench printed.",
)
@click.option("--quick", is_flag=True, help="A few minutes instead of half an hour or more; the figures are rougher.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([bench.name for bench in BENCHES]),
    metavar="NAME",
    help="Run this one; can be given again.",
)
@click.option("--rival", is_flag=True, help="Also llama-server and llama-batched-bench, in the same runs.")
@click.option(
    "--model", metavar="PATH|embedded", help="GGUF to serve.  [default: 125M random weights, made once and kept]"
)
@click.option(
    "--threads", type=click.IntRange(1), help="Compute threads of every server.  [default: all physical cores but one]"
)
@click.option(
    "--benches",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the benches.  [default: benches/ of the checkout]",
)
def command(
    folder: Path | None, model: str | None, only: Sequence[str], rival: bool, out: Path, **options: Any
) -> None:
    """Measure this machine, and write a report.

    Runs the scripts in benches/ one after another and writes one HTML file with their tables and plots, which
    needs nothing beside it, and their CSV files. Each script starts its own servers; nothing else should
    compute meanwhile. What the figures mean is in docs/BENCHMARKS.md.

    \b
    mixed       short streams beside a long prompt: ITL, and what each tick held
    pareto      the same at several settings, wall time against p99 (with --rival)
    throughput  plain streams, tokens a second
    goodput     requests served well, against how many come
    overload    twice of what the server can do
    tenants     two users of unequal size (needs root)
    long_ctx    tokens a second against context
    ipc         Unix socket with JSON and CBOR, and HTTP (with --rival)
    cancel      from a cancel to the next one's first token
    fanout      requests that begin alike
    lookup      guessing tokens from the prompt

    Stopped with Ctrl-C it still writes a report of what is done. Exit codes: 0, 1 if a bench failed, 2 if none can run.
    """
    folder = _benches(folder)
    _check(folder, rival=rival)
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        folder=folder,
        out=out.resolve(),
        rival=rival,
        model=_model(model, folder),
        draws=importlib.util.find_spec("matplotlib") is not None,
        **options,
    )
    found = list(chosen(only, rival=rival))
    if not found:
        _fail("pareto is nothing without a rival: add --rival")
    sys.exit(_run(found, settings))


def _fail(message: str) -> NoReturn:
    click.echo(f"uma-trio bench: {message}", err=True)
    raise SystemExit(2)


def _benches(folder: Path | None) -> Path:
    found = folder or CHECKOUT / "benches"
    if not (found / BENCHES[0].script).exists():
        _fail(
            f"there are no benches in {found}; an installed package has none: clone the repository, run "
            "./build_llama.sh --dev and uma-trio bench in it, or name the folder with --benches"
        )
    return found.resolve()


def _check(folder: Path, *, rival: bool) -> None:
    missing = [name for name in ("psutil", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"the benches need {' and '.join(missing)}: run ./build_llama.sh --dev, or pip install 'uma-trio[dev]'")
    peers = Path(os.environ.get(PEERS_VARIABLE) or folder.parent / "build" / "peers" / "bin")
    if rival and not (peers / "llama-server").exists():
        _fail(f"there is no llama-server in {peers}: run ./build_llama.sh --peers, or say where in ${PEERS_VARIABLE}")


def _model(name: str | None, folder: Path) -> Path | None:
    """``None`` is the embedded one, which the benches take by themselves."""
    import subprocess

    import platformdirs

    if name == "embedded":
        return None
    if name is not None:
        if not Path(name).is_file():
            _fail(f"there is no model at {name}")
        return Path(name).resolve()
    path = Path(platformdirs.user_cache_dir("uma-trio"), "bench", "125m-q8_0.gguf")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        making = [
            sys.executable,
            str(folder / "make_model.py"),
            "--shape",
            "125m",
            "--quant",
            "q8_0",
            "--out",
            str(path),
        ]
        if subprocess.run(making).returncode:
            _fail("the model could not be made; give one with --model, or take --model embedded")
    return path


def _run(benches: Sequence[Bench], settings: Settings) -> int:
    """The exit code."""
    from uma_trio.cli import bench_report, running
    from uma_trio.cli.bench_runs import run
    from uma_trio.demo.temporary_daemon import Interrupted, until_interrupted

    outcomes: list[Outcome] = []

    async def work() -> None:
        for n, bench in enumerate(benches, 1):
            with _progress(f"{n} of {len(benches)}  {bench.name}") as on_line:
                outcome = await run(bench, settings, on_line)
            outcomes.append(outcome)
            click.echo(
                f"{bench.name:<10} {outcome.state} in {outcome.took_s:.0f} s"
                + (f": {outcome.skipped}" if outcome.skipped else "")
            )
            if outcome.code:
                click.echo(outcome.complained.rstrip()[-1000:], err=True)

    stopped = None
    try:
        running.run(until_interrupted, work)
    except Interrupted as interrupted:
        stopped = 128 + interrupted.number
    if outcomes:
        report = bench_report.write(settings, outcomes, " ".join(["uma-trio", *sys.argv[1:]]))
        click.echo(f"\n{report}")
    return stopped or int(any(outcome.code for outcome in outcomes))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """On a terminal what is running and the last line that it printed; nothing elsewhere."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status(what) as status:
        yield lambda line: status.update(f"{what}  [dim]{escape(line[: console.width - len(what) - 8])}[/dim]")
