"""A model that reasons: the embedded one, with two of its tokens renamed to markers."""

from __future__ import annotations

from pathlib import Path

import gguf

from uma_trio.daemon.engines.loaded import EMBEDDED

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
REASONING, ANSWER = "capital of France is", "aris."
"""The two parts of its answer."""

RENAMED = {"The": "<think>", "ĠP": "</think>"}
"""Tokens of the answer ``The capital of France is Paris.`` that are not in the question."""


def write_thinking_model(path: Path, kind: str = "CONTROL") -> None:
    """Write the model to a GGUF file.  ``kind`` is the type of its markers in the vocabulary."""
    reader = gguf.GGUFReader(EMBEDDED)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        value = field.contents()
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "tokenizer.ggml.tokens":
            ids = [value.index(text) for text in RENAMED]
            value = [RENAMED.get(text, text) for text in value]
        elif name == "tokenizer.ggml.token_type":
            value = [gguf.TokenType[kind] if token in ids else old for token, old in enumerate(value)]
        elif name == "tokenizer.chat_template":
            value += "{# <think> #}"
        kinds = field.types
        writer.add_key_value(name, value, kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
