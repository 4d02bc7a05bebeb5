"""What a model computes on, in words, and what is wrong where a GPU stays unused."""

from __future__ import annotations

import pytest

from uma_trio.engine.devices import Device, Devices, MachineGpu, layers_on_gpu

GIB = 1 << 30
CPU = Device("CPU", "AMD EPYC", "cpu", 60 * GIB, 64 * GIB)
H100 = Device("CUDA0", "NVIDIA H100 80GB HBM3", "gpu", 60 * GIB, 80 * GIB)
SECOND = Device("CUDA1", "NVIDIA H100 80GB HBM3", "gpu", 5 * GIB, 80 * GIB)
APPLE = Device("MTL0", "Apple M3", "igpu")
NVIDIA = MachineGpu("an NVIDIA GPU", "run ./build_llama.sh --backend cuda")


@pytest.mark.parametrize(
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
        (Devices(backend="metal", found=(APPLE, CPU)), "MTL0 (Apple M3)"),
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(("setting", "n_layers"), [(-1, 33), (0, 0), (10, 10), (33, 33), (99, 33)])
def test_layers_are_counted_as_llama_cpp_does(setting: int, n_layers: int) -> None:
    assert layers_on_gpu(setting, n_layer=32) == n_layers
