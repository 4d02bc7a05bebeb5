"""Write the tokenizer of a GGUF file as a Hugging Face tokenizer folder, for load generators that need one.

The folder has ``tokenizer.json`` and ``tokenizer_config.json``, and nothing around a text: no BOS, no chat template.
SentencePiece vocabularies (``llama``) and byte-level BPE (``gpt2``) can be written.  The split of a text into words has
no name in common with Hugging Face: those of GPT-2, Llama 3 and Qwen 2 are known, and other vocabularies get GPT-2's.
So the ids of some texts may differ; compare them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
from gguf_file import Reader

SPACE: Final = "▁"
"""Stands for a space in SentencePiece vocabularies."""

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3: Final = rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}"
QWEN_2: Final = rf"{_CONTRACTIONS}\p{{N}}{_REST}"

WORDS: Final = {"llama-bpe": LLAMA_3, "llama3": LLAMA_3, "llama-v3": LLAMA_3, "qwen2": QWEN_2}
"""``tokenizer.ggml.pre`` -> the expression that splits a text into words, other than GPT-2's."""

Entries = Mapping[str, Any]
"""The ``tokenizer.ggml.*`` entries of a GGUF file, without that prefix."""


class UnknownVocabulary(Exception):
    """The vocabulary cannot be written as a tokenizer folder.  The message has the reason."""


def read_entries(model: Path) -> dict[str, Any]:
    """Read the vocabulary of a GGUF file.  Blocks for a second with a large one."""
    prefix = "tokenizer.ggml."
    fields = Reader(model).fields
    return {key.removeprefix(prefix): field.contents() for key, field in fields.items() if key.startswith(prefix)}


def tokenizer_json(entries: Entries) -> dict[str, Any]:
    """Content of ``tokenizer.json``.

    Raises:
        UnknownVocabulary: it is neither SentencePiece nor byte-level BPE.
    """
    kind = entries.get("model")
    if kind == "llama":
        parts = _sentence_piece(entries)
    elif kind == "gpt2":
        parts = _byte_level(entries)
    else:
        raise UnknownVocabulary(
            f"its kind is {kind}, and only llama (SentencePiece) and gpt2 (byte-level BPE) are known"
        )
    nothing = dict.fromkeys(("truncation", "padding", "post_processor"))
    return {"version": "1.0", **nothing, "added_tokens": _added_tokens(entries), **parts}


def write_folder(model: Path, folder: Path) -> None:
    """Write the tokenizer of ``model`` into ``folder``, which exists.  Blocks for seconds with a large vocabulary.

    Raises:
        UnknownVocabulary: as ``tokenizer_json``.
    """
    entries = read_entries(model)
    tokens = entries.get("tokens", [])
    special = {f"{name}_token": entries.get(f"{name}_token_id") for name in ("bos", "eos")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | {
        name: tokens[token] for name, token in special.items() if token is not None
    }
    for name, content in (("tokenizer.json", tokenizer_json(entries)), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _sentence_piece(entries: Entries) -> dict[str, Any]:
    tokens, scores, unknown = entries["tokens"], entries["scores"], entries.get("unknown_token_id")
    leading = entries.get("add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepended = [{"type": "Prepend", "prepend": SPACE}] if leading else []
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if leading else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": _ids(tokens),
            "merges": sentence_piece_merges(tokens, scores, entries.get("token_type", [])),
        },
    }


def sentence_piece_merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[list[str]]:
    """All pairs of tokens that make another token, the one with the highest score first."""
    plain = {
        token: score
        for at, (token, score) in enumerate(zip(tokens, scores, strict=True))
        if at >= len(kinds) or kinds[at] in (gguf.TokenType.NORMAL, gguf.TokenType.UNUSED)
    }
    found = [(-score, token, at) for token, score in plain.items() for at in _splits(token, plain)]
    return [[token[:at], token[at:]] for _, token, at in sorted(found)]


def _splits(token: str, known: Mapping[str, float]) -> Iterator[int]:
    return (at for at in range(1, len(token)) if token[:at] in known and token[at:] in known)


def _byte_level(entries: Entries) -> dict[str, Any]:
    words = WORDS.get(entries.get("pre", ""))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words is None}
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level] if words is None else [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": _ids(entries["tokens"]),
            "merges": [merge.split(" ") for merge in entries["merges"]],
            "ignore_merges": words == LLAMA_3,
        },
    }


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: at for at, token in enumerate(tokens)}


def _added_tokens(entries: Entries) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split into words."""
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNKNOWN)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": at, "content": token, **plain, "special": kind != gguf.TokenType.USER_DEFINED}
        for at, (token, kind) in enumerate(zip(entries["tokens"], entries.get("token_type", []), strict=False))
        if kind in kinds
    ]
