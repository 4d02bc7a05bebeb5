"""The loaded library and its devices, and what a loaded model computes on, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs
import msgspec

import llama_abi
from llama_abi.backends import OnOpen
from llama_abi.gpus import look
from llama_abi.remedies import where_checkout
from uma_trio import config
from uma_trio.engine.placement import ModelDevices
from uma_trio.engine_link.devices import Device, Devices, MachineGpu, layers_on_gpu, memory_by_device, split_in_words
from uma_trio.engine_link.installed import LibraryProblem


@attrs.frozen
class LibraryFacts:
    """Facts about a loaded library."""

    system_info: str
    """Instruction sets and build options, as llama.cpp reports them."""
    max_sequences: int
    devices: Devices
    plugins: tuple[str, ...]
    """Files of the backends that were chosen for this machine, if they are plug-ins."""


def load_library(named: Path | None = None, on_open: OnOpen = lambda path: None) -> LibraryFacts:
    """Load the library into this process and query it.

    Args:
        named, on_open: see ``llama_abi.load``.

    Raises:
        LibraryProblem: it cannot be loaded.
    """
    try:
        library = llama_abi.load(named, on_open=on_open)
    except llama_abi.LibraryError as error:
        raise LibraryProblem(error.reason, error.remedy) from None
    return LibraryFacts(
        system_info=library.system_info,
        max_sequences=library.max_sequences,
        devices=find_devices(library),
        plugins=library.plugins.used,
    )


def find_devices(library: llama_abi.Library) -> Devices:
    """The devices of ``library``, with their free memory now, and the GPU of this machine."""
    devices = tuple(
        Device(device.name, device.description, device.type.name.lower(), device.memory_free, device.memory_total)
        for device in library.devices()
    )
    here = next((MachineGpu(str(gpus), where_checkout(gpus.fix)) for gpus in look() if gpus.has_gpu), None)
    return Devices(backend=library.backend, found=devices, machine_gpu=here, unused_plugins=library.plugins.unused)


def devices_of_model(
    where: ModelDevices, model: llama_abi.Model, settings: config.Model, buffers: Iterable[llama_abi.Buffer]
) -> Devices:
    """What a loaded model computes on, with the memory that is free now.

    Args:
        buffers: all that was allocated for it.
    """
    devices, n_layer = find_devices(model.library), model.n_layer
    placed = ((name, buffer.kind, buffer.n_bytes) for buffer in buffers for name in where.devices_of(buffer.place))
    return msgspec.structs.replace(
        devices,
        used=where.names,
        split=split_in_words(settings),
        layers_on_gpu=layers_on_gpu(settings.gpu_layers, n_layer) if where.on_gpu else 0,
        n_layers=n_layer + 1,
        memory=memory_by_device(placed, devices.found),
    )
