"""Another process takes the memory of a GPU in steps; what is chosen then loads, computes and uses most of the rest.

Opt-in: it needs an NVIDIA GPU that nobody else uses, and a library for it.  About two minutes.

    ./build_llama.sh --backend cuda
    UMA_TEST_FIT_GPU=1 pytest tests/gpu/test_fit.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benches" / "fit.py"
STEPS = "6000,4000,3000,2500,2000,1500"


@pytest.mark.skipif("UMA_TEST_FIT_GPU" not in os.environ, reason="set UMA_TEST_FIT_GPU=1 on a machine with an idle GPU")
def test_whatever_is_left_of_the_gpu_is_used() -> None:
    command = [sys.executable, str(BENCH), "--device", "gpu", "--full", "--shape", "1b", "--free", STEPS, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    steps = json.loads(ended.stdout)
    for each in steps:
        assert each["outcome"] == "ok", each
        assert each["taken_mib"] <= each["free_mib"]
        if "no room" in each["why"]:
            assert each["used"] >= 0.85, each
    assert any("no room" in each["why"] for each in steps), "the steps are too large for this model"
