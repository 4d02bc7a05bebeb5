"""Devices of a model, end to end: two RPC servers on this machine are two devices of a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import llama_abi
from tests.support.commands import environment, run_command, run_process
from tests.support.profile import sampled, thorough
from tests.support.random_adapters import random_adapter
from tests.support.random_models import random_model
from tests.support.real_daemon import real_daemon
from tests.support.rpc_server import rpc_server
from uma_trio.models.gguf_check import check_gguf
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.usefixtures("library")

QUESTIONS = ["What is the capital of France?", "Count from 3 to 9.", "Spell the word river."]
SMALL = ("--parallel", "3", "--ctx", "3072")
EXPERTS_OF_TWO = r"blk\.[01]\.ffn_.*_exps=CPU"


@pytest.mark.parametrize(
    ("kv_unified", "flash_attn", "devices", "expected"),
    [
        (False, "off", (), "longest"),
        (False, "off", ("CUDA0",), "longest"),
        (False, "auto", ("CUDA0", "CUDA1"), "sequence"),
        (True, "auto", ("CUDA0", "CUDA1"), "cache"),
        (True, "on", ("ROCm0",), "cache"),
        (True, "on", ("Vulkan0",), "sequence"),
        (True, "auto", (), "sequence"),
        (True, "off", (), "cache"),
    ],
)
def test_layout_and_device_say_which_cells_attention_scans(
    kv_unified: bool, flash_attn: str, devices: tuple[str, ...], expected: str
) -> None:
    from uma_trio.engine.layout_choice import attention_scan

    options = llama_abi.ContextOptions(kv_unified=kv_unified, flash_attn=flash_attn)
    assert attention_scan(options, devices).value == expected


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """The setting ``rpc`` for two servers."""
    with rpc_server() as first, rpc_server() as second:
        yield f"{first},{second}"


def served(
    *flags: str, model: Path = EMBEDDED, fields: dict[str, Any] | None = None
) -> tuple[list[str], dict[str, Any], str]:
    """Greedy answers, the metrics of the devices and the log's line about them."""
    with real_daemon("--model", str(model), *SMALL, *flags) as daemon:
        asked = {"temperature": 0, "max_tokens": 24, **(fields or {})}
        texts = [daemon.ask(prompt=each, **asked).text for each in QUESTIONS]
        [line] = [each for each in daemon.log_lines() if each["event"] == "device"]
        return texts, daemon.metrics()["devices"], f"{line['device']}; {line['memory']}"


@pytest.fixture(scope="module")
def on_cpu() -> list[str]:
    return served("--devices", "none")[0]


@pytest.mark.parametrize(
    ("flags", "used", "words"),
    [
        thorough((), ["CPU", "RPC0", "RPC1"], "with 10 of 10 layers"),
        thorough(("--tensor-split", "3,1"), ["CPU", "RPC0", "RPC1"], "split by layer 3:1"),
        thorough(("--devices", "RPC1"), ["CPU", "RPC1"], "RPC1 (127.0.0.1:"),
        (("--split-mode", "none", "--main-gpu", "1", "--gpu-layers", "4"), ["CPU", "RPC1"], "with 4 of 10 layers"),
        thorough(("--split-mode", "tensor"), ["CPU", "RPC0", "RPC1"], "split by tensor"),
        (("--override-tensor", r"blk\.[0-4]\.ffn=CPU"), ["CPU", "RPC0", "RPC1"], "override_tensor blk"),
        thorough(("--devices", "none"), ["CPU"], "CPU only: devices is none; unused: RPC0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_text_is_that_of_the_cpu_and_log_and_metrics_have_the_devices(
    servers: str, on_cpu: list[str], flags: tuple[str, ...], used: list[str], words: str
) -> None:
    texts, devices, line = served("--rpc", servers, "--devices", "RPC0,RPC1", *flags)
    assert texts == on_cpu
    assert sorted(devices) == used
    assert words in line
    for name in used:
        assert devices[name]["weights_bytes"] > 0
        assert f"{name} " in line
    kv = {name: devices[name]["kv_cache_bytes"] for name in used if name != "CPU"}
    if "3,1" in flags:
        assert kv["RPC0"] > 2 * kv["RPC1"]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["layer", thorough("tensor")])
def test_drafts_come_from_the_same_devices(servers: str, on_cpu: list[str], mode: str) -> None:
    texts, devices, _ = served("--rpc", servers, "--split-mode", mode, "--draft-model", "embedded-draft")
    assert texts == on_cpu
    assert devices["RPC0"]["weights_bytes"] > 0 < devices["RPC1"]["weights_bytes"]


@pytest.mark.thorough
def test_adapters_are_where_the_layers_are(servers: str) -> None:
    flags = ("--adapter", f"a={random_adapter(EMBEDDED, 1)}")
    chosen = {"adapters": [{"name": "a", "scale": 1.0}]}
    assert served("--rpc", servers, *flags, fields=chosen)[0] == served(*flags, fields=chosen)[0]


def turns(folder: Path, *flags: str) -> tuple[list[str], list[list[float]]]:
    """Texts of a session that goes on after a restart, and embeddings."""
    texts = []
    for question in ("What is the capital of France? " + "Please answer. " * 30, "And of Spain?"):
        with real_daemon(*SMALL, *flags, folder=folder) as daemon:
            asked = {"temperature": 0, "max_tokens": 24, "session_id": "s"}
            texts.append(daemon.ask(messages=[{"role": "user", "content": question}], **asked).text)
            with daemon.wire(timeout_s=60) as wire:
                wire.send(type="embed", input=["a fox in the forest", "Lima"])
                embedded = wire.receive()
    assert embedded is not None
    return texts, embedded["embeddings"]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [thorough("layer"), "tensor"])
def test_sessions_and_embeddings_are_those_of_the_cpu(servers: str, tmp_path: Path, mode: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected, vectors = turns(tmp_path / "a")
    texts, found = turns(tmp_path / "b", "--rpc", servers, "--split-mode", mode)
    assert texts == expected
    for one, other in zip(vectors, found, strict=True):
        assert one == pytest.approx(other, abs=0.02)


@pytest.mark.thorough
def test_experts_stay_in_the_machines_memory(servers: str) -> None:
    model = random_model("tiny-moe")
    sizes = check_gguf(model).sizes
    experts = sum(n for name, n in sizes.tensors.items() if name.startswith(("blk.0.", "blk.1.")) and "_exps" in name)
    plain, before, _ = served("--rpc", servers, "--devices", "RPC0", model=model)
    kept, after, line = served("--rpc", servers, "--devices", "RPC0", "--n-cpu-moe", "2", model=model)
    moved, same, _ = served("--rpc", servers, "--devices", "RPC0", "--override-tensor", EXPERTS_OF_TWO, model=model)
    assert plain == kept == moved
    assert before["RPC0"]["weights_bytes"] - after["RPC0"]["weights_bytes"] == pytest.approx(experts, rel=0.1)
    assert after == {name: {**each, "free_bytes": after[name]["free_bytes"]} for name, each in same.items()}
    assert "experts of 2 layers on the CPU" in line


@pytest.mark.parametrize(
    ("flags", "why"),
    sampled(
        [
            (("--devices", "CUDA7"), "there is no device CUDA7; there are "),
            (("--tensor-split", "1,1,1", "--devices", "RPC0,RPC1"), "tensor_split has 3 shares, and there are RPC0"),
            (
                ("--split-mode", "row"),
                "which llama.cpp's backend of RPC0, RPC1 does not have; set split_mode to layer or tensor",
            ),
            (("--split-mode", "none", "--main-gpu", "9"), "main_gpu is 9, and there are "),
            (
                ("--override-tensor", "ffn=RPC1", "--devices", "RPC0"),
                "on RPC1, where the model is not; write one of CPU, RPC0",
            ),
        ],
        3,
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_does_not_go_together_is_said_before_anything_is_loaded(
    servers: str, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    ended = run_process("serve", "--socket", tmp_path / "s", "--rpc", servers, *flags)
    assert ended.returncode == 1
    assert why in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.thorough
def test_a_server_that_nobody_started(tmp_path: Path) -> None:
    ended = run_process("serve", "--socket", tmp_path / "s", "--rpc", "127.0.0.1:1")
    assert ended.returncode == 1
    assert "no RPC server answers at 127.0.0.1:1 (Connection refused); start llama.cpp's rpc-server" in ended.stderr


def test_the_doctor_says_what_the_model_takes_of_each_device(servers: str, tmp_path: Path) -> None:
    variables = {
        "UMA_RPC": servers,
        "UMA_DEVICES": "RPC0,RPC1",
        "UMA_TENSOR_SPLIT": "3,1",
        "UMA_PARALLEL": "2",
        "UMA_CTX": "2048",
    }
    ended = run_command(["doctor", "--json", "--socket", tmp_path / "s"], environment(**variables))
    checks = {each["name"]: each for each in json.loads(ended.stdout)["checks"]}
    assert "split by layer 3:1" in checks["devices"]["message"]
    assert "RPC0" in checks["placement"]["message"]
    assert "KV cache" in checks["placement"]["message"]
    assert "10 of 10 layers on GPU" in checks["fit"]["message"]


@pytest.mark.thorough
def test_models_of_one_daemon_have_their_own_devices(servers: str, on_cpu: list[str], tmp_path: Path) -> None:
    first, second = servers.split(",")
    file = tmp_path / "uma.yaml"
    file.write_text(
        f"model: {{parallel: 2, ctx: 2048}}\nmodels:\n"
        f"  - {{model: '{EMBEDDED}', name: a, rpc: ['{first}']}}\n"
        f"  - {{model: '{EMBEDDED}', name: b, rpc: ['{second}'], gpu_layers: 3}}\n"
    )
    with real_daemon("--config", str(file), folder=tmp_path) as daemon:
        asked = {"temperature": 0, "max_tokens": 24}
        for name in ("a", "b"):
            assert [daemon.ask(prompt=each, model=name, **asked).text for each in QUESTIONS] == on_cpu
        metrics = daemon.metrics()
    whole, part = metrics["devices"], metrics["models"]["b"]["metrics"]["devices"]
    assert whole["RPC0"]["weights_bytes"] > part["RPC0"]["weights_bytes"] > 0


def test_an_engine_that_has_died_finds_its_devices_again(on_cpu: list[str]) -> None:
    with rpc_server() as endpoint, real_daemon(*SMALL, "--rpc", endpoint) as daemon:
        assert daemon.ask(prompt=QUESTIONS[0], temperature=0, max_tokens=24).text == on_cpu[0]
        psutil.Process(daemon.metrics()["engine"]["pid"]).kill()
        assert daemon.ask(prompt=QUESTIONS[1], temperature=0, max_tokens=24).text == on_cpu[1]
        assert daemon.metrics()["engine"]["restarts_total"] == 1
        assert daemon.metrics()["devices"]["RPC0"]["kv_cache_bytes"] > 0
