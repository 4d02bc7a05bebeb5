"""Take memory away in steps, and serve a model with what is left.

In each step a fresh daemon and its engine load the model, prefill and decode.  None may fail or be killed, and where the
model needs more than there is, most of what is free should be used.

    python benches/fit.py --device ram --free 400,600,800,1200
    python benches/fit.py --device gpu --full --shape 1b --free 6000,4000,3000,2500,2000,1500,1000,700,400
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import psutil
import trio
from machine import machine
from make_model import make_model
from model_shapes import SHAPES, parse_shape

MIB = 1 << 20
LIMIT_S = 120.0
"""Longest time of a step."""


@attrs.frozen
class Result:
    """One step."""

    target_mib: int
    """Memory that the step should find."""
    outcome: str
    """``ok``, or what went wrong."""
    choice: str = ""
    why: str = ""
    free_mib: float = 0.0
    """Memory that the engine found free."""
    predicted_mib: float = 0.0
    taken_mib: float = 0.0
    """Memory that was taken when all sequences had tokens."""

    @property
    def used(self) -> float:
        """Share of the free memory."""
        return self.taken_mib / self.free_mib if self.free_mib else 0.0


async def serve(model: Path, device: str, fill: int, full: bool, settings: dict[str, Any]) -> None:
    """Load the model as the daemon does, prefill each sequence and decode; print what that took as JSON."""
    from uma_trio import config
    from uma_trio.daemon.engines.link import ProcessLauncher
    from uma_trio.daemon.engines.loaded import open_model
    from uma_trio.engine.open_fitted import RAM
    from uma_trio.engine_link.messages import SampleRequest, Step, StepInput
    from uma_trio.engine_link.sampling import SamplingParams

    chosen = config.Config(model=config.Model(model=str(model), layout_trial_s=0, **settings))
    async with trio.open_nursery() as nursery, open_model(chosen, ProcessLauncher(nursery)) as loaded:
        assert loaded is not None
        link, info, fit = loaded.engine.link, loaded.info, loaded.fit
        assert fit is not None
        assert link.pid is not None
        anonymous, _ = resident(link.pid)
        sample = [SampleRequest(SamplingParams(temperature=0))]
        whole = min(info.n_ctx // info.n_seq_max, info.n_ctx_train) - 8
        lengths = [
            whole if full else min(fill, whole),
            *[min(fill, whole)] * (info.n_seq_max - 1),
        ]  # a long one needs all of the compute buffers
        for seq, length in enumerate(lengths):
            for at in range(0, length, info.n_batch):
                tokens = [1 + n % (info.n_vocab - 1) for n in range(at, min(at + info.n_batch, length))]
                await link.compute(Step((), [[StepInput(seq, at, tokens)]]))
        rows = [StepInput(seq, length, [7], sample) for seq, length in enumerate(lengths)]
        await link.compute(Step((), [rows]))
        now, mapped = resident(link.pid)
        names = [name for name in fit.free if (name == RAM) == (device == "ram")]
        report = {
            "choice": fit.choice,
            "why": fit.why,
            "free_mib": sum(fit.free[name] for name in names) / MIB,
            "predicted_mib": sum(fit.predicted[name] for name in names) / MIB,
            "taken_mib": (fit.taken[RAM] + now - anonymous + min(mapped, info.size_bytes)) / MIB,
        }
        print(json.dumps(report), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)  # until the memory of the GPU is measured from outside


def resident(pid: int) -> tuple[int, int]:
    """Resident memory of a process in bytes: what no file backs, and what files back."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024, int(fields["RssFile"].split()[0]) * 1024


def step(model: Path, device: str, target_mib: int, flags: list[str]) -> Result:
    """Serve the model in a process of its own, in which ``target_mib`` are free."""
    command = [sys.executable, __file__, "--model", str(model), "--device", device, "--child", str(target_mib), *flags]
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as stack:
        free_gpu = stack.enter_context(taken_gpu(target_mib)) if device == "gpu" else None
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        timer = threading.Timer(LIMIT_S, child.kill)
        stack.callback(timer.cancel)
        timer.start()
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            line = next((text for text in child.stdout if text.startswith('{"choice"')), None)  # not a line of the log
            free_mib = free_gpu() / MIB if free_gpu is not None else 0.0
            child.stdin.close()
        if timer.finished.is_set() and child.returncode == -signal.SIGKILL:
            return Result(target_mib, f"not done after {LIMIT_S:g} s")
        if line and not child.returncode:
            result = Result(target_mib, "ok", **json.loads(line))
            return result if free_gpu is None else attrs.evolve(result, taken_mib=result.free_mib - free_mib)
        errors.seek(0)
        reasons = [line for line in errors.read().splitlines() if "Error: " in line]
        return Result(target_mib, reasons[-1].strip(" |") if reasons else f"exit code {child.returncode}")


def limit_ram(target_mib: int, kind: str) -> None:
    """Let this process and each of its children allocate ``target_mib`` more than it has."""
    memory = psutil.Process().memory_info()
    which, used = (resource.RLIMIT_AS, memory.vms) if kind == "address-space" else (resource.RLIMIT_DATA, memory.data)
    resource.setrlimit(which, (used + target_mib * MIB,) * 2)


@contextlib.contextmanager
def taken_gpu(target_mib: int) -> Iterator[Callable[[], int]]:
    """A process that takes memory of the first NVIDIA GPU until ``target_mib`` are free; yields a look at what is free."""
    command = [sys.executable, __file__, "--take", str(target_mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if (line := process.stdout.readline().strip()) != "taken":
                raise click.ClickException(f"the memory of the GPU cannot be taken: {line or 'no libcuda'}")
            yield lambda: int(asked(process, "free"))
        finally:
            assert process.stdin is not None
            process.stdin.close()


def asked(process: subprocess.Popen[str], question: str) -> str:
    """The answer of a process, one line for one line."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(question, file=process.stdin, flush=True)
    return process.stdout.readline()


def take_gpu(target_mib: int) -> None:
    """Take memory of the first GPU until ``target_mib`` are free, and hold it until standard input ends; answer each line with what is free, in bytes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise click.ClickException(f"{name} returned {code}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    while True:
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        surplus = free.value - target_mib * MIB
        if surplus < 4 * MIB:
            break
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(min(surplus, 4096 * MIB)))
    print("taken", flush=True)
    for _ in sys.stdin:
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        print(free.value, flush=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__.split("\n\n")[0])
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file.")
@click.option(
    "--shape", default="16x1024x16x4x2816", show_default=True, help=f"Of a random model: {', '.join(SHAPES)}."
)
@click.option("--device", type=click.Choice(["ram", "gpu"]), default="ram", show_default=True)
@click.option("--free", default="400,600,800,1200,2000", show_default=True, help="Steps: MiB that are free.")
@click.option(
    "--limit",
    type=click.Choice(["data", "address-space"]),
    default="data",
    show_default=True,
    help="How the machine's memory is limited.",
)
@click.option("--fill", type=click.IntRange(1), default=512, show_default=True, help="Tokens of each sequence.")
@click.option("--full", is_flag=True, help="Fill one sequence to its end, which takes its time on a CPU.")
@click.option("--parallel", type=click.IntRange(1), default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a row for each step.")
@click.option("--child", type=int, hidden=True)
@click.option("--take", type=int, hidden=True)
def main(
    model: Path | None,
    shape: str,
    device: str,
    free: str,
    limit: str,
    fill: int,
    full: bool,
    parallel: int,
    as_json: bool,
    csv_file: Path | None,
    child: int | None,
    take: int | None,
) -> None:
    if take is not None:
        take_gpu(take)
        return
    if child is not None:
        assert model is not None
        if device == "ram":
            limit_ram(child, limit)
        settings: dict[str, Any] = {"parallel": parallel, "threads": 0 if device == "gpu" else 1}
        if device == "ram":
            settings["gpu_layers"] = 0
        else:
            settings["devices"] = ("CUDA0",)  # whose memory is taken
        trio.run(serve, model, device, fill, full, settings)
        return
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "random.gguf"
            make_model(model, parse_shape(shape), "q8_0", ctx=32_768)
        if not as_json:
            for line in machine():
                click.echo(line)
            click.echo(f"model     {model.name}, {model.stat().st_size / MIB:.0f} MiB\n")
            click.echo(f"| {'free':>6} | {'found':>6} | {'predicted':>9} | {'taken':>6} | used  | choice |")
            click.echo("|-------:|-------:|----------:|-------:|------:|---|")
        flags = ["--limit", limit, "--fill", str(fill), "--parallel", str(parallel), *(["--full"] if full else [])]
        results = []
        from comparison import RunsFile  # the child needs none of its imports

        file = RunsFile(csv_file, [*(field.name for field in attrs.fields(Result)), "used"])
        for target in map(int, free.split(",")):
            result = step(model, device, target, flags)
            results.append(result)
            file.add(*attrs.astuple(result), result.used)
            if not as_json:
                what = f"{result.choice}; {result.why}" if result.outcome == "ok" else result.outcome
                click.echo(
                    f"| {target:>6} | {result.free_mib:>6.0f} | {result.predicted_mib:>9.0f} | {result.taken_mib:>6.0f} | "
                    f"{result.used:>4.0%} | {what} |"
                )
        if as_json:
            click.echo(json.dumps([{**attrs.asdict(result), "used": result.used} for result in results]))


if __name__ == "__main__":
    main()
