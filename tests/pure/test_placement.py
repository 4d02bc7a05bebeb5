"""The devices that a model uses, for the devices that there are, and every reason to refuse."""

from __future__ import annotations

from typing import Any

import pytest

from llama_abi import Device, DeviceType
from tests.support.cases import all_cases
from uma_trio.config import Model
from uma_trio.engine.placement import ModelDevices, PlacementError, place_on

GIB = 1 << 30


def device(name: str, kind: DeviceType = DeviceType.GPU, backend: str = "CUDA", *, rows: bool = False) -> Device:
    return Device(name, "a card", kind, 60 * GIB, 80 * GIB, buffer=name, backend=backend, splits_rows=rows)


CPU = device("CPU", DeviceType.CPU, "CPU")
FIRST, SECOND = device("CUDA0"), device("CUDA1")
REMOTE = Device("RPC0", "far", DeviceType.GPU, GIB, GIB, buffer="RPC0[far:1]", backend="RPC")
INTEGRATED = device("Vulkan0", DeviceType.IGPU, "Vulkan")
BLAS = device("BLAS", DeviceType.ACCEL, "BLAS")


def placed(*found: Device, **settings: Any) -> ModelDevices:
    return place_on(Model(**settings), found or (CPU, FIRST, SECOND), 16)


@all_cases(
    ("found", "settings", "names"),
    [
        ((CPU,), {}, ()),
        ((CPU, BLAS), {}, ()),
        ((CPU, FIRST, SECOND, INTEGRATED), {}, ("CUDA0", "CUDA1")),
        ((CPU, INTEGRATED), {}, ("Vulkan0",)),
        ((CPU, FIRST, REMOTE), {}, ("RPC0", "CUDA0")),
        ((CPU, INTEGRATED, REMOTE), {}, ("RPC0", "Vulkan0")),
        ((CPU, FIRST, SECOND), {"devices": ("CUDA1", "CUDA0")}, ("CUDA1", "CUDA0")),
        ((CPU, FIRST, INTEGRATED), {"devices": ("Vulkan0",)}, ("Vulkan0",)),
        ((CPU, FIRST, SECOND), {"devices": ("none",)}, ()),
        ((CPU, FIRST, SECOND), {"split_mode": "none"}, ("CUDA0",)),
        ((CPU, FIRST, SECOND), {"split_mode": "none", "main_gpu": 1}, ("CUDA1",)),
        ((CPU,), {"split_mode": "none"}, ()),
    ],
)
def test_the_devices_that_have_layers(
    found: tuple[Device, ...], settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    where = placed(*found, **settings)
    assert where.names == names
    assert where.on_gpu == bool(names)
    assert where.options.devices in (None, names)
    if settings:
        assert where.options.devices == names


def test_without_layers_nothing_is_on_a_gpu() -> None:
    assert not placed(gpu_layers=0).on_gpu
    assert placed(gpu_layers=1).on_gpu


def test_experts_and_overrides_are_patterns_the_users_first() -> None:
    where = placed(CPU, FIRST, REMOTE, n_cpu_moe=2, override_tensor=("attn=RPC0[far:1]", "a=b=CPU"))
    assert where.options.overrides == (
        ("attn", "RPC0"),
        ("a=b", "CPU"),
        (r"^blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU"),
    )
    assert where.without_overrides.options.overrides == ()


@all_cases(
    ("settings", "why"),
    [
        ({"devices": ("CUDA7",)}, "there is no device CUDA7; there are CUDA0 (a card), CUDA1 (a card); name some of"),
        ({"devices": ("CPU",)}, "or none for the CPU alone"),
        ({"tensor_split": (1.0, 1.0, 1.0)}, "3 shares, and there are CUDA0"),
        ({"tensor_split": (1.0,)}, "1 share, and there are CUDA0"),
        ({"split_mode": "none", "main_gpu": 2}, "main_gpu is 2, and there are CUDA0"),
        ({"split_mode": "row"}, "CUDA0, CUDA1 does not have"),
        ({"override_tensor": ("ffn=CUDA9",)}, "on CUDA9, where the model is not; write one of CPU, CUDA0, CUDA1"),
        ({"override_tensor": ("ffn=CUDA1",), "devices": ("CUDA0",)}, "or add the device to devices"),
        ({"override_tensor": ("ffn=CUDA1",), "split_mode": "tensor"}, "each device has a part of everything"),
    ],
)
def test_what_is_refused_and_why(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PlacementError) as caught:
        placed(**settings)
    assert why in str(caught.value)


def test_without_devices() -> None:
    with pytest.raises(PlacementError, match="there is none besides the CPU; leave out devices"):
        placed(CPU, devices=("CUDA0",))
    with pytest.raises(PlacementError, match="split_mode is tensor, and there are no devices"):
        placed(CPU, split_mode="tensor")
    with pytest.raises(PlacementError, match="1 share, and there are no devices"):
        placed(CPU, tensor_split=(1.0,))


def test_more_devices_than_llama_cpp_takes() -> None:
    with pytest.raises(PlacementError, match=r"there are 17 devices.* between 16"):
        placed(*[device(f"CUDA{n}") for n in range(17)])


def test_rows_are_split_where_the_backend_can() -> None:
    able = device("SYCL0", rows=True)
    assert placed(able, split_mode="row").options.split_mode == "row"
    assert placed(able, split_mode="row").is_divided
    assert not placed(able).is_divided


def test_whose_memory_a_buffer_is_in() -> None:
    where = placed(CPU, FIRST, REMOTE)
    assert where.devices_of("CUDA0") == ("CUDA0",)
    assert where.devices_of("CUDA0_Split") == ("CUDA0",)
    assert where.devices_of("RPC0[far:1]") == ("RPC0",)
    assert where.devices_of("Meta()") == ("RPC0", "CUDA0")
    for name in ("CPU", "CPU_Mapped", "CUDA_Host", "CUDA1", "CUDA01"):
        assert where.devices_of(name) == ("CPU",)
