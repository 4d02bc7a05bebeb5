"""Where a model goes: the settings about devices, compared with the devices that there are, before anything is loaded."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

import llama_abi
from llama_abi import DeviceType
from llama_abi.remedies import build_command
from uma_trio import config
from uma_trio.engine_link.devices import CPU_ALONE
from uma_trio.errors import ErrorWithRemedy

CPU: Final = "CPU"
"""Name of the CPU as a device, and of the machine's own memory as a buffer type."""
RPC: Final = "RPC"
TOGETHER: Final = "Meta("
"""Beginning of the name of a buffer that all devices have a part of."""

EXPERTS: Final = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Weights of experts.  Source: llama.cpp, common.h, ``LLM_FFN_EXPS_REGEX``."""

CONNECT_S: Final = 10.0
"""How long an RPC server may take to accept a connection."""


class PlacementError(ErrorWithRemedy):
    """Settings about devices and the devices of this machine do not go together."""


@attrs.frozen(kw_only=True)
class ModelDevices:
    """Where a model goes."""

    devices: tuple[llama_abi.Device, ...]
    """What has layers, in this order; empty for the CPU alone."""
    options: llama_abi.Placement
    on_gpu: bool
    """Layers of the model are on a device."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def is_divided(self) -> bool:
        """Each device has a part of every layer."""
        return self.options.split_mode in ("row", "tensor")

    @property
    def without_overrides(self) -> ModelDevices:
        """The same for another model, which has other tensors."""
        return attrs.evolve(self, options=attrs.evolve(self.options, overrides=()))

    def devices_of(self, buffer: str) -> tuple[str, ...]:
        """The devices whose memory a buffer is in, by the name of its type; ``CPU`` for the machine's own.

        With ``split_mode`` ``tensor`` each device has at most what llama.cpp gives as the size.
        """
        if buffer.startswith(TOGETHER):
            return self.names
        for device in self.devices:
            if buffer == device.buffer:
                return (device.name,)
        mapped = [device for device in self.devices if buffer in (f"{device.buffer}_Mapped", f"{device.buffer}_Split")]
        return (mapped[0].name,) if mapped else (CPU,)


def open_library(settings: config.Model) -> llama_abi.Library:
    """The library, with the devices of the RPC servers of ``settings``.  Blocks while it connects.

    Raises:
        llama_abi.LibraryError: there is no library.
        PlacementError: an RPC server does not answer.
    """
    library = llama_abi.load(settings.llama_dir)
    for endpoint in settings.rpc:
        host, _, port = endpoint.rpartition(":")
        if not library.supports_rpc:
            raise PlacementError("the library has no RPC backend", f"{build_command()}, or leave out rpc")
        try:
            with contextlib.closing(socket.create_connection((host, int(port)), CONNECT_S)):
                pass
        except OSError as error:
            raise PlacementError(
                f"no RPC server answers at {endpoint} ({error.strerror or error})",
                "start llama.cpp's rpc-server there, or remove it from rpc",
            ) from None
        library.add_rpc_server(endpoint)
    return library


def place(settings: config.Model, library: llama_abi.Library) -> ModelDevices:
    """Compare ``settings`` with the devices of ``library``.

    Raises:
        PlacementError: they do not go together.
    """
    return place_on(settings, library.devices(), library.max_devices)


def place_on(settings: config.Model, devices_there: Sequence[llama_abi.Device], max_devices: int) -> ModelDevices:
    """As ``place``, for the devices ``devices_there``."""
    devices = _devices_to_use(settings, devices_there)
    if len(devices) > max_devices:
        raise PlacementError(
            f"there are {len(devices)} devices, and llama.cpp divides a model between {max_devices}",
            "name some of them with devices",
        )
    shares, mode, main = settings.tensor_split, settings.split_mode, settings.main_gpu
    if mode == "none" and devices:
        if main >= len(devices):
            raise PlacementError(
                f"main_gpu is {main}, and there {_are(devices)}", "set main_gpu to the number of one of them, from 0"
            )
        devices = (devices[main],)
    if shares and len(shares) != len(devices):
        raise PlacementError(
            f"tensor_split has {len(shares)} {'share' if len(shares) == 1 else 'shares'}, and there {_are(devices)}",
            "give one share for each of them, 0 for nothing",
        )
    if mode == "tensor" and not devices:
        raise PlacementError("split_mode is tensor, and there are no devices", "leave out split_mode")
    if mode == "row" and (unable := [device.name for device in devices if not device.splits_rows]):
        raise PlacementError(
            f"split_mode is row, which llama.cpp's backend of {', '.join(unable)} does not have",
            "set split_mode to layer or tensor",
        )
    # always named, so that what is shown is what is used; llama.cpp alone knows which devices are one and the same GPU
    named = settings.devices or mode in ("none", "tensor")
    return ModelDevices(
        devices=devices,
        options=llama_abi.Placement(
            devices=tuple([device.name for device in devices]) if named else None,
            split_mode="layer" if mode == "none" else mode,
            tensor_split=shares,
            overrides=tuple(_overrides(settings, devices)),
        ),
        on_gpu=bool(devices) and settings.gpu_layers != 0,
    )


def _devices_to_use(settings: config.Model, devices_there: Sequence[llama_abi.Device]) -> tuple[llama_abi.Device, ...]:
    """The devices of the settings, or those that llama.cpp uses.

    Source: llama.cpp, ``llama_prepare_model_devices``.
    """
    gpus = [device for device in devices_there if device.type is DeviceType.GPU]
    integrated = [device for device in devices_there if device.type is DeviceType.IGPU]
    if settings.devices == CPU_ALONE:
        return ()
    if not settings.devices:
        remote, local = (
            [device for device in gpus if device.backend == RPC],
            [device for device in gpus if device.backend != RPC],
        )
        return (*remote, *(local or [device for device in integrated if device.backend == integrated[0].backend]))
    by_name = {device.name: device for device in (*gpus, *integrated)}
    for name in settings.devices:
        if name not in by_name:
            there = f"there {_are([*by_name.values()])}" if by_name else "there is none besides the CPU"
            remedy = f"name some of {', '.join(by_name)}" if by_name else "leave out devices"
            raise PlacementError(f"there is no device {name}; {there}", f"{remedy}, or none for the CPU alone")
    return tuple([by_name[name] for name in settings.devices])


def overrides(settings: config.Model) -> Iterator[tuple[str, str]]:
    """Patterns for names of tensors, each with where these go, as the settings say it."""
    for override in settings.override_tensor:
        pattern, _, buffer = override.rpartition("=")
        yield pattern, buffer
    if settings.n_cpu_moe:
        layers = "|".join(map(str, range(settings.n_cpu_moe)))
        yield rf"^blk\.({layers})\.{EXPERTS}", CPU


def _overrides(settings: config.Model, devices: Sequence[llama_abi.Device]) -> Iterator[tuple[str, str]]:
    names = (
        {CPU: CPU}
        | {device.buffer: device.name for device in devices}
        | {device.name: device.name for device in devices}
    )
    for pattern, buffer in overrides(settings):
        if buffer not in names:
            others = ", ".join([CPU, *(device.name for device in devices)])
            raise PlacementError(
                f"override_tensor puts {pattern} on {buffer}, where the model is not",
                f"write one of {others}, or add the device to devices",
            )
        if settings.split_mode == "tensor" and buffer != CPU:
            raise PlacementError(
                f"override_tensor puts {pattern} on {buffer}, and with split_mode tensor each device has a part of everything",
                f"put it on {CPU}, or set split_mode to layer",
            )
        yield pattern, names[buffer]


def _are(devices: Sequence[llama_abi.Device]) -> str:
    names = ", ".join([f"{device.name} ({device.description.strip()})" for device in devices])
    if not devices:
        return "are no devices"
    return f"is {names}" if len(devices) == 1 else f"are {names}"


def compute_environment(library: llama_abi.Library, where: ModelDevices, settings: config.Model) -> tuple[object, ...]:
    """What computes, and with what."""
    return *library_environment(library), os.cpu_count(), settings.gpu_layers, where.options


def library_environment(library: llama_abi.Library) -> tuple[object, ...]:
    """The library and its devices."""
    devices = tuple((device.name, device.description) for device in library.devices())
    return library.stamp.pin, library.backend, devices
