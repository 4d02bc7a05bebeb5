"""A later turn of a chat with pictures keeps the tokens of the turns before, and tokenizes only what is new."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.documents import ROOT
from uma_trio.config import Limits
from uma_trio.daemon.prompts.chat import ChatTemplate
from uma_trio.daemon.prompts.chosen_template import choose_template
from uma_trio.daemon.prompts.control_tokens import ControlTokens
from uma_trio.daemon.prompts.media import take_pictures
from uma_trio.daemon.prompts.prompt import History, Prompt, PromptMaker
from uma_trio.encoder.encoded import EncodedMedia, RowBlock, RowFile, placeholders
from uma_trio.models.packaged import EMBEDDED
from uma_trio.protocol.chat import ChatMessage, ContentPart
from uma_trio.protocol.requests import Generate
from uma_trio.tokenizer.tokenizer import Tokenizer, open_vocabulary

VOCABULARIES = {"embedded": EMBEDDED, "sentencepiece": ROOT / "build/llama.cpp/models/ggml-vocab-llama-spm.gguf"}
QUESTION = "What do you see in this picture? " * 20


@pytest.fixture(scope="module", params=VOCABULARIES)
def maker(request: pytest.FixtureRequest, library: object) -> Iterator[PromptMaker]:
    path = VOCABULARIES[request.param]
    if not path.exists():
        pytest.skip("the library was built without its sources: ./build_llama.sh --dev keeps them")
    with open_vocabulary(path) as vocabulary, contextlib.ExitStack() as stack:
        tokenizer = vocabulary.tokenizer
        controls = ControlTokens(tokenizer.control_tokens, tokenizer.user_defined_controls)
        source = choose_template("chatml").text
        chat = ChatTemplate(source, bos=tokenizer.bos, eos=tokenizer.eos, controls=controls)
        stack.callback(chat.close)
        yield PromptMaker(tokenizer, chat, Limits(max_prompt_bytes=1 << 20))


def media(tokenizer: Tokenizer, name: bytes, *, around: bool = False) -> EncodedMedia:
    """A picture of two blocks with text between them; with ``around``, also before and after."""
    blocks = [RowBlock(3), RowBlock(4, columns=2)]
    ids, text = placeholders(name * 32, blocks), tokenizer.encode("<a>", add_special=False)
    pieces = [ids[:3], text, ids[3:]]
    return EncodedMedia(
        np.concatenate([text, *pieces, text] if around else pieces), RowFile.of(np.zeros((7, 2), np.float32)), blocks
    )


def user(*parts: bytes | str) -> ChatMessage:
    content = [
        ContentPart(text=part) if isinstance(part, str) else ContentPart(type="image", data=part) for part in parts
    ]
    return ChatMessage(role="user", content=content)


def made(
    maker: PromptMaker, history: History | None, messages: list[ChatMessage], encoded: list[EncodedMedia]
) -> Prompt:
    past = () if history is None else history.messages
    request = Generate(id="r", messages=take_pictures(past, messages)[0])
    return maker._make(request, history, encoded)


@pytest.mark.parametrize("around", [False, True])
def test_a_second_turn_tokenizes_only_what_is_new(
    maker: PromptMaker, monkeypatch: pytest.MonkeyPatch, around: bool
) -> None:
    tokenizer = maker.tokenizer
    one, two, three = (media(tokenizer, name, around=around) for name in (b"1", b"2", b"3"))
    asked = user(b"1", QUESTION, b"2", QUESTION)
    first = made(maker, None, [asked], [one, two])
    # an answer whose text would get other tokens
    answer = [tokenizer.encode(letter, add_special=False, continues=True) for letter in "A large house"]
    past = np.concatenate([first.tokens, *answer])
    history = History(past, [asked, ChatMessage(role="assistant", content="A large house")])
    counted: list[str] = []
    encode = Tokenizer.encode

    def recorded(self: Tokenizer, text: str, **options: Any) -> Any:
        counted.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    second = made(maker, history, [user("And ", b"3", "?")], [one, two, three])
    assert sum(map(len, counted)) < 100, counted
    assert np.array_equal(second.tokens[: len(past)], past)
    assert [(each.start, each.end, each.first) for each in second.media[:4]] == [
        (each.start, each.end, each.first) for each in first.media
    ]
    for at, rows in enumerate(second.media):
        file = (one, two, three)[at // 2]
        assert rows.file is file.rows
        found = file.tokens[file.tokens >= 1 << 30][rows.first : rows.first + rows.block.n]
        assert np.array_equal(second.tokens[rows.start : rows.end], found)
    counted.clear()
    other = made(maker, history, [user("And?")], [one, three])
    assert sum(map(len, counted)) > 2 * len(QUESTION), "another picture is in the place of the second one"
    assert np.array_equal(other.media[-1].file.read(0, 1), three.rows.read(0, 1))


def test_the_tokens_of_a_turn_are_those_of_the_whole_chat(maker: PromptMaker) -> None:
    """Where the answer has the tokens of its text."""
    tokenizer = maker.tokenizer
    one, two = media(tokenizer, b"1"), media(tokenizer, b"2")
    asked, answer = user(b"1", "What is this?"), ChatMessage(role="assistant", content="A house")
    first = made(maker, None, [asked], [one])
    past = np.concatenate([first.tokens, tokenizer.encode("A house", add_special=False, continues=True)])
    new = user("And ", b"2", " this?")
    second = made(maker, History(past, [asked, answer]), [new], [one, two])
    whole = made(maker, None, [asked, answer, new], [one, two])
    assert second.tokens.tolist() == whole.tokens.tolist()
    assert [(each.start, each.first) for each in second.media] == [(each.start, each.first) for each in whole.media]
