"""How byte-level BPE vocabularies split a text into words, in regular expressions that Hugging Face's tokenizers take.

Source: llama.cpp's llama-vocab.cpp, ``llm_tokenizer_bpe``.  Each expression is applied to what the one before has left, in
words and between them.
"""

from __future__ import annotations

from typing import Final

import attrs


def _byte_letters() -> tuple[str, ...]:
    """GPT-2's mapping of bytes to characters: printable bytes map to themselves, the others to U+0100 and up."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, spare = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in printing else spare))
        spare += byte not in printing
    return tuple(letters)


BYTE_LETTERS: Final = _byte_letters()
"""Byte -> its character in a byte-level vocabulary."""

_CONTRACTIONS: Final = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT_2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _like_llama_3(numbers: str, letters: str = r"\p{L}", contractions: str = f"{_CONTRACTIONS}|") -> str:
    """The expression of Llama 3, with other numbers or letters."""
    others = rf" ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}|{others}|{_SPACES}"


LLAMA_3: Final = _like_llama_3(r"\p{N}{1,3}")
QWEN_2: Final = _like_llama_3(r"\p{N}")
_DEEPSEEK_3: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK: Final = "[一-龥぀-ゟ゠-ヿ]+"


@attrs.frozen
class WordSplit:
    """How the vocabularies of some models split a text."""

    names: tuple[str, ...]
    """Values of ``tokenizer.ggml.pre``."""
    expressions: tuple[str, ...]
    whole_words: bool = False
    """A word that is a token becomes that token, whatever the merges say."""


SPLITS: Final = (
    WordSplit(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
            "jina-v5-nano",
        ),
        (LLAMA_3,),
        whole_words=True,
    ),
    WordSplit(("glm4", "glm5"), (LLAMA_3,), whole_words=True),
    WordSplit(("chatglm-bpe", "dbrx", "smaug-bpe"), (LLAMA_3,)),
    WordSplit(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        (QWEN_2,),
    ),
    WordSplit(("qwen35",), (_like_llama_3(r"\p{N}", r"[\p{L}\p{M}]"),)),
    WordSplit(("ufakzeka",), (_like_llama_3(r"\p{N}", contractions=""),)),
    WordSplit(("minicpm5",), (r"\p{N}{1,3}", _like_llama_3(r"\p{N}+")), whole_words=True),
    WordSplit(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
            *("modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4"),
            *("mpt", "olmo", "jais", "trillion", "granite-docling"),
        ),
        (GPT_2,),
    ),
    WordSplit(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", GPT_2),
    ),
    WordSplit(("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]")),
    WordSplit(("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    WordSplit(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK_3)),
    WordSplit(("seed-coder",), (_like_llama_3(r"\p{N}").replace(r"]+[\r\n]*|", r"\r\n]+|"),)),
    WordSplit(("", "default"), (r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
"""Those that are known to give the same words.  Vocabularies with other names are refused."""

SPLIT_OF: Final = {name: split for split in SPLITS for name in split.names}
