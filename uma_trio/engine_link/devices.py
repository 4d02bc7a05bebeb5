"""What a model computes on, in words; and a GPU of this machine that the library does not use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from uma_trio import config

MIB: Final = 1 << 20

CPU_ALONE: Final = ("none",)
"""The setting ``devices`` without any."""

GPU_KINDS: Final = ("gpu", "igpu")

BACKENDS: Final = {"cuda": "CUDA", "hip": "ROCm", "vulkan": "Vulkan", "metal": "Metal"}

NO_GPU_BACKEND: Final = "built without a GPU backend"

MEND_PLUGINS: Final = (
    "install what the plug-in lacks, such as a driver, or uninstall its package; in a container, start it with access to "
    "the GPU (--gpus all)"
)

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


class DeviceMemory(msgspec.Struct, frozen=True):
    """What a model has allocated on a device, in bytes."""

    device: str
    """Its name; ``CPU`` for the machine's own memory."""
    weights: int = 0
    """Weights that are mapped from the file count as well."""
    kv_cache: int = 0
    """KV cache and recurrent states."""
    compute: int = 0
    """Buffers for activations and logits."""
    free: int = 0
    """What was free when the model had been loaded; 0 where the device does not say."""
    capacity: int = 0
    """All memory of the device; likewise."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.compute

    def __str__(self) -> str:
        parts = f"weights {size(self.weights)}, KV cache {size(self.kv_cache)}, compute {size(self.compute)}"
        return f"{self.device} {size(self.total)} ({parts})"

    def snapshot(self) -> dict[str, int]:
        """For the metrics."""
        return {
            "weights_bytes": self.weights,
            "kv_cache_bytes": self.kv_cache,
            "compute_bytes": self.compute,
            "free_bytes": self.free,
            "total_bytes": self.capacity,
        }


class MachineGpu(msgspec.Struct, frozen=True):
    """A GPU of this machine, whether the library uses it or not."""

    name: str
    """Such as "an NVIDIA GPU (NVIDIA L4)"."""
    fix: str
    """What to install and to run for a library that computes on it."""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What a library computes on, and how much of a model is there."""

    backend: str
    """What the library computes with; see ``llama_abi.Library``."""
    found: tuple[Device, ...]
    """The library's devices, with the memory that is free after the model was loaded, if one was."""
    machine_gpu: MachineGpu | None = None
    unused_plugins: tuple[str, ...] = ()
    """Backends that are installed and do not load on this machine, with the reason."""
    layers_on_gpu: int | None = None
    """``None`` without a model."""
    n_layers: int = 0
    """The model's layers, with the output as a layer of its own, as llama.cpp counts."""
    used: tuple[str, ...] | None = None
    """Names of the devices that a model uses, in the order of its layers; ``None`` without a model."""
    split: str = ""
    """How it is divided between them, in words."""
    memory: tuple[DeviceMemory, ...] = ()
    """What a model has allocated, by device."""

    def __str__(self) -> str:
        return "; not used: ".join([self._in_use(), *self.unused_plugins])

    def _in_use(self) -> str:
        gpus = [device for device in self.found if device.is_gpu]
        if gpus and self.layers_on_gpu != 0:
            by_name = {device.name: device for device in gpus}
            used = gpus if self.used is None else [by_name[name] for name in self.used if name in by_name]
            layers = "" if self.layers_on_gpu is None else f", with {self.layers_on_gpu} of {self.n_layers} layers"
            return ", ".join(map(str, used)) + layers + (f", {self.split}" if self.split else "")
        if gpus:
            why = "devices is none" if self.used == () else "gpu_layers is 0"
            return f"CPU only: {why}; unused: {', '.join(map(str, gpus))}"
        cpu = next((f" ({device.description.strip()})" for device in self.found if device.kind == "cpu"), "")
        built = (
            f"built for {BACKENDS[self.backend]}, which finds no GPU" if self.backend in BACKENDS else NO_GPU_BACKEND
        )
        but = f"; this machine has {self.machine_gpu.name}" if self.machine_gpu else ""
        return f"CPU only{cpu}: {built}{but}"

    @property
    def fix(self) -> str | None:
        """How to use a GPU that the library does not find; ``None`` if there is none."""
        if any(device.is_gpu for device in self.found):
            return None
        if self.unused_plugins:
            return MEND_PLUGINS
        if self.backend in BACKENDS and (self.machine_gpu or self.backend != "vulkan"):
            return TOOL_SEES[self.backend]  # Vulkan is built where its headers are, also without a GPU
        return self.machine_gpu.fix if self.machine_gpu else None


def layers_on_gpu(gpu_layers: int, n_layer: int) -> int:
    """How many layers llama.cpp keeps on GPUs, if there are some.

    Args:
        gpu_layers: the setting; -1 for all.
        n_layer: of the model, without its output.
    """
    return n_layer + 1 if gpu_layers < 0 else min(gpu_layers, n_layer + 1)


def split_in_words(settings: config.Model) -> str:
    """How the settings divide a model, as far as they differ from whole layers by free memory; may be empty."""
    parts = []
    if settings.tensor_split or settings.split_mode in ("row", "tensor"):
        shares = f" {':'.join(f'{share:g}' for share in settings.tensor_split)}" if settings.tensor_split else ""
        parts.append(f"split by {settings.split_mode}{shares}")
    if settings.n_cpu_moe:
        parts.append(f"experts of {settings.n_cpu_moe} {'layer' if settings.n_cpu_moe == 1 else 'layers'} on the CPU")
    if settings.override_tensor:
        parts.append(f"override_tensor {' '.join(settings.override_tensor)}")
    return ", ".join(parts)


def memory_by_device(
    buffers: Iterable[tuple[str, str, int]], devices: Iterable[Device] = ()
) -> tuple[DeviceMemory, ...]:
    """Sum up buffers: device, kind as llama.cpp names it, bytes.

    Args:
        devices: with their memory now.
    """
    fields = {"model": "weights", "KV": "kv_cache", "RS": "kv_cache"}
    by_device: dict[str, dict[str, int]] = {}
    for name, kind, n_bytes in buffers:
        sums, field = by_device.setdefault(name, {}), fields.get(kind, "compute")
        sums[field] = sums.get(field, 0) + n_bytes
    for device in devices:
        if device.name in by_device:
            by_device[device.name] |= {"free": device.memory_free, "capacity": device.memory_total}
    return tuple([DeviceMemory(device, **sums) for device, sums in sorted(by_device.items())])


def size(n: int) -> str:
    """Format ``n`` bytes for people."""
    return f"{n / MIB:,.0f} MiB" if n < 10 * 1024 * MIB else f"{n / MIB / 1024:,.1f} GiB"
