"""A vocabulary as ``tokenizer.json``, the file of Hugging Face's tokenizers.

It gives a text the same ids as libllama with ``add_special`` and ``parse_special``: routers and load generators can count
and compare tokens without asking.  SentencePiece vocabularies (``llama``) and byte-level BPE (``gpt2``) can be expressed.
Others are refused, and so are the ways to split a text that ``words`` does not know: a file that is wrong for some texts
would be worse than none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from uma_trio.models.gguf_header import GgufHeader
from uma_trio.tokenizer.alignment import Spelling
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.words import BYTE_LETTERS, SPLIT_OF

SPACE: Final = "▁"
"""Stands for a space in SentencePiece vocabularies."""

NORMAL: Final = 1
UNUSED: Final = 5
"""Values of ``tokenizer.ggml.token_type``; the other kinds take no part in merges."""


class CannotExpress(Exception):
    """The vocabulary cannot be a ``tokenizer.json``.  The message has the reason."""


def tokenizer_json(header: GgufHeader, tokenizer: Tokenizer) -> dict[str, Any]:
    """Content of ``tokenizer.json``.  Takes seconds for a large SentencePiece vocabulary.

    Args:
        header: of the model's file.
        tokenizer: of the same file.

    Raises:
        CannotExpress: it would not give the same ids.
    """
    kind = header.text("tokenizer.ggml.model")
    tokens = _texts(header.strings("tokenizer.ggml.tokens"))
    match kind:
        case "llama":
            parts = _sentence_piece(header, tokens)
        case "gpt2":
            parts = _byte_level(header, tokens)
        case _:
            raise CannotExpress(
                f"the vocabulary is of the kind {kind or 'none'!r}; only SentencePiece ('llama') and byte-level BPE "
                "('gpt2') can be a tokenizer.json with the same ids"
            )
    controls = tokenizer.control_tokens
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(token, tokens[token], spelling, is_special=tokens[token] in controls)
            for token, spelling in tokenizer.whole_tokens()
        ],
        "post_processor": _around(tokens, tokenizer),
        **parts,
    }


def _texts(tokens: Sequence[bytes]) -> list[str]:
    """The tokens as texts, each of which must be there once: a ``tokenizer.json`` has ids by text."""
    texts = [token.decode("utf-8", "replace") for token in tokens]
    if not texts:
        raise CannotExpress("the file has no vocabulary")
    if len({*texts}) < len(texts):
        raise CannotExpress("several tokens of the vocabulary have the same text")
    return texts


def _added(token: int, text: str, spelling: Spelling, *, is_special: bool) -> dict[str, Any]:
    return {
        "id": token,
        "content": text,
        "single_word": False,
        "lstrip": spelling.strips_left,
        "rstrip": spelling.strips_right,
        "normalized": False,
        "special": is_special,
    }


def _around(tokens: Sequence[str], special: Tokenizer) -> dict[str, Any] | None:
    """The tokens around a text."""
    before = [] if special.added_bos_id is None else [special.added_bos_id]
    after = [special.eos_id] if special.adds_eos and special.eos_id is not None else []
    if not before and not after:
        return None

    def named(ids: Sequence[int]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[token], "type_id": 0}} for token in ids]

    one, other = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*named(before), one, *named(after)],
        "pair": [*named(before), one, *named(after), *named(before), other, *named(after)],
        "special_tokens": {
            tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
            for token in (*before, *after)
        },
    }


# -- SentencePiece ------------------------------------------------------------------------------------


def _sentence_piece(header: GgufHeader, tokens: Sequence[str]) -> dict[str, Any]:
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CannotExpress("the vocabulary has no score for each token")
    unknown = header.values.get("tokenizer.ggml.unknown_token_id")
    has_prefix = header.values.get("tokenizer.ggml.add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepended = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    kinds = header.numbers("tokenizer.ggml.token_type")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *stripped]},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": _ids(tokens),
            "merges": sentence_piece_merges(tokens, scores, kinds),
        },
    }


def sentence_piece_merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[float]) -> list[list[str]]:
    """All pairs of tokens that make another token, the one with the highest score first.

    Of pairs with the same score libllama takes the first one in the text.  For runs of one character this means that the
    run grows from its beginning, one by one: so the pair that makes the longest run comes first.

    Raises:
        CannotExpress: two of these tokens have the same score, other than runs of one character.
    """
    plain = {
        token: score
        for at, (token, score) in enumerate(zip(tokens, scores, strict=True))
        if at >= len(kinds) or kinds[at] in (NORMAL, UNUSED)
    }
    merges = [(-score, -len(token), token, -at) for token, score in plain.items() for at in _splits(token, plain)]
    merged = {token: score for score, _, token, _ in merges if len({*token}) > 1}
    if len({*merged.values()}) < len(merged):
        raise CannotExpress(
            "tokens of the vocabulary have the same score, so that what comes first depends on where it stands in a text"
        )
    return [[token[:-minus], token[-minus:]] for _, _, token, minus in sorted(merges)]


def _splits(token: str, known: Mapping[str, float]) -> Iterator[int]:
    return (at for at in range(1, len(token)) if token[:at] in known and token[at:] in known)


# -- byte-level BPE -----------------------------------------------------------------------------------


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> dict[str, Any]:
    pre = header.text("tokenizer.ggml.pre")
    split = SPLIT_OF.get(pre)
    if split is None:
        raise CannotExpress(f"how the vocabulary splits a text into words ({pre!r}) has no equal in a tokenizer.json")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in split.expressions
    ]
    ids = _ids(tokens)
    # libllama leaves out a byte without a token after it has merged what stands around it, and the library before that
    missing = [
        {"type": "Split", "pattern": {"String": letter}, "behavior": "Removed", "invert": False}
        for letter in BYTE_LETTERS
        if letter not in ids
    ]
    merges = [merge.decode("utf-8", "replace") for merge in header.strings("tokenizer.ggml.merges")]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level, *missing]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [[merge[:at], merge[at + 1 :]] for merge in merges if (at := merge.find(" ", 1)) > 0],
            "ignore_merges": split.whole_words,
        },
    }


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """The tokens by their texts; of several with the same text the last one, as libllama has it."""
    return {token: at for at, token in enumerate(tokens)}
