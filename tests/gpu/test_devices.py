"""Devices of a model on real GPUs: the text is the same wherever the weights are, and they are where they were put.

Opt-in, with a library for the GPUs.  With one GPU the tests of two are skipped.

    ./build_llama.sh --backend cuda
    UMA_TEST_GPUS=1 pytest tests/gpu/test_devices.py

``tests/abi/test_placement.py`` and ``tests/model/test_devices.py`` ask the same of RPC servers, without a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import llama_abi
from llama_abi import DeviceType, Placement
from tests.support.placements import Placed, answers
from tests.support.random_models import random_model
from tests.support.real_daemon import real_daemon
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.skipif("UMA_TEST_GPUS" not in os.environ, reason="set UMA_TEST_GPUS=1 on a machine with GPUs")

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def gpus() -> list[llama_abi.Device]:
    """The GPUs that the library finds, asked in another process."""
    _, devices = answers(EMBEDDED, [])
    found = [each for each in devices if each.type in (DeviceType.GPU, DeviceType.IGPU)]
    assert found, "the library finds no GPU: uma-trio doctor says why"
    return found


@pytest.fixture
def two(gpus: list[llama_abi.Device]) -> tuple[llama_abi.Device, llama_abi.Device]:
    if len(gpus) < 2:
        pytest.skip(f"there is one GPU, {gpus[0].name}: run this on a machine with two")
    return gpus[0], gpus[1]


def placed(*placements: Placement, model: Path = EMBEDDED) -> list[Placed]:
    found, _ = answers(model, placements)
    assert [each.error for each in found] == [""] * len(found)
    return found


def test_one_gpu_and_none(gpus: list[llama_abi.Device]) -> None:
    first = gpus[0]
    cpu, one = placed(Placement(devices=()), Placement(devices=(first.name,)))
    assert one.tokens == cpu.tokens
    assert cpu.bytes_on(first.buffer, "model", "KV", "compute") == 0
    assert one.bytes_on(first.buffer, "model") > one.bytes_on(first.buffer, "KV") > 0


def test_experts_stay_in_the_machines_memory(gpus: list[llama_abi.Device]) -> None:
    first = gpus[0]
    experts = (r"^blk\.(0|1)\.ffn_(up|down|gate)_exps", "CPU")
    whole, kept = placed(
        Placement(devices=(first.name,)),
        Placement(devices=(first.name,), overrides=(experts,)),
        model=random_model("tiny-moe"),
    )
    assert kept.bytes_on(first.buffer, "model") < whole.bytes_on(first.buffer, "model")


def test_two_gpus_share_a_model(two: tuple[llama_abi.Device, llama_abi.Device]) -> None:
    first, second = two
    names = (first.name, second.name)
    one, layers, shares, turned, other, parts = placed(
        Placement(devices=(first.name,)),
        Placement(devices=names),
        Placement(devices=names, tensor_split=(3, 1)),
        Placement(devices=names[::-1], tensor_split=(3, 1)),
        Placement(devices=names, split_mode="none", main_gpu=1),
        Placement(devices=names, split_mode="tensor"),
    )
    for each in (layers, shares, turned, other, parts):
        assert each.tokens == one.tokens
    assert layers.bytes_on(first.buffer, "KV") > 0 < layers.bytes_on(second.buffer, "KV")
    assert shares.bytes_on(first.buffer, "KV") > 2 * shares.bytes_on(second.buffer, "KV")
    assert turned.bytes_on(second.buffer, "KV") > 2 * turned.bytes_on(first.buffer, "KV")
    assert other.bytes_on(first.buffer, "model") == 0 < other.bytes_on(second.buffer, "model")


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_a_daemon_on_two_gpus(two: tuple[llama_abi.Device, llama_abi.Device], mode: str) -> None:
    names = [each.name for each in two]
    with real_daemon("--devices", ",".join(names), "--split-mode", mode) as daemon:
        text = daemon.ask(prompt=QUESTION, temperature=0, max_tokens=24).text
        devices = daemon.metrics()["devices"]
    assert "Paris" in text
    for name in names:
        assert devices[name]["weights_bytes"] > 0
        assert devices[name]["kv_cache_bytes"] > 0
        assert 0 < devices[name]["free_bytes"] < devices[name]["total_bytes"]
