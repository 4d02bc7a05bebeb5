"""The benchmarks of ``uma-trio bench --gpu``, what they need, and their results as one file."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from suite_runs import Bench, Outcome, Settings

from uma_trio.engine_link.devices import Devices
from uma_trio.files import replace_text
from uma_trio.processes.interpreter import PYTHON, package_environment

ALL_ON_GPU: Final = "--rival-flags '-ngl 999'"
MODEL: Final = "python benches/make_model.py --shape 7b --quant q8_0 --ctx 32768 --out 7b.gguf"
"""What makes the model of the published figures."""
RESULTS: Final = "results.json"
DEVICES_S: Final = 120.0
"""How long a driver may take to say which GPUs there are."""

GPU_BENCHES: Final = (
    Bench(
        name="mixed", title="Wall time against p99", script="mixed_load.py",
        about="Eight streams are running when six prompts of 4,000 words arrive. Targets of 18 and 30 ms and the default, "
        "against batch sizes of llama-server. Is any setting of the rival better in both?",
        full="--streams 8 --tokens 400 --long 6 --long-words 4000 --long-every 0.3 --parallel 14 --ctx 114688 "
        "--rival-batch 2048,512,256,128 --repeat 3 --ours '--target-itl-ms 18' --ours '--target-itl-ms 30' --ours ''",
        quick="--streams 2 --tokens 60 --long 1 --long-words 120 --long-after 10 --rival-batch 2048,64 "
        "--ours '--target-itl-ms 18' --ours ''",
        rival=(f"--rival llama-server {ALL_ON_GPU}", ""), needs_rival=True, has_plot=True,
    ),
    Bench(
        name="streams", title="Plain streams", script="throughput.py",
        about="Tokens per second of streams that start together, with default settings.",
        full="--streams 8,32 --tokens 300 --prompt-words 100 --repeat 3",
        quick="--streams 2 --tokens 16 --prompt-words 10", rival=(f"--rivals {ALL_ON_GPU}", "--no-rivals"), serve="--ctx 0",
    ),
    Bench(
        name="stairs", title="Ticks by their rows", script="stairs.py",
        about="Where are the steps in the cost of a tick, how long does a start measure them, and how well are ticks predicted?",
        full="--kv-unified on", quick="--ticks 40 --kv-unified on", rival=None,
    ),
    Bench(
        name="contexts", title="Long contexts", script="throughput.py",
        about="Eight streams, each with 14,000 words in a context of 16,384 tokens.",
        full="--streams 8 --tokens 256 --prompt-words 14000 --room 16384 --repeat 2",
        quick="--streams 2 --tokens 16 --prompt-words 100 --room 1024", rival=(f"--rivals {ALL_ON_GPU}", "--no-rivals"),
    ),
    Bench(
        name="layers", title="Several GPUs, each with some of the layers", script="throughput.py",
        about="Tokens per second of plain streams with split_mode layer.",
        full="--streams 8,32 --tokens 300 --prompt-words 100 --repeat 2",
        quick="--streams 2 --tokens 16 --prompt-words 10",
        rival=("--rivals --rival-flags '-ngl 999 -sm layer'", "--no-rivals"), serve="--split-mode layer", min_gpus=2,
    ),
    Bench(
        name="tensors", title="Several GPUs, each with a part of every layer", script="throughput.py",
        about="The same with split_mode tensor.",
        full="--streams 8,32 --tokens 300 --prompt-words 100 --repeat 2",
        quick="--streams 2 --tokens 16 --prompt-words 10",
        rival=("--rivals --rival-flags '-ngl 999 -sm tensor'", "--no-rivals"), serve="--split-mode tensor", min_gpus=2,
    ),
    Bench(
        name="restore", title="Sessions that continue", script="sessions.py",
        about="Time to the first token of a session's next turn, from the KV cache, and from disk after a restart.",
        full="--tokens 8000 --repeat 3", quick="--tokens 200 --repeat 1", rival=None,
    ),
    Bench(
        name="gap", title="The engine in its own process and in a thread", script="engine_modes.py",
        about="How long does the GPU wait for the daemon between two ticks?",
        full="--streams 8,32 --rounds 3", quick="--streams 2 --tokens 16 --rounds 1", rival=None,
    ),
    Bench(
        name="fit", title="Less and less memory", script="fit.py",
        about="Another process takes memory of the GPU. Is the model still served, and how much of the rest is used?",
        full="--device gpu --full --free 24000,16000,12000,8000,6000,4000",
        quick="--shape 2x64 --parallel 2 --fill 16 --free 1200", rival=None, threads=False,
    ),
    Bench(
        name="adapters", title="Streams with several LoRA adapters", script="adapters.py",
        about="What does a tick cost whose streams have different adapters?",
        full="--streams 16 --sets 1,2,4 --repeat 2", quick="--streams 2 --sets 1,2 --tokens 16 --repeat 1", rival=None,
    ),
    Bench(
        name="constraints", title="Constrained output", script="constrained.py",
        about="What does a JSON schema cost, and how soon is a new one compiled?",
        full="--streams 1,8 --repeat 2", quick="--streams 2 --tokens 16 --properties 5 --repeat 1",
        rival=(f"--rival {ALL_ON_GPU}", "--no-rival"),
    ),
)  # fmt: skip
"""The most important first, in case that the time is over before the last one."""

LIST_DEVICES: Final = """
import sys
import msgspec
from uma_trio.engine.inspect import load_library
from uma_trio.engine_link.installed import LibraryProblem
try:
    sys.stdout.buffer.write(msgspec.json.encode(load_library().devices))
except LibraryProblem as problem:
    sys.exit(str(problem))
"""


def find_devices() -> Devices | str:
    """What the library finds here, or why it does not say.  Asked in a process of its own, since a driver may crash."""
    try:
        ended = subprocess.run(
            [*PYTHON, "-c", LIST_DEVICES],
            env={**os.environ, **package_environment()},
            capture_output=True,
            timeout=DEVICES_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the library does not say within {DEVICES_S:g} s which devices there are"
    try:
        return msgspec.json.decode(ended.stdout, type=Devices)
    except msgspec.DecodeError:
        last = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return (
            f"the library does not say which devices there are: {''.join(last) or f'it ended with {ended.returncode}'}"
        )


def write_results(settings: Settings, outcomes: Sequence[Outcome], devices: Devices, command: str) -> Path:
    """Write all that is known so far, as a whole file, and return its path."""
    path = settings.out / RESULTS
    results = {
        "command": command,
        "quick": settings.quick,
        "model": "embedded" if settings.model is None else settings.model.name,
        "devices": [msgspec.to_builtins(device) for device in devices.found],
        "steps": [_plain(settings, outcome) for outcome in outcomes],
    }
    replace_text(path, json.dumps(results, indent=1) + "\n")
    return path


def _plain(settings: Settings, outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.bench.name,
        "title": outcome.bench.title,
        "state": outcome.state,
        "duration_s": round(outcome.duration_s, 1),
        "command": outcome.command,
        "rows": _rows(settings.out / f"{outcome.bench.name}.csv"),
    }


def _rows(file: Path) -> list[dict[str, str]]:
    """The complete rows of a CSV file; none if the benchmark did not get that far."""
    try:
        with file.open(newline="") as opened:
            return [row for row in csv.DictReader(opened) if None not in row.values()]
    except FileNotFoundError:
        return []
