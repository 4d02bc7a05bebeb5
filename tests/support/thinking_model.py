"""A model that reasons: the embedded one, with two of its tokens renamed to markers."""

from __future__ import annotations

from pathlib import Path

import gguf

from tests.support.bench_scripts import bench_script
from uma_trio.models.packaged import EMBEDDED

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
REASONING, ANSWER = "capital of France is", "aris."
"""The two parts of its answer."""

RENAMED = {"The": "<think>", "ĠP": "</think>"}
"""Tokens of the answer ``The capital of France is Paris.`` that are not in the question."""


def write_thinking_model(path: Path, kind: str = "CONTROL") -> None:
    """Write the model to a GGUF file.  ``kind`` is the type of its markers in the vocabulary."""
    files = bench_script("gguf_file")
    reader, writer = files.Reader(EMBEDDED), files.Writer(path, "llama")
    tokens, kinds, template = (
        reader.fields[f"tokenizer.{name}"].contents() for name in ("ggml.tokens", "ggml.token_type", "chat_template")
    )
    changed = {
        "tokenizer.ggml.tokens": [RENAMED.get(text, text) for text in tokens],
        "tokenizer.ggml.token_type": [
            gguf.TokenType[kind] if text in RENAMED else old for text, old in zip(tokens, kinds, strict=True)
        ],
        "tokenizer.chat_template": template + "{# <think> #}",
    }
    files.copy_fields(reader, writer, **changed)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    files.write_to_end(writer)
