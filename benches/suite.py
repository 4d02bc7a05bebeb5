"""``uma-trio bench``: runs the benchmarks one after another, and writes a report."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
import suite_report
from suite_gpu import GPU_BENCHES, MODEL, find_devices, write_results
from suite_runs import BENCHES, Bench, Outcome, Settings, chosen, run

from uma_trio.cli import run_trio
from uma_trio.cli.completion import model_file
from uma_trio.engine_link.devices import Devices

PEERS_VARIABLE = "LLAMA_PEERS_DIR"


@click.command("bench")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bench-out"),
    show_default=True,
    help="Folder for report.html, the CSV files and the output of each benchmark.",
)
@click.option(
    "--quick", is_flag=True, help="Short runs of a few minutes instead of half an hour, with rougher figures."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(dict.fromkeys(bench.name for bench in (*BENCHES, *GPU_BENCHES)))),
    metavar="NAME",
    help="Run only this benchmark; repeatable.",
)
@click.option("--gpu", is_flag=True, help="Run the set for a GPU instead.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="Stop after this time, with what has been measured until then.",
)
@click.option("--rival", is_flag=True, help="Also measure llama-server and llama-batched-bench, in the same runs.")
@click.option(
    "--model",
    metavar="PATH|embedded",
    shell_complete=model_file,
    help="GGUF file to serve.  [default: 125M random weights, generated once]",
)
@click.option(
    "--threads", type=click.IntRange(1), help="Compute threads of every server.  [default: all physical cores but one]"
)
@click.option(
    "--benches",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(__file__).parent,
    help="Folder of the benchmark scripts.  [default: benches/ of the checkout]",
)
def command(
    folder: Path,
    model: str | None,
    only: Sequence[str],
    gpu: bool,
    minutes: float | None,
    rival: bool,
    out: Path,
    **options: Any,
) -> None:
    """Run the benchmarks of a checkout, and write a report.

    Runs the scripts in benches/ one after another and writes CSV files and a self-contained HTML page with tables
    and plots.  Each script starts its own servers.  The machine should be idle otherwise.  docs/BENCHMARKS.md
    explains the figures.

    \b
      uma-trio bench --quick                           all of them, roughly, in a few minutes
      uma-trio bench --only mixed --rival              next to llama-server, after: ./build_llama.sh --peers
      uma-trio bench --model model.gguf --out here     with a model of your own
      uma-trio bench --gpu --rival --minutes 25 --model 7b.gguf     on a GPU, after: ./build_llama.sh --peers

    \b
    mixed       short streams next to a long prompt: inter-token latency
    pareto      the same at several settings: wall time against p99 (with --rival)
    throughput  plain streams: tokens per second
    goodput     share of requests that meet their SLO, against arrival rate
    overload    twice the load that the server can handle
    tenants     two users with different numbers of clients (needs root)
    long_ctx    decode speed against context length
    ipc         cost of transport: JSON, CBOR, and HTTP (with --rival)
    cancel      time from a cancel to the first token of the next request
    fanout      requests with a common prefix
    sessions    sessions that continue, from memory and from disk
    churn       more sessions than fit into memory
    lookup      speculative decoding with prompt lookup
    modes       the engine in its own process and in a thread
    recovery    crashes of the engine under load

    With --gpu these run instead, on all GPUs, in this order.  results.json has the rows of all of them, and is written
    again after each.  With --quick the loads are so small that they run without a GPU too, to try the set.

    \b
    mixed        streams next to long prompts at targets of 18 and 30 ms and the default (with --rival)
    streams      8 and 32 plain streams
    stairs       what ticks take by their rows, and how well they are predicted
    contexts     eight streams in contexts of 16,384 tokens
    layers       plain streams on several GPUs with split_mode layer
    tensors      the same with split_mode tensor
    restore      sessions that continue, from memory and from disk
    gap          how long the GPU waits between ticks
    fit          a model that is served with less and less memory
    adapters     ticks of streams with several LoRA adapters
    constraints  what a JSON schema costs

    These scripts in benches/ run by themselves:

    \b
    house.py                 lines of code and words of the documentation
    kv_layout.py             layouts of the KV cache
    layout_choice.py         whether the daemon chooses the right layout
    stairs.py                ticks by their rows
    host_time.py             the engine's own CPU time for a step
    tick_time.py             the daemon's own CPU time for a token
    gateway_time.py          the gateway's own CPU time for a token
    fit.py                   whether a model is still served while memory is taken away
    adapters.py              ticks with several LoRA adapters
    drafts.py                what a draft model gains
    two_models.py            how two models share the cores
    crowding.py              how long a tenant waits while another one takes all places
    night_shift.py           what a batch costs interactive requests
    calibration.py           how well starts and ends of requests are predicted
    steering.py              how soon running answers are changed, and whether others notice
    replays.py               how many logged answers are equal when they are computed again
    continued_responses.py   the first token of a response that continues an earlier one
    scale_out.py             several daemons behind routers from PyPI, also with faults
    moved_sessions.py        sessions that move between two daemons: TTFT of the next turn, and texts
    constrained.py           what a constraint costs
    controllers.py           what a controller costs
    deaths.py                each process is killed and stopped
    controllers_recovery.py  the runtime of controllers is killed under load
    aici_reference.py        samples and clients of the AICI reference
    embeddings.py            texts to embed, next to llama-server
    one_gpu.py               all of a GPU's goals in ten minutes, with one library after another
    closed_loops.py          clients in closed loops over HTTP, at many sizes, next to llama-server
    pictures.py              streams of text while pictures arrive, next to llama-server
    public_load.py           clients in a closed loop over HTTP, with aiperf
    bodies.py                large bodies of one client, next to streams of another
    http_probes.py           /healthz and /metrics during prefill
    llama_server_tests.py    llama-server's own tests
    policy_sim.py            the scheduling policy on simulated devices
    router_sim.py            many simulated daemons behind routers
    policy_replay.py         the requests of a perf log on a simulated device

    After Ctrl-C, the report covers the benchmarks that have finished.  Exit codes: 0 success, 1 a benchmark failed,
    2 no benchmark could run.
    """
    folder = folder.resolve()
    if not (folder / BENCHES[0].script).exists():
        _fail(f"there are no benchmarks in {folder}: clone the repository, and name its folder benches")
    _check(folder, rival=rival)
    devices = _check_gpu(model, quick=options["quick"]) if gpu else None
    if gpu:
        model, options["threads"] = model or "embedded", options["threads"] or 1
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        folder=folder,
        out=out.resolve(),
        rival=rival,
        model=_model(model, folder),
        has_matplotlib=importlib.util.find_spec("matplotlib") is not None,
        **options,
    )
    benches = list(chosen(only, rival=rival, benches=GPU_BENCHES if gpu else BENCHES))
    if devices is not None:
        n_gpus = sum(device.is_gpu for device in devices.found)
        benches = [bench for bench in benches if n_gpus >= bench.min_gpus]
    if not benches:
        _fail(
            f"none of {', '.join(only)} can run: "
            + (
                "mixed needs --rival, layers and tensors need two GPUs, and some names belong to the set without --gpu"
                if gpu
                else "pareto compares with a rival, so add --rival; some names belong to --gpu"
            )
        )
    sys.exit(_run(benches, settings, minutes, devices))


def _fail(message: str) -> NoReturn:
    click.echo(f"uma-trio bench: {message}", err=True)
    raise SystemExit(2)


def _check(folder: Path, *, rival: bool) -> None:
    missing = [name for name in ("psutil", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"the benchmarks need {' and '.join(missing)}: run ./build_llama.sh --dev in the checkout")
    peers = Path(os.environ.get(PEERS_VARIABLE) or folder.parent / "build" / "peers" / "bin")
    if rival and not (peers / "llama-server").exists():
        _fail(f"there is no llama-server in {peers}: run ./build_llama.sh --peers, or point ${PEERS_VARIABLE} at it")


def _check_gpu(model: str | None, *, quick: bool) -> Devices:
    """Say at once all that is missing for the set of a GPU, and how to get it; builds nothing.

    Returns:
        What the library finds.
    """
    devices, missing = find_devices(), []
    if isinstance(devices, str):
        _fail(f"{devices}: run uma-trio doctor")
    if not quick and not any(device.is_gpu for device in devices.found):
        missing.append(f"a GPU that the library uses ({devices}): {devices.fix or './build_llama.sh --backend cuda'}")
    if not quick and model is None:
        missing.append(f"a model: {MODEL}, then --model 7b.gguf")
    if missing:
        _fail(f"--gpu needs {'; and '.join(missing)}. Without a GPU, --quick tries the set on the CPU")
    return devices


def _model(name: str | None, folder: Path) -> Path | None:
    """Return the model file, generating the default one if needed; ``None`` for the embedded model."""
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
        command = [
            sys.executable,
            str(folder / "make_model.py"),
            "--shape",
            "125m",
            "--quant",
            "q8_0",
            "--out",
            str(path),
        ]
        if subprocess.run(command).returncode:
            _fail("the default model could not be generated; give a file with --model, or use --model embedded")
    return path


def _run(
    benches: Sequence[Bench], settings: Settings, minutes: float | None = None, devices: Devices | None = None
) -> int:
    """Run the benchmarks and write the report.  Returns the exit code.

    Args:
        devices: what the library finds; with them the results are written after each benchmark.
    """
    outcomes: list[Outcome] = []
    given = " ".join(["uma-trio", *sys.argv[1:]])

    async def work() -> None:
        deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        for n, bench in enumerate(benches, 1):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                click.echo(f"{bench.name:<10} not begun: the {minutes:g} minutes are over")
                continue
            left = "" if minutes is None else f", {left_s / 60:.1f} min left"
            if devices is not None:
                click.echo(f"{n} of {len(benches)}  {bench.name}: {bench.title}{left}", err=True)
            with _progress(f"{n} of {len(benches)}  {bench.name}{left}") as on_line:
                outcome = await run(bench, settings, on_line, left_s)
            outcomes.append(outcome)
            if devices is not None:
                write_results(settings, outcomes, devices, given)
            click.echo(
                f"{bench.name:<10} {outcome.state} in {outcome.duration_s:.0f} s"
                + (f": {outcome.skipped}" if outcome.skipped else "")
            )
            if outcome.code:
                click.echo(outcome.stderr.rstrip()[-1000:], err=True)

    stopped = None
    try:
        run_trio.run(run_trio.until_interrupted, work)
    except run_trio.Interrupted as interrupted:
        stopped = 128 + interrupted.number
    if outcomes:
        report = suite_report.write(settings, outcomes, given)
        click.echo(f"\n{report}")
    return stopped or int(any(outcome.code for outcome in outcomes))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is running and its last line of output, if stderr is a terminal."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status(what) as status:
        yield lambda line: status.update(f"{what}  [dim]{escape(line[: console.width - len(what) - 8])}[/dim]")
