"""The Vulkan library gives the same answers as the CPU library, and compiles nothing once a model serves.

Opt-in: it needs a second library.

    ./build_llama.sh --backend vulkan --prefix build/vulkan-lib
    UMA_TEST_VULKAN_DIR=build/vulkan-lib pytest tests/gpu/test_vulkan.py

Without a GPU, a software driver is enough: Debian's ``mesa-vulkan-drivers``.  llama.cpp uses such a device only if it is
named, so the test sets ``GGML_VK_VISIBLE_DEVICES`` to 0 unless you set it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from llama_abi.locations import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE
from tests.support.real_daemon import Daemon, real_daemon

VULKAN_VARIABLE = "UMA_TEST_VULKAN_DIR"
COUNTER = Path(__file__).with_name("vulkan_pipelines.c")
SIZES = (1, 17, 90, 1100)
"""Words of prompts."""
START_S = 1500.0
"""A software driver takes minutes to compile."""
MODEL = Path(__file__).parents[2] / "uma_trio" / "models" / "embedded" / "embedded.gguf"

PROMPTS = ["What is the capital of France?", "Count from 3 to 9.", "Spell the word river.", "What is 12 + 30?"]
N_TOKENS = 40

# A process can load one library only, so each library runs in a process of its own.
ANSWER = """
import json, sys
import jinja2.sandbox
import llama_abi
from llama_abi import Batch, Context, ContextOptions, DeviceType

path, n_tokens, *prompts = sys.argv[1:]
library = llama_abi.load()
with llama_abi.Model(library, path) as model, Context(model, ContextOptions(n_ctx=1024, n_seq_max=4, kv_unified=True)) as context:
    batch, answers, positions = Batch(512), [[] for _ in prompts], []
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(model.chat_template)
    for seq, prompt in enumerate(prompts):
        text = template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        tokens = model.vocab.tokenize(text, add_special=True, parse_special=True)
        batch.add(tokens, pos=0, seq=seq)
        positions.append(len(tokens))
    for _ in range(int(n_tokens)):  # tokens after the end of an answer are not compared
        assert context.decode(batch) == llama_abi.OK
        chosen = context.logits().array.argmax(axis=1).tolist()
        for answer, token in zip(answers, chosen):
            answer.append(token)
        batch.clear()
        batch.add_decodes(chosen, positions=positions, seqs=range(len(prompts)))
        positions = [position + 1 for position in positions]
    ends = [min(answer.index(token) for token in model.vocab.eog_ids if token in answer) for answer in answers]
    answers = [answer[:end] for answer, end in zip(answers, ends)]
    texts = [model.vocab.detokenize(answer).decode() for answer in answers]
devices = [device.name for device in library.devices() if device.type is not DeviceType.CPU]
print(json.dumps({"backend": library.stamp.backend, "devices": devices, "answers": answers, "texts": texts}))
"""


def answer(directory: Path) -> dict[str, object]:
    environment = {"GGML_VK_VISIBLE_DEVICES": "0", **os.environ, DIRECTORY_VARIABLE: str(directory)}
    command = [sys.executable, "-c", ANSWER, str(MODEL), str(N_TOKENS), *PROMPTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def vulkan() -> Path:
    """The Vulkan library."""
    found = os.environ.get(VULKAN_VARIABLE)
    if not found:
        pytest.skip(
            f"{VULKAN_VARIABLE} is not set: ./build_llama.sh --backend vulkan --prefix build/vulkan-lib, "
            f"then {VULKAN_VARIABLE}=build/vulkan-lib"
        )
    return Path(found).resolve()


@pytest.mark.timeout(1300)
def test_same_greedy_tokens_as_the_cpu(vulkan: Path) -> None:
    if not DEFAULT_DIRECTORY.is_dir():
        pytest.skip("the library to compare with is missing: ./build_llama.sh --backend cpu --dev builds it")
    there, here = answer(vulkan), answer(DEFAULT_DIRECTORY)
    assert there["backend"] == "vulkan"
    assert there["devices"], "the Vulkan library found no Vulkan device"
    assert there["answers"] == here["answers"], (there["texts"], here["texts"])


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that, preloaded, notes each pipeline that is created."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("pipelines are counted on Linux with a C compiler: apt install gcc")
    made = tmp_path_factory.mktemp("counter") / "pipelines.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, COUNTER, "-ldl"], check=True)
    return made


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["on", "off"])
def test_a_mixed_load_compiles_nothing(vulkan: Path, counter: Path, tmp_path: Path, layout: str) -> None:
    notes = tmp_path / "notes"
    environment = {
        "GGML_VK_VISIBLE_DEVICES": os.environ.get("GGML_VK_VISIBLE_DEVICES", "0"),
        "GGML_VK_DEBUG_MARKERS": "1",
        DIRECTORY_VARIABLE: str(vulkan),
        "LD_PRELOAD": str(counter),
        "UMA_TEST_PIPELINES": str(notes),
    }
    flags = ("--parallel", "4", "--ctx", "8192", "--batch-tokens", "96", "--kv-unified", layout)
    with real_daemon(*flags, "--gpu-layers", "-1", environment=environment, start_s=START_S) as daemon:
        before = notes.read_text().splitlines()
        assert any(line.startswith("created") for line in before), "the start compiles shaders"
        mixed_load(daemon)
        after = notes.read_text().splitlines()[len(before) :]
    assert not after


def mixed_load(daemon: Daemon) -> None:
    """Streams of many lengths, alone and together; prompts that are long, short, alike and repetitive; a schema."""
    words = ["the", "sea", "is", "wide", "and", "the", "ship", "goes", "on"]
    prompts = [" ".join(words[n % len(words)] for n in range(start, start + size)) for start, size in enumerate(SIZES)]

    async def ask(n: int, **fields: Any) -> None:
        async with daemon.client() as client:
            await client.complete(prompt=prompts[n % len(prompts)], max_tokens=3 + 2 * n, ignore_eos=True, **fields)

    async def load() -> None:
        for together in (1, 3, 4):
            async with trio.open_nursery() as nursery:
                for n in range(together):
                    nursery.start_soon(ask, n)
        await ask(3, speculate=True, temperature=0.0)
        async with daemon.client() as client:
            schema = {"type": "array", "items": {"type": "string"}, "minItems": 3}
            await client.complete(prompt="A list:", max_tokens=40, constraint={"json_schema": schema})

    trio.run(load)
