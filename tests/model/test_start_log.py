"""What the log of a start says about devices and context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.real_daemon import real_daemon
from uma_trio.config import Model
from uma_trio.engine.llama import LlamaEngine
from uma_trio.models.packaged import EMBEDDED


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Any:
    def run(*flags: str) -> dict[str, dict[str, Any]]:
        with real_daemon(*flags, folder=tmp_path) as daemon:
            pass
        return {record["event"]: record for record in daemon.log_lines()}

    return run


def test_a_start_names_its_device_and_the_context_of_a_request(start: Any) -> None:
    records = start("--ctx", "4096", "--kv-unified", "off")
    assert records["device"]["device"]
    assert (records["KV cache"]["ctx"], records["KV cache"]["ctx_per_request"]) == (4096, 512)
    context = records["context"]
    assert context["level"] == "warning"
    assert context["context"].startswith("512 tokens for a request")
    assert context["hint"] == "--ctx 65536, --kv-unified on --ctx 8192 or --parallel 1 --ctx 4096 gives a request more"


def test_a_start_with_the_default_context_has_nothing_to_say(start: Any) -> None:
    assert "context" not in start("--ctx", "0")


def test_the_engine_counts_its_layers(library: Path) -> None:
    engine = LlamaEngine(EMBEDDED, Model(parallel=1, ctx=512, layout_trial_s=0, gpu_layers=0))
    try:
        devices = engine.devices()
    finally:
        engine.close()
    assert devices.found
    assert (devices.layers_on_gpu, devices.n_layers) == (0, engine.info.n_layer + 1)
