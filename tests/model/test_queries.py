"""Queries of a real daemon: tokens as a request prefills them, and what the model is."""

from tests.support.real_daemon import asked
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.vocabulary import vocabulary

TEXT = "Füchse 🦊 <|bos|> jump."
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


def test_the_tokens_of_a_text_are_those_of_the_same_prompt(daemon):
    found = asked(daemon, lambda client: client.tokenize(TEXT))
    eos = daemon.ask(prompt=TEXT, max_tokens=3, stream=False).last
    assert len(found.tokens) == eos["usage"]["prompt_tokens"]
    assert daemon.ask(prompt=found.tokens, max_tokens=3, stream=False).last["text"] == eos["text"]
    with vocabulary(EMBEDDED) as tokenizer:
        assert found.tokens == tokenizer.encode(TEXT).tolist()
        encoded = tokenizer.encode_with_offsets(TEXT)
        assert encoded.offsets is not None
        begins = [len(TEXT.encode()[:start].decode("utf-8", "ignore")) for start, _ in encoded.offsets.tolist()]
    assert found.offsets == begins


def test_tokens_become_the_text_again(daemon):
    for options in ({}, {"add_special": False}, {"parse_special": False}):
        found = asked(daemon, lambda client, options=options: client.tokenize(TEXT, **options))
        text = asked(daemon, lambda client, tokens=found.tokens: client.detokenize(tokens))
        assert text.endswith(TEXT)
    bare = asked(daemon, lambda client: client.tokenize(TEXT, add_special=False))
    assert len(bare.tokens) < len(found.tokens), "the control token is one token, and there is no BOS"
    spoken = asked(daemon, lambda client: client.detokenize(bare.tokens, parse_special=False))
    assert spoken == TEXT.replace("<|bos|>", "")


def test_long_texts_and_many_tokens(daemon):
    text = "".join(chr(0x100 + n % 5000) for n in range(60_000))
    found = asked(daemon, lambda client: client.tokenize(text, add_special=False))
    assert found.offsets == sorted(found.offsets)
    assert found.offsets[-1] < len(text)
    assert asked(daemon, lambda client: client.detokenize(found.tokens[:100_000])) == text[: found.offsets[100_000]]


def test_the_tokens_of_a_chat_are_those_that_are_prefilled(daemon):
    found = asked(daemon, lambda client: client.tokenize(messages=CHAT))
    answer = daemon.ask(messages=CHAT, max_tokens=1, echo=True)
    assert len(found.tokens) == answer.last["usage"]["prompt_tokens"]
    assert answer.events[0]["text"] == found.text
    assert TEXT in found.text


def test_the_model(daemon):
    [model] = asked(daemon, lambda client: client.models())
    assert model.name == "embedded"
    assert model.architecture == "llama"
    assert model.quantization in model.description
    assert model.context == 262144
    assert model.parallel == 64
    assert model.context_per_request < model.context
    assert {"completion", "chat"} <= {*model.capabilities}
    assert model.size_bytes < EMBEDDED.stat().st_size
    assert model.created_at == EMBEDDED.stat().st_mtime
    assert model.chat_template
    assert daemon.ask(prompt="Once", max_tokens=1, model=model.name).reason == "length"
