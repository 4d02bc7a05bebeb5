"""Greedy answers of a model with its weights in several places, from a process of its own.

A device of an RPC server stays in the list of the library until the process ends, and asking for it when the server has
gone ends the process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import llama_abi
from uma_trio.engine.stacked_adapters import stack_adapters

PROMPT = "What is the capital of France?"
LIMIT_S = 120.0


@attrs.frozen
class Placed:
    """What became of one placement."""

    tokens: tuple[int, ...] = ()
    """Greedy; empty if the model was not loaded."""
    buffers: tuple[llama_abi.Buffer, ...] = ()
    error: str = ""

    def bytes_on(self, place: str, *kinds: str) -> int:
        """Bytes of the buffers of these kinds on a device, by the name of its buffer type."""
        return sum(each.n_bytes for each in self.buffers if each.place == place and each.kind in kinds)


def answers(
    model: Path,
    placements: Sequence[llama_abi.Placement],
    endpoints: Sequence[str] = (),
    *,
    n_gpu_layers: int = -1,
    adapters: Sequence[Path] = (),
) -> tuple[list[Placed], list[llama_abi.Device]]:
    """The answers in the order of ``placements``, and the devices that there were.

    Args:
        adapters: to load, of which the answers use the first one.
    """
    asked = {
        "model": str(model),
        "placements": [attrs.asdict(each) for each in placements],
        "endpoints": [*endpoints],
        "n_gpu_layers": n_gpu_layers,
        "adapters": [str(each) for each in adapters],
    }
    command = [sys.executable, "-m", "tests.support.placements"]
    ended = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    placed = [
        Placed(tuple(each["tokens"]), tuple([llama_abi.Buffer(**b) for b in each["buffers"]]), each["error"])
        for each in found["placed"]
    ]
    devices = [llama_abi.Device(**{**each, "type": llama_abi.DeviceType[each["type"]]}) for each in found["devices"]]
    return placed, devices


def _main() -> None:
    asked = json.load(sys.stdin)
    library = llama_abi.load()
    for endpoint in asked["endpoints"]:
        library.add_rpc_server(endpoint)
    found = []
    for each in asked["placements"]:
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in each.items()}
        fields["overrides"] = tuple([tuple(pair) for pair in each["overrides"]])
        found.append(attrs.asdict(_place(library, asked, llama_abi.Placement(**fields))))
    devices: list[dict[str, Any]] = [{**attrs.asdict(each), "type": each.type.name} for each in library.devices()]
    print(json.dumps({"placed": found, "devices": devices}))


def _place(library: llama_abi.Library, asked: dict[str, Any], placement: llama_abi.Placement) -> Placed:
    flash_attn = "on" if placement.split_mode == "tensor" else "auto"
    options = llama_abi.ContextOptions(n_ctx=512, n_seq_max=2, kv_unified=True, flash_attn=flash_attn)
    try:
        with (
            llama_abi.Model(library, asked["model"], placement=placement, n_gpu_layers=asked["n_gpu_layers"]) as model,
            _stacked(model, asked["adapters"]) as adapters,
            llama_abi.Context(model, options, adapters) as context,
        ):
            if adapters is not None:
                context.set_adapter_scales(np.eye(1, adapters.n_parts, dtype=np.float32)[0])
            return Placed(_greedy(model, context), (*model.buffers, *context.buffers))
    except llama_abi.LlamaError as error:
        return Placed(error=str(error))


def _stacked(
    model: llama_abi.Model, paths: list[str]
) -> contextlib.AbstractContextManager[llama_abi.StackedAdapters | None]:
    return stack_adapters(model, [Path(each) for each in paths]) if paths else contextlib.nullcontext()


def _greedy(model: llama_abi.Model, context: llama_abi.Context, n_tokens: int = 16) -> tuple[int, ...]:
    batch = llama_abi.Batch(context.n_batch)
    prompt = model.vocab.tokenize(PROMPT, add_special=True, parse_special=True)
    batch.add(prompt, pos=0, seq=0)
    found: list[int] = []
    for pos in range(len(prompt), len(prompt) + n_tokens):
        assert context.decode(batch) == llama_abi.OK
        found.append(int(context.logits().array[-1].argmax()))
        if len(found) == n_tokens // 2:  # a saved state goes on as if it had not been saved
            state = bytearray(context.state_size(0))
            context.save_state_into(0, state)
            context.seq_remove(0)
            context.load_state_from(1, state)
        batch.clear()
        batch.add([found[-1]], pos=pos, seq=int(len(found) >= n_tokens // 2))
    return tuple(found)


if __name__ == "__main__":
    _main()
