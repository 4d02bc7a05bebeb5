"""What a model computes on, in words, and what is wrong where a GPU stays unused."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from tests.support.cases import all_cases
from uma_trio.config import Model
from uma_trio.daemon.engines.loaded import warn_without_gpu
from uma_trio.engine_link.devices import (
    Device,
    DeviceMemory,
    Devices,
    MachineGpu,
    layers_on_gpu,
    memory_by_device,
    split_in_words,
)

GIB = 1 << 30
CPU = Device("CPU", "AMD EPYC", "cpu", 60 * GIB, 64 * GIB)
H100 = Device("CUDA0", "NVIDIA H100 80GB HBM3", "gpu", 60 * GIB, 80 * GIB)
SECOND = Device("CUDA1", "NVIDIA H100 80GB HBM3", "gpu", 5 * GIB, 80 * GIB)
APPLE = Device("MTL0", "Apple M3", "igpu")
NVIDIA = MachineGpu("an NVIDIA GPU", "run ./build_llama.sh --backend cuda")


@all_cases(
    ("devices", "words"),
    [
        (
            Devices(backend="cuda", found=(H100, CPU), machine_gpu=NVIDIA, layers_on_gpu=33, n_layers=33),
            "CUDA0 (NVIDIA H100 80GB HBM3, 60.0 GiB of 80.0 GiB free), with 33 of 33 layers",
        ),
        (
            Devices(backend="cuda", found=(H100, SECOND, CPU), layers_on_gpu=12, n_layers=33),
            "CUDA0 (NVIDIA H100 80GB HBM3, 60.0 GiB of 80.0 GiB free), "
            "CUDA1 (NVIDIA H100 80GB HBM3, 5,120 MiB of 80.0 GiB free), with 12 of 33 layers",
        ),
        (
            Devices(backend="cuda", found=(H100, SECOND, CPU), layers_on_gpu=33, n_layers=33, used=("CUDA1",)),
            "CUDA1 (NVIDIA H100 80GB HBM3, 5,120 MiB of 80.0 GiB free), with 33 of 33 layers",
        ),
        (
            Devices(
                backend="metal",
                found=(APPLE, CPU),
                layers_on_gpu=3,
                n_layers=9,
                used=("MTL0",),
                split="split by layer 3:1",
            ),
            "MTL0 (Apple M3), with 3 of 9 layers, split by layer 3:1",
        ),
        (
            Devices(backend="metal", found=(APPLE, CPU), layers_on_gpu=0, n_layers=33, used=()),
            "CPU only: devices is none; unused: MTL0 (Apple M3)",
        ),
        (Devices(backend="metal", found=(APPLE, CPU)), "MTL0 (Apple M3)"),
        (
            Devices(backend="metal", found=(APPLE, CPU), unused_plugins=("a.so: no driver", "b.so: no device")),
            "MTL0 (Apple M3); not used: a.so: no driver; not used: b.so: no device",
        ),
        (
            Devices(backend="metal", found=(APPLE, CPU), layers_on_gpu=0, n_layers=33),
            "CPU only: gpu_layers is 0; unused: MTL0 (Apple M3)",
        ),
        (Devices(backend="cpu", found=(CPU,)), "CPU only (AMD EPYC): built without a GPU backend"),
        (
            Devices(backend="cpu", found=(CPU,), machine_gpu=NVIDIA, layers_on_gpu=0, n_layers=33),
            "CPU only (AMD EPYC): built without a GPU backend; this machine has an NVIDIA GPU",
        ),
        (Devices(backend="cuda", found=(CPU,)), "CPU only (AMD EPYC): built for CUDA, which finds no GPU"),
        (Devices(backend="cpu", found=()), "CPU only: built without a GPU backend"),
    ],
)
def test_what_a_model_computes_on(devices: Devices, words: str) -> None:
    assert str(devices) == words


@all_cases(
    ("devices", "fix"),
    [
        (Devices(backend="cuda", found=(H100, CPU), machine_gpu=NVIDIA), None),
        (Devices(backend="cuda", found=(H100, CPU), layers_on_gpu=0), None),
        (Devices(backend="cpu", found=(CPU,)), None),
        (Devices(backend="vulkan", found=(CPU,)), None),
        (Devices(backend="cpu", found=(CPU,), machine_gpu=NVIDIA), "run ./build_llama.sh --backend cuda"),
        (Devices(backend="cuda", found=(CPU,)), "nvidia-smi must list the GPU"),
        (Devices(backend="vulkan", found=(CPU,), machine_gpu=NVIDIA), "vulkaninfo --summary must list the GPU"),
    ],
)
def test_how_to_use_a_gpu_that_is_not_used(devices: Devices, fix: str | None) -> None:
    if fix is None:
        assert devices.fix is None
    else:
        assert (devices.fix or "").startswith(fix)


@all_cases(("setting", "n_layers"), [(-1, 33), (0, 0), (10, 10), (33, 33), (99, 33)])
def test_layers_are_counted_as_llama_cpp_does(setting: int, n_layers: int) -> None:
    assert layers_on_gpu(setting, n_layer=32) == n_layers


@all_cases(
    ("settings", "words"),
    [
        ({}, ""),
        ({"split_mode": "none"}, ""),
        ({"split_mode": "tensor"}, "split by tensor"),
        ({"tensor_split": (3.0, 1.5)}, "split by layer 3:1.5"),
        ({"n_cpu_moe": 1}, "experts of 1 layer on the CPU"),
        (
            {"split_mode": "tensor", "tensor_split": (1.0, 2.0), "n_cpu_moe": 4, "override_tensor": ("a=CPU", "b=CPU")},
            "split by tensor 1:2, experts of 4 layers on the CPU, override_tensor a=CPU b=CPU",
        ),
    ],
)
def test_how_a_model_is_divided(settings: dict[str, Any], words: str) -> None:
    assert split_in_words(Model(**settings)) == words


def test_memory_is_summed_up_by_device() -> None:
    buffers = [
        ("CUDA0", "model", 5), ("CPU", "model", 3), ("CUDA0", "KV", 7), ("CUDA0", "RS", 2), ("CUDA0", "compute", 1),
        ("CPU", "output", 4), ("CUDA0", "model", 5),
    ]  # fmt: skip
    cpu, gpu = memory_by_device(buffers, [CPU, H100, SECOND])
    assert cpu == DeviceMemory("CPU", weights=3, compute=4, free=60 * GIB, capacity=64 * GIB)
    assert gpu.snapshot() == {
        "weights_bytes": 10, "kv_cache_bytes": 9, "compute_bytes": 1, "free_bytes": 60 * GIB, "total_bytes": 80 * GIB,
    }  # fmt: skip
    assert gpu.total == 20
    assert str(DeviceMemory("CUDA0", 3 << 20, 2 << 20, 1 << 20)) == (
        "CUDA0 6 MiB (weights 3 MiB, KV cache 2 MiB, compute 1 MiB)"
    )


@pytest.mark.parametrize(
    ("settings", "warns"), [(Model(), True), (Model(devices=("none",)), False), (Model(gpu_layers=0), False)]
)
def test_a_gpu_that_nobody_wants_is_no_warning(settings: Model, warns: bool) -> None:
    with structlog.testing.capture_logs() as logged:
        warn_without_gpu(settings, Devices(backend="cpu", found=(CPU,), machine_gpu=NVIDIA))
    assert [line["event"] for line in logged] == ["the model runs without a GPU"] * warns
