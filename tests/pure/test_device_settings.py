"""Settings about devices: from flags, variables and files, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import all_cases
from uma_trio import config
from uma_trio.config import ConfigError, Model


def from_flags(**flags: Any) -> Model:
    return config.load(None, {}, flags).model


def from_file(tmp_path: Path, text: str) -> config.Config:
    file = tmp_path / "uma.yaml"
    file.write_text(text)
    return config.load(file, {}, {})


def test_flags_take_lists_with_commas_or_several_times() -> None:
    assert from_flags(devices=("CUDA0,CUDA1", "CUDA3")).devices == ("CUDA0", "CUDA1", "CUDA3")
    assert from_flags(tensor_split=("3,1",)).tensor_split == (3.0, 1.0)
    assert from_flags(rpc=("localhost:1,gpu-2.local:50052",)).rpc == ("localhost:1", "gpu-2.local:50052")
    assert from_flags(override_tensor=("ffn=CPU", r"a{1,2}=CUDA0,attn_q=RPC0[10.0.0.1:50052]")).override_tensor == (
        "ffn=CPU",
        "a{1,2}=CUDA0",
        "attn_q=RPC0[10.0.0.1:50052]",
    )
    assert from_flags(devices=(), tensor_split=(), override_tensor=(), rpc=()) == Model()


def test_variables_and_files_say_the_same(tmp_path: Path) -> None:
    wanted = Model(devices=("CUDA1", "CUDA0"), tensor_split=(3.0, 1.0), n_cpu_moe=2, override_tensor=("ffn=CPU",))
    variables = {
        "UMA_DEVICES": "CUDA1,CUDA0",
        "UMA_TENSOR_SPLIT": "3,1",
        "UMA_N_CPU_MOE": "2",
        "UMA_OVERRIDE_TENSOR": "ffn=CPU",
    }
    assert config.load(None, variables, {}).model == wanted
    lists = "model: {devices: [CUDA1, CUDA0], tensor_split: [3, 1], n_cpu_moe: 2, override_tensor: [ffn=CPU]}\n"
    texts = "model: {devices: 'CUDA1,CUDA0', tensor_split: '3,1', n_cpu_moe: 2, override_tensor: 'ffn=CPU'}\n"
    assert from_file(tmp_path, lists).model == wanted
    assert from_file(tmp_path, texts).model == wanted
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml(config.load(None, variables, {})))
    assert config.load(again, {}, {}).model == wanted


def test_each_model_may_have_its_own(tmp_path: Path) -> None:
    text = """
model: {split_mode: layer, devices: [CUDA0, CUDA1]}
models:
  - {model: large, tensor_split: [2, 1]}
  - {model: small, devices: CUDA1, split_mode: none}
  - {model: tiny, devices: [none]}
"""
    large, small, tiny = [each.model for each in config.models_of(from_file(tmp_path, text))]
    assert (large.devices, large.tensor_split) == (("CUDA0", "CUDA1"), (2.0, 1.0))
    assert (small.devices, small.split_mode, tiny.devices) == (("CUDA1",), "none", ("none",))


@all_cases(
    ("flags", "why"),
    [
        ({"devices": "CUDA0,CUDA0"}, "CUDA0 twice"),
        ({"devices": "CUDA0,"}, "must be names"),
        ({"devices": "none,CUDA0"}, "the CPU alone"),
        ({"devices": ",".join(f"GPU{n}" for n in range(17))}, "16 are the most"),
        ({"devices": "a b"}, "must be names"),
        ({"devices": "x" * 200}, "must be names"),
        ({"devices": "none", "gpu_layers": "3"}, "gpu_layers needs devices"),
        ({"devices": "none", "tensor_split": "1,1"}, "tensor_split needs devices"),
        ({"devices": "none", "split_mode": "tensor"}, "split_mode tensor needs devices"),
        ({"reproducible": "true", "kv_unified": "on"}, "and kv_unified is on"),
        ({"reproducible": "true", "flash_attn": "off"}, "and flash_attn is off"),
        ({"reproducible": "true", "adapters": "a=b.gguf"}, "and there are adapters"),
        ({"reproducible": "true", "gpu_layers": "3"}, "and gpu_layers is above 0"),
        ({"split_mode": "column"}, "one of none, layer, row, tensor"),
        ({"split_mode": "tensor", "flash_attn": "off"}, "needs flash attention"),
        ({"split_mode": "tensor", "adapters": "a=b.gguf"}, "cannot apply LoRA adapters with split_mode tensor"),
        ({"split_mode": "none", "tensor_split": "1,1"}, "keeps it on one"),
        ({"tensor_split": "3,-1"}, "from 0 to 1e9"),
        ({"tensor_split": "3,nan"}, "from 0 to 1e9"),
        ({"tensor_split": "3,inf"}, "from 0 to 1e9"),
        ({"tensor_split": "3,x"}, "from 0 to 1e9"),
        ({"tensor_split": "0,0"}, "a share of 0 for every device"),
        ({"tensor_split": ",".join("1" * 17)}, "16 are the most"),
        ({"tensor_split": "1,2,3", "devices": "A,B"}, "3 shares for 2 devices"),
        ({"main_gpu": "1"}, "counts with split_mode none only"),
        ({"main_gpu": "2", "split_mode": "none", "devices": "A,B"}, "count from 0"),
        ({"main_gpu": "-1"}, "from 0 to 15"),
        ({"n_cpu_moe": "-1"}, "from 0 to 1000"),
        ({"override_tensor": "ffn"}, "PATTERN=BUFFER"),
        ({"override_tensor": "ffn="}, "PATTERN=BUFFER"),
        ({"override_tensor": "=CPU"}, "it is empty"),
        ({"override_tensor": "(ffn=CPU"}, "not closed"),
        ({"override_tensor": "(a+)+=CPU"}, "may take forever"),
        ({"override_tensor": "a=CPU," * 64 + "a=CPU"}, "64 are the most"),
        ({"rpc": "localhost"}, "HOST:PORT"),
        ({"rpc": "localhost:0"}, "HOST:PORT"),
        ({"rpc": "localhost:65536"}, "HOST:PORT"),
        ({"rpc": "[::1]:50052"}, "HOST:PORT"),
    ],
)
def test_what_is_refused_and_why(flags: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(**{name: (value,) if name in ("devices", "rpc") else value for name, value in flags.items()})
    assert why in str(caught.value)


@all_cases("name", ["devices", "tensor_split", "override_tensor", "rpc"])
@all_cases("value", [{"a": 1}, [[1]], [None], True, [True], 5.5])
def test_files_with_other_types(name: str, value: Any) -> None:
    if (name, value) == ("tensor_split", 5.5):
        return  # one share
    with pytest.raises(ConfigError, match=name):
        config.settings_of_model(config.Config(), config.models.parse_models([{"model": "m", name: value}], "file")[0])
