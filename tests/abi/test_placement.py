"""Tests for where the weights go, on two RPC servers on this machine: two devices that compute, each with its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import llama_abi
from llama_abi import DeviceType, LlamaError, Placement
from tests.support.placements import Placed, answers
from tests.support.profile import sampled
from tests.support.rpc_server import rpc_server

MODEL = Path(__file__).parents[2] / "uma_trio" / "models" / "embedded" / "embedded.gguf"
FFN_OF_THREE = r"blk\.[0-2]\.ffn_"

PLACEMENTS = {
    "cpu": Placement(devices=()),
    "all": Placement(),
    "turned": Placement(devices=("RPC1", "RPC0")),
    "shares": Placement(devices=("RPC0", "RPC1"), tensor_split=(3, 1)),
    "one": Placement(devices=("RPC0", "RPC1"), split_mode="none", main_gpu=1),
    "overrides": Placement(
        devices=("RPC0", "RPC1"), tensor_split=(1, 0), overrides=((FFN_OF_THREE, "CPU"), ("attn_q", "RPC1"))
    ),
    "tensor": Placement(devices=("RPC0", "RPC1"), split_mode="tensor"),
    "row": Placement(split_mode="row"),
    "unknown": Placement(devices=("RPC7",)),
    "far": Placement(split_mode="none", main_gpu=2),
}


@pytest.fixture(scope="module")
def found(directory: Path) -> tuple[dict[str, Placed], list[llama_abi.Device]]:
    with rpc_server() as first, rpc_server() as second:
        placed, devices = answers(MODEL, [*PLACEMENTS.values()], [first, second])
    return dict(zip(PLACEMENTS, placed, strict=True)), devices


@pytest.mark.parametrize("name", sampled(["all", "turned", "shares", "one", "overrides", "tensor"], 3))
def test_the_text_is_the_same_wherever_the_weights_are(
    found: tuple[dict[str, Placed], list[llama_abi.Device]], name: str
) -> None:
    placed, _ = found
    assert placed[name].error == ""
    assert placed[name].tokens == placed["cpu"].tokens


def test_weights_and_caches_are_where_they_were_put(
    found: tuple[dict[str, Placed], list[llama_abi.Device]],
) -> None:
    placed, devices = found
    first, second = [each.buffer for each in devices if each.type is DeviceType.GPU]

    def held(name: str, *kinds: str) -> tuple[int, int]:
        return placed[name].bytes_on(first, *kinds), placed[name].bytes_on(second, *kinds)

    assert held("cpu", "model", "KV", "compute") == (0, 0)
    assert 0 < held("all", "KV")[1] <= held("all", "KV")[0]
    assert held("turned", "model") == (held("all", "model")[1], held("all", "model")[0])
    assert held("shares", "KV")[0] > 3 * held("shares", "KV")[1] > 0
    assert held("one", "model")[0] == 0 < held("one", "model")[1]
    assert placed["overrides"].bytes_on("CPU_Mapped", "model") > placed["all"].bytes_on("CPU_Mapped", "model")
    assert held("overrides", "KV")[1] == 0 < held("overrides", "model")[1]


def test_what_the_library_cannot_do_is_an_error(found: tuple[dict[str, Placed], list[llama_abi.Device]]) -> None:
    placed, _ = found
    assert "does not support split buffers" in placed["row"].error
    assert "there is no device RPC7; there are CPU, RPC0, RPC1" in placed["unknown"].error
    assert "invalid value for main_gpu: 2" in placed["far"].error


def test_a_server_with_two_devices(directory: Path) -> None:
    with rpc_server(2) as endpoint:
        (placed,), devices = answers(MODEL, [Placement(tensor_split=(1, 1))], [endpoint, endpoint])
    gpus = [each for each in devices if each.type is DeviceType.GPU]
    assert [each.name for each in gpus] == ["RPC0", "RPC1"], "adding a server twice adds no devices"
    assert {each.backend for each in gpus} == {"RPC"}
    assert not any(each.splits_rows for each in devices)
    assert all(placed.bytes_on(each.buffer, "model") for each in gpus)


def test_an_unknown_buffer_type_is_named(library: llama_abi.Library) -> None:
    with pytest.raises(LlamaError, match="there is no buffer type CUDA9; there are CPU"):
        llama_abi.Model(library, MODEL, placement=Placement(overrides=(("ffn", "CUDA9"),)))


def test_a_split_mode_that_the_header_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="split_mode"):
        Placement(split_mode="columns")
