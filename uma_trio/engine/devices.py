"""What a model computes on, in words; and a GPU of this machine that the library does not use."""

from __future__ import annotations

from typing import Final

import msgspec

MIB: Final = 1 << 20

GPU_KINDS: Final = ("gpu", "igpu")

BACKENDS: Final = {"cuda": "CUDA", "hip": "ROCm", "vulkan": "Vulkan", "metal": "Metal"}

NO_GPU_BACKEND: Final = "built without a GPU backend"

NVIDIA_SEES: Final = "nvidia-smi must list the GPU; in a container, start it with access to the GPU (--gpus all)"
TOOL_SEES: Final = {
    "cuda": NVIDIA_SEES,
    "hip": "rocminfo must list the GPU, and this user must be in the groups render and video",
    "vulkan": "vulkaninfo --summary must list the GPU",
    "metal": "run outside of a virtual machine",
}
"""What to check where a library finds no GPU, by backend."""


class Device(msgspec.Struct, frozen=True):
    """A compute device of the library."""

    name: str
    description: str
    kind: str
    """``cpu``, ``gpu``, ``igpu``, ``accel`` or ``meta``."""
    memory_free: int = 0
    """Bytes.  0 if the backend does not report it."""
    memory_total: int = 0
    """Bytes."""

    @property
    def is_gpu(self) -> bool:
        return self.kind in GPU_KINDS

    def __str__(self) -> str:
        memory = f", {size(self.memory_free)} of {size(self.memory_total)} free" if self.memory_total else ""
        return f"{self.name} ({self.description.strip()}{memory})"


class MachineGpu(msgspec.Struct, frozen=True):
    """A GPU of this machine, whether the library uses it or not."""

    name: str
    """Such as "an NVIDIA GPU (NVIDIA L4)"."""
    fix: str
    """What to install and to run for a library that computes on it."""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What a library computes on, and how much of a model is there."""

    backend: str
    """What the library was built for; see ``llama_abi.Stamp``."""
    found: tuple[Device, ...]
    """The library's devices, with the memory that is free after the model was loaded, if one was."""
    machine_gpu: MachineGpu | None = None
    layers_on_gpu: int | None = None
    """``None`` without a model."""
    n_layers: int = 0
    """The model's layers, with the output as a layer of its own, as llama.cpp counts."""

    def __str__(self) -> str:
        gpus = [device for device in self.found if device.is_gpu]
        if gpus and self.layers_on_gpu != 0:
            layers = "" if self.layers_on_gpu is None else f", with {self.layers_on_gpu} of {self.n_layers} layers"
            return ", ".join(map(str, gpus)) + layers
        if gpus:
            return f"CPU only: gpu_layers is 0; unused: {', '.join(map(str, gpus))}"
        cpu = next((f" ({device.description.strip()})" for device in self.found if device.kind == "cpu"), "")
        built = (
            f"built for {BACKENDS[self.backend]}, which finds no GPU" if self.backend in BACKENDS else NO_GPU_BACKEND
        )
        but = f"; this machine has {self.machine_gpu.name}" if self.machine_gpu else ""
        return f"CPU only{cpu}: {built}{but}"

    @property
    def fix(self) -> str | None:
        """How to use a GPU that stays unused though nobody asked for that; ``None`` if there is none."""
        if any(device.is_gpu for device in self.found):
            return None
        if self.backend in BACKENDS and (self.machine_gpu or self.backend != "vulkan"):
            return TOOL_SEES[self.backend]  # Vulkan is built where its headers are, also without a GPU
        return self.machine_gpu.fix if self.machine_gpu else None


def layers_on_gpu(devices: tuple[Device, ...], gpu_layers: int, n_layer: int) -> int:
    """How many layers llama.cpp keeps on GPUs.

    Args:
        gpu_layers: the setting; -1 for all.
        n_layer: of the model, without its output.
    """
    if not any(device.is_gpu for device in devices):
        return 0
    return n_layer + 1 if gpu_layers < 0 else min(gpu_layers, n_layer + 1)


def size(n: int) -> str:
    """Format ``n`` bytes for people."""
    return f"{n / MIB:,.0f} MiB" if n < 10 * 1024 * MIB else f"{n / MIB / 1024:,.1f} GiB"
