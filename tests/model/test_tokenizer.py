"""The tokenizer: llama.cpp's golden tokens, offsets, round trips, control tokens, invalid ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import llama_abi
from llama_abi import TokenAttr
from tests.support.profile import thorough
from tests.support.real_daemon import ROOT
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.tokenizer import InvalidTokenId, TokenizedText, Tokenizer, open_vocabulary

FOLDER = ROOT / "build" / "llama.cpp" / "models"
SEPARATOR = b"\n__ggml_vocab_test__\n"

LOSSLESS = ["embedded", "gpt-2", "llama-bpe", "qwen2", "qwen35", "command-r", "llama-spm", "phi-3", "gemma-4"]
"""Vocabularies whose tokens decode to the exact text."""
ESCAPING = {"llama-spm", "phi-3", "gemma-4"}
"""Vocabularies that tokenize U+2581 as a space."""
NORMALISING = ["bert-bge", "nomic-bert-moe"]

QUICK = {"embedded", "llama-bpe", "llama-spm", "bert-bge"}
"""One vocabulary of each kind, for the quick profile."""

AnyTokenizer = Callable[[str], Tokenizer]


def _vocabularies(suffix: str = "") -> list[str]:
    """Names of the vocabulary files that exist and are not Git LFS pointers."""
    return [
        path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
        for path in sorted(FOLDER.glob("ggml-vocab-*.gguf"))
        if _begins(path, b"GGUF") and path.with_name(path.name + suffix).is_file()
    ]


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _each(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else thorough(name) for name in names]


@pytest.fixture(scope="module")
def tokenizer(library: None) -> Iterator[AnyTokenizer]:
    """``tokenizer("llama-spm")`` loads a vocabulary by name, once.  ``embedded`` is the embedded model's."""
    with ExitStack() as stack:
        found: dict[str, Tokenizer] = {}

        def load(name: str) -> Tokenizer:
            if name not in found:
                path = EMBEDDED if name == "embedded" else FOLDER / f"ggml-vocab-{name}.gguf"
                if not path.exists():
                    pytest.skip(f"there is no {path}: ./build_llama.sh --dev unpacks it")
                found[name] = stack.enter_context(open_vocabulary(path)).tokenizer
            return found[name]

        yield load


def test_there_are_golden_tokens() -> None:
    if not FOLDER.is_dir():
        pytest.skip(f"there is no {FOLDER}: ./build_llama.sh --dev unpacks it")
    assert len(_vocabularies(".inp")) > 10


@pytest.mark.parametrize("name", _each(_vocabularies(".inp")))
def test_golden_tokens(tokenizer: AnyTokenizer, name: str) -> None:
    """As in llama.cpp's own test: without added special tokens and without parse_special."""
    texts = Path(FOLDER / f"ggml-vocab-{name}.gguf.inp").read_bytes().split(SEPARATOR)
    lines = Path(FOLDER / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    if texts[-1] == b"":
        texts.pop()
    assert len(lines) > 30
    for text, line in zip(texts, lines, strict=True):
        found = tokenizer(name).encode(text.decode(), add_special=False, parse_special=False)
        assert found.tolist() == [int(word) for word in line.split()], text


# -- round trips and offsets ----------------------------------------------------------------------

TRICKY = st.sampled_from(
    [
        "  ",
        "\n\n",
        " \t",
        "\r\n",
        "'s",
        "don't",
        "1234567",
        "▁",
        "é",
        "e\u0301",
        "🚀",
        "👩‍👩‍👧",
        "\u200d",
        "\0",
        "हिन्दी",
        "ﷺ",
        "Ａ",
        "İ",
    ]
)
TEXTS = st.lists(st.one_of(st.text(max_size=8), TRICKY, st.text("ab .,\n", max_size=12))).map("".join)
"""Any Unicode text, with characters that tokenizers stumble over."""


@pytest.mark.parametrize("name", _each(LOSSLESS))
@pytest.mark.parametrize("special", [False, True])
@given(text=TEXTS)
@example(text="")
@example(text=" ")
@example(text="  leading and trailing  ")
def test_decode_undoes_encode(tokenizer: AnyTokenizer, name: str, special: bool, text: str) -> None:
    chosen = tokenizer(name)
    ids = chosen.encode(text, add_special=special, parse_special=False)
    expected = text.replace("▁", " ") if name in ESCAPING else text
    assert chosen.decode(ids) == expected


@pytest.mark.parametrize("name", _each(LOSSLESS))
@given(text=TEXTS, special=st.booleans())
@example(text="", special=True)
@example(text="é🚀▁ ", special=True)
def test_offsets_cover_the_text_and_spell_it(tokenizer: AnyTokenizer, name: str, text: str, special: bool) -> None:
    chosen = tokenizer(name)
    tokenized = chosen.encode_with_offsets(text, add_special=special, parse_special=False)
    utf8 = text.encode()
    assert tokenized.ids.tolist() == chosen.encode(text, add_special=special, parse_special=False).tolist()
    assert tokenized.offsets is not None
    assert tokenized.offsets.shape == (len(tokenized.ids), 2)
    starts, ends = [0, *tokenized.offsets[:, 1].tolist()], [*tokenized.offsets[:, 0].tolist(), len(utf8)]
    assert starts == ends, "contiguous, from the first byte to the last"
    spelled = [utf8[start:end] for start, end in tokenized.offsets.tolist()]
    if name in ESCAPING:
        spelled = [one.replace("▁".encode(), b" ") for one in spelled]
    shown = [chosen.token_to_bytes(token) for token in tokenized.ids.tolist()]
    differ = [index for index, (one, other) in enumerate(zip(spelled, shown, strict=True)) if one != other]
    assert all(shown[index] == b" " + spelled[index] for index in differ), "except for the space prefix"
    assert len(differ) <= (name in {"llama-spm", "phi-3"})


@pytest.mark.parametrize("name", _each(LOSSLESS))
@given(text=TEXTS)
@example(text="")
@example(text=" x")
@example(text="\ue000")
def test_a_continuation_has_no_space_prefix(tokenizer: AnyTokenizer, name: str, text: str) -> None:
    chosen = tokenizer(name)
    ids = chosen.encode(text, parse_special=False, continues=True).tolist()
    expected = text.replace("▁", " ") if name in ESCAPING else text
    assert b"".join(chosen.tokens_to_bytes(ids)).decode() == expected
    if name not in {"llama-spm", "phi-3"}:
        assert ids == chosen.encode(text, add_special=False, parse_special=False).tolist()


def test_a_continuation_is_tokenized_as_within_the_whole_text(tokenizer: AnyTokenizer) -> None:
    """If the text is split at a space."""
    spm = tokenizer("llama-spm")
    text = "The quick brown fox jumps over"
    at = text.index(" fox")
    parts = [spm.encode(text[:at]), spm.encode(text[at:], continues=True)]
    assert np.concatenate(parts).tolist() == spm.encode(text).tolist()
    assert spm.tokens_to_bytes(spm.encode("</s>x", continues=True)) == [b"</s>", b" x"], "as after any control token"


@pytest.mark.parametrize("name", _each(_vocabularies() or ["embedded"]))
@given(text=TEXTS)
@example(text="Hello World, a  b")
def test_offsets_are_never_wrong(tokenizer: AnyTokenizer, name: str, text: str) -> None:
    """Whatever the vocabulary does to a text, offsets are missing or match the spellings."""
    chosen = tokenizer(name)
    tokenized = chosen.encode_with_offsets(text, add_special=True, parse_special=False)
    if tokenized.offsets is not None:
        utf8 = text.encode()
        for (start, end), piece in zip(tokenized.offsets.tolist(), chosen.tokens_to_bytes(tokenized.ids), strict=True):
            found = utf8[start:end].replace("▁".encode(), b" ")
            assert start == end or found in (piece, piece.removeprefix(b" "), piece.replace("▁".encode(), b" "))
        assert (np.diff(tokenized.offsets.ravel()) >= 0).all()


@pytest.mark.parametrize("name", _each(NORMALISING))
def test_a_text_that_is_normalised_has_no_offsets(tokenizer: AnyTokenizer, name: str) -> None:
    tokenized = tokenizer(name).encode_with_offsets("Ｈello  Wörld 🦙")
    assert tokenized.offsets is None
    assert len(tokenized.ids) > 3


def test_a_byte_without_a_token(tokenizer: AnyTokenizer) -> None:
    """StarCoder has no token for 0xF1.  The byte is lost, so there are no offsets."""
    chosen = tokenizer("starcoder")
    tokenized = chosen.encode_with_offsets("a\U00040000b", add_special=False)
    assert tokenized.offsets is None
    assert chosen.decode(tokenized.ids) == "a\ufffd\ufffd\ufffdb"


def _shown(chosen: Tokenizer, text: str, tokenized: TokenizedText) -> list[tuple[bytes, bytes]]:
    assert tokenized.offsets is not None
    spelled = [text.encode()[start:end] for start, end in tokenized.offsets.tolist()]
    return list(zip(chosen.tokens_to_bytes(tokenized.ids), spelled, strict=True))


def test_added_special_tokens_have_empty_ranges(tokenizer: AnyTokenizer) -> None:
    spm, bert = tokenizer("llama-spm"), tokenizer("bert-bge")
    assert _shown(spm, "Hi", spm.encode_with_offsets("Hi")) == [(b"<s>", b""), (b" Hi", b"Hi")]
    assert _shown(bert, "hi", bert.encode_with_offsets("hi")) == [(b"[CLS]", b""), (b" hi", b"hi"), (b"[SEP]", b"")]
    offsets = bert.encode_with_offsets("hi").offsets
    assert offsets is not None
    assert offsets.tolist() == [[0, 0], [0, 2], [2, 2]]


def test_the_space_prefix_has_an_empty_range(tokenizer: AnyTokenizer) -> None:
    spm = tokenizer("llama-spm")
    text = "🚀</s>\nb</s> c"
    found = _shown(spm, text, spm.encode_with_offsets(text))
    assert [pair for pair in found if pair[0] == b" "] == [(b" ", b"")] * 3
    assert [pair for pair in found if pair[0] == b"</s>"] == [(b"</s>", b"</s>")] * 2
    assert b"".join(spelled for _, spelled in found) == text.encode()
    assert spm.decode(spm.encode(text, add_special=False), special=True) == text


def test_a_control_token_that_strips_whitespace(tokenizer: AnyTokenizer) -> None:
    """Phi-3's control tokens strip the whitespace after them."""
    phi = tokenizer("phi-3")
    text = "<|user|>\n a<|end|> \n<|assistant|>"
    found = _shown(phi, text, phi.encode_with_offsets(text))
    assert found == [
        (b"<s>", b""),
        (b"<|user|>", b"<|user|>"),
        (b" a", b"a"),
        (b"<|end|>", b"<|end|>"),
        (b"<|assistant|>", b"<|assistant|>"),
    ]


# -- control tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _each(["embedded", *_vocabularies()]))
def test_control_tokens_are_parsed_only_with_parse_special(tokenizer: AnyTokenizer, name: str) -> None:
    chosen = tokenizer(name)
    controls = [token for token, kind in enumerate(chosen._vocab.all_attributes()) if TokenAttr.CONTROL in kind]
    assert controls
    for token in {*controls[:50], *controls[-50:]}:
        (spelled,) = chosen.tokens_to_bytes([token])
        text = f"a {spelled.decode()} b"
        assert token in chosen.encode(text, parse_special=True), text
        letters = chosen.encode(text, add_special=False, parse_special=False)
        assert not {*controls} & {*letters.tolist()}, text


def test_a_text_that_begins_with_bos(tokenizer: AnyTokenizer) -> None:
    """BOS is not added twice.  If the text's BOS is plain text, a BOS is added before it."""
    for name in ("embedded", "llama-spm", "llama-bpe"):
        chosen = tokenizer(name)
        text = chosen.bos + "Hello"
        (bos,) = chosen.encode(chosen.bos).tolist()
        read, letters = chosen.encode_with_offsets(text), chosen.encode_with_offsets(text, parse_special=False)
        assert read.ids.tolist().count(bos) == letters.ids.tolist().count(bos) == 1
        assert _shown(chosen, text, read)[0] == (chosen.bos.encode(), chosen.bos.encode())
        assert _shown(chosen, text, letters)[0] == (chosen.bos.encode(), b"")
        assert chosen.decode(letters.ids) == text
        assert chosen.decode(read.ids) == "Hello"
        assert chosen.decode(read.ids, special=True) == text


# -- decoding -------------------------------------------------------------------------------------


def test_an_incomplete_character_is_replaced(tokenizer: AnyTokenizer) -> None:
    gpt = tokenizer("gpt-2")
    ids = gpt.encode("🦙", add_special=False)
    assert len(ids) > 1
    assert "�" in gpt.decode(ids[:-1])
    assert gpt.decode(ids) == "🦙"
    assert gpt.decode([]) == ""


@given(data=st.data())
def test_all_valid_ids_can_be_decoded(tokenizer: AnyTokenizer, data: st.DataObject) -> None:
    for name in ("embedded", "llama-spm"):
        chosen = tokenizer(name)
        ids = data.draw(st.lists(st.integers(0, chosen.n_tokens - 1)))
        joined = b"".join(map(chosen.token_to_bytes, ids)).decode("utf-8", "replace")
        assert chosen.decode(ids).replace(" ", "") == joined.replace(" ", "")
        assert chosen.decode(np.array(ids, np.int32)) == chosen.decode(iter(ids))


@pytest.mark.parametrize("wrong", [-1, -(2**31), 2**31 - 1, 2**40, 2**70, 1.0, "1", None])
def test_invalid_ids(tokenizer: AnyTokenizer, wrong: object) -> None:
    chosen = tokenizer("embedded")
    for ids in ([wrong], [1, wrong], itertools.chain([wrong])):
        with pytest.raises(InvalidTokenId, match=rf"is not in \[0, {chosen.n_tokens}\)"):
            chosen.decode(ids)  # type: ignore[arg-type]
    with pytest.raises(InvalidTokenId):
        chosen.tokens_to_bytes([wrong])  # type: ignore[list-item]


def test_the_first_id_beyond_the_vocabulary(tokenizer: AnyTokenizer) -> None:
    chosen = tokenizer("embedded")
    assert len(chosen.tokens_to_bytes([chosen.n_tokens - 1])) == 1
    for use in (
        chosen.token_to_bytes,
        lambda token: chosen.decode([token]),
        lambda token: chosen.tokens_to_bytes(np.array([token])),
    ):
        for wrong in (chosen.n_tokens, -1):
            with pytest.raises(InvalidTokenId, match=f"token {wrong} is not in"):
                use(wrong)


def test_text_that_is_not_unicode(tokenizer: AnyTokenizer) -> None:
    with pytest.raises(llama_abi.LlamaError, match="not Unicode"):
        tokenizer("embedded").encode_with_offsets("\ud800")
