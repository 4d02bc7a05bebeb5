"""What holds on a CPU alone, and what the tests ask of a GPU in its place.

Kernels of a GPU add in an order that depends on the rows of a call and on the place of a sequence in the KV cache, and
many of them add in half precision. So equal work gives equal bits on a CPU, and nearly equal numbers on a GPU.

A test whose subject is the CPU has the marker ``cpu`` with its reason: ``tests/conftest.py`` skips it if the library has
a GPU.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_abi.locations import library_directory
from tests.support.run import locked, run_folder

FIRST_TOKENS = 4
"""How many tokens of a model with random weights are the same on a GPU. After some hundred tokens, two were nearly as
likely; a wrong KV cache changes the first one."""

SURE = 0.5
"""By how much the best token is more likely than the second one, as logarithms, where rounding on a GPU changes nothing."""

ROUNDING = 0.018
"""The length of the difference of two rows of logits on a GPU, as a share of their length. A recurrent state that is wrong
by one token has 0.021."""

_ASK = """
import llama_abi
names = [each.name for each in llama_abi.load().devices() if each.type is not llama_abi.DeviceType.CPU]
print(*names[:1])
"""


@functools.cache
def gpu() -> str:
    """The first GPU that the library finds, such as ``Vulkan0``; empty if there is none.

    Another process asks: drivers do not survive the fork of one that has opened them.
    """
    stamp = library_directory() / "stamp.json"
    if not stamp.exists() or json.loads(stamp.read_text())["backend"] == "cpu":
        return ""
    found = run_folder() / "gpu"
    with locked("gpu"):
        if not found.exists():
            ended = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=120)
            assert ended.returncode == 0, ended.stderr
            found.write_text(ended.stdout.strip())
        return found.read_text()


def tolerance(cpu: float, *, on_gpu: float) -> float:
    """The largest difference between two ways to compute the same."""
    return on_gpu if gpu() else cpu


def same_logits(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """Whether logits after the same tokens are equal; on a GPU, whether they are as near as rounding lets them be."""
    return bool(np.linalg.norm(one - other) <= tolerance(0.0, on_gpu=ROUNDING) * np.linalg.norm(one))


def n_sure(events: Sequence[dict[str, Any]]) -> int:
    """How many of the first tokens of an answer with ``logprobs`` of 2 or more are much likelier than all others."""
    tokens = [event["top_logprobs"] for event in events if "top_logprobs" in event]
    logprobs = [[each["logprob"] for each in top] for top in tokens]
    return next((n for n, (best, second, *_) in enumerate(logprobs) if best - second < SURE), len(tokens))


def agree(one: Sequence[object], other: Sequence[object], *, n: int = FIRST_TOKENS) -> bool:
    """Whether two ways to compute an answer have the same tokens, or letters; on a GPU, its first ``n``."""
    return [*one][:n] == [*other][:n] if gpu() else [*one] == [*other]
