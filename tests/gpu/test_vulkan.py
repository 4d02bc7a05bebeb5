"""The Vulkan library gives the same answers as the CPU library.  Opt-in: it needs a second library.

    ./build_llama.sh --backend vulkan --prefix build/vulkan-lib
    UMA_TEST_VULKAN_DIR=build/vulkan-lib pytest tests/gpu/test_vulkan.py

Without a GPU, a software driver is enough: Debian's ``mesa-vulkan-drivers``.  llama.cpp uses such a device only if it is
named, so the test sets ``GGML_VK_VISIBLE_DEVICES`` to 0 unless you set it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_abi.stamp import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE

VULKAN_VARIABLE = "UMA_TEST_VULKAN_DIR"
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_same_greedy_tokens_as_the_cpu() -> None:
    vulkan = os.environ.get(VULKAN_VARIABLE)
    if not vulkan:
        pytest.skip(
            f"{VULKAN_VARIABLE} is not set: ./build_llama.sh --backend vulkan --prefix build/vulkan-lib, "
            f"then {VULKAN_VARIABLE}=build/vulkan-lib"
        )
    if not DEFAULT_DIRECTORY.is_dir():
        pytest.skip("the library to compare with is missing: ./build_llama.sh --backend cpu --dev builds it")
    there, here = answer(Path(vulkan).resolve()), answer(DEFAULT_DIRECTORY)
    assert there["backend"] == "vulkan"
    assert there["devices"], "the Vulkan library found no Vulkan device"
    assert there["answers"] == here["answers"], (there["texts"], here["texts"])
