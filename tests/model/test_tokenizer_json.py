"""Vocabularies as ``tokenizer.json``: Hugging Face's tokenizers find the ids of libllama in it."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as OtherTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tests.support.gguf_files import ARRAY, I32, STRING, U32, array, gguf, pair, text
from tests.support.profile import amount, is_thorough, sampled
from tests.support.random_models import vocabulary_file
from uma_trio.models.gguf_header import read_header
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.tokenizer import Tokenizer, open_vocabulary
from uma_trio.tokenizer.tokenizer_json import CannotExpress, sentence_piece_merges, tokenizer_json
from uma_trio.tokenizer.words import BYTE_LETTERS, SPLIT_OF

WRITTEN = (
    *("aquila", "command-r", "deepseek-coder", "falcon", "gpt-2", "gpt-neox", "llama-bpe", "llama-spm"),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
QUICK = ("deepseek-coder", "gpt-2", "llama-spm", "starcoder")
"""Those of which reading takes less than a second."""

REFUSED = {
    "baichuan": "the same score",
    "bert-bge": "of the kind 'bert'",
    "deepseek-llm": "how the vocabulary splits",
    "gemma-4": "of the kind 'gemma4'",
    "nomic-bert-moe": "of the kind 't5'",
}

SHOWN = "the way to split"
"""Stands in ``across_words`` where each test writes its own."""

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "don't",
    "I'LL",
    "we've",
    "it's",
    "we're",
    "I'm",
    "they'll",
    "he'd",
    "12",
    "345",
    "67890",
    "1234567",
    "3.14",
    "1,000",
    "hello_world",
    "def",
    "foo(bar):",
    "return",
    "x+y;",
    "//",
    "!=",
    ">=",
    "...",
    "!!!",
    "??",
    "`code`",
    "émigré",
    "naïve",
    "你好",
    "世界",
    "привет",
    "мир",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "ไทย",
    "日本語",
    "かな",
    "한국어",
    "🙂",
    "👨\u200d👩\u200d👧",
    "á",
    "ﬁ",
    "Å",
    "½",
    "²",
    "№",
    "<|x|>",
    "</s>",
]
BETWEEN = ("", " ", " ", "  ", "\n", " \n", "\n\n", "\t", "\r\n", "    ")
CHARACTERS = [chr(n) for n in range(32, 0x3000) if unicodedata.category(chr(n)) not in ("Cn", "Cs")]


def texts(n: int, seed: int) -> Iterator[str]:
    """Words, ASCII, any characters, and runs of one."""
    choose = random.Random(seed)
    for _ in range(n):
        match choose.random():
            case share if share < 0.5:
                yield "".join(f"{choose.choice(WORDS)}{choose.choice(BETWEEN)}" for _ in range(choose.randint(1, 12)))
            case share if share < 0.7:
                yield "".join(chr(choose.randint(1, 126)) for _ in range(choose.randint(1, 40)))
            case share if share < 0.9:
                yield "".join(choose.choice(CHARACTERS) for _ in range(choose.randint(1, 30)))
            case _:
                run = choose.choice(" -=_.#\n") * choose.randint(1, 80)
                yield f"{choose.choice(WORDS)}{run}{choose.choice(WORDS)}"


def made(path: Path, tokenizer: Tokenizer) -> OtherTokenizer:
    found = json.dumps(tokenizer_json(read_header(path, vocab_only=True), tokenizer))
    return OtherTokenizer.from_str(found)


def check(path: Path, n: int) -> None:
    """Compare the ids of ``n`` texts."""
    with open_vocabulary(path) as model:
        other = made(path, model.tokenizer)
        for each in texts(n, seed=n):
            assert other.encode(each).ids == model.tokenizer.encode(each).tolist(), ascii(each)
            bare = model.tokenizer.encode(each, add_special=False).tolist()
            assert other.encode(each, add_special_tokens=False).ids == bare, ascii(each)


@pytest.mark.parametrize("name", sampled(WRITTEN if is_thorough() else QUICK, 2))
def test_the_ids_are_those_of_libllama(library: object, name: str) -> None:
    if not vocabulary_file(name).exists():
        pytest.skip(f"{vocabulary_file(name)} is missing: ./build_llama.sh --dev unpacks it")
    check(vocabulary_file(name), amount(quick=400, thorough=100_000))


def test_the_ids_of_the_embedded_model(library: object) -> None:
    check(EMBEDDED, amount(quick=2000, thorough=100_000))


@pytest.fixture(scope="module")
def across_words(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small byte-level vocabulary whose tokens do not keep to words: its merges were learned without a split.

    So a text that is split elsewhere nearly always has other tokens.
    """
    learned = OtherTokenizer(BPE())
    learned.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(vocab_size=1500, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    learned.train_from_iterator(texts(1000, seed=1), trainer)
    model = json.loads(learned.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    end = struct.pack("<I", len(tokens))
    entries = {
        "model": (STRING, text("gpt2")),
        "pre": (STRING, text(SHOWN)),
        "tokens": (ARRAY, array(STRING, len(tokens) + 1, b"".join(map(text, [*tokens, "<|endoftext|>"])))),
        "token_type": (ARRAY, array(I32, len(tokens) + 1, struct.pack(f"<{len(tokens) + 1}i", *[1] * len(tokens), 3))),
        "merges": (ARRAY, array(STRING, len(merges), b"".join(map(text, merges)))),
        "bos_token_id": (U32, end),
        "eos_token_id": (U32, end),
    }
    architecture = pair("general.architecture", STRING, text("gpt2"))
    return gguf([architecture, *(pair(f"tokenizer.ggml.{name}", *value) for name, value in entries.items())], (), b"")


@pytest.mark.parametrize("pre", sampled(sorted(SPLIT_OF), 6))
def test_a_text_is_split_into_words_as_libllama_does_it(
    library: object, across_words: bytes, tmp_path: Path, pre: str
) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(across_words.replace(text(SHOWN), text(pre)))
    check(path, amount(quick=100, thorough=5000))


def test_a_byte_without_a_token_is_left_out_and_its_neighbours_do_not_merge(
    library: object, across_words: bytes, tmp_path: Path
) -> None:
    path, there = tmp_path / "vocabulary.gguf", across_words.replace(text(SHOWN), text("gpt-2"))
    path.write_bytes(there.replace(text(BYTE_LETTERS[0x7F]), text("\u01ff")))
    choose = random.Random(3)
    with open_vocabulary(path) as model:
        other = made(path, model.tokenizer)
        for each in texts(100, seed=3):
            at = choose.randint(0, len(each))
            found = f"{each[:at]}\x7f{each[at:]}"
            assert other.encode(found).ids == model.tokenizer.encode(found).tolist(), ascii(found)
            assert b"\x7f" not in b"".join(map(model.tokenizer.token_to_bytes, other.encode(found).ids))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name: str) -> None:
    path = vocabulary_file(name)
    if not path.exists():
        pytest.skip(f"{path} is missing: ./build_llama.sh --dev unpacks it")
    with pytest.raises(CannotExpress, match=REFUSED[name]):
        tokenizer_json(read_header(path, vocab_only=True), NOTHING)


def test_an_unknown_way_to_split_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    entries = {
        "model": (STRING, text("gpt2")),
        "pre": (STRING, text("nobody")),
        "tokens": (ARRAY, array(STRING, 2, text("a") + text("b"))),
        "merges": (ARRAY, array(STRING, 0, b"")),
    }
    path.write_bytes(gguf([pair(f"tokenizer.ggml.{name}", *value) for name, value in entries.items()], (), b""))
    with pytest.raises(CannotExpress, match="'nobody'"):
        tokenizer_json(read_header(path, vocab_only=True), NOTHING)


class _Nothing:
    added_bos_id, adds_eos, eos_id, control_tokens = None, False, None, frozenset[str]()

    def whole_tokens(self) -> list[object]:
        return []


NOTHING: object = _Nothing()


def test_merges_of_a_sentence_piece_vocabulary() -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc", "abc", "<0x61>", "a<0x61>"]
    kinds = [2, 1, 1, 1, 1, 1, 1, 6, 6]
    scores = [0.0, -5, -6, -7, -2, -1, -3, 0, 0]
    assert sentence_piece_merges(tokens, scores, kinds) == [["b", "c"], ["a", "b"], ["ab", "c"], ["a", "bc"]]
    with pytest.raises(CannotExpress, match="the same score"):
        sentence_piece_merges(tokens, [0.0, -5, -6, -7, -2, -2, -3, 0, 0], kinds)
    assert sentence_piece_merges(["a", "aa", "aaa"], [0, -1, -1], [1, 1, 1]) == [["aa", "a"], ["a", "aa"], ["a", "a"]]
