"""Queries next to requests, over the socket: tokens, models, principals."""

from __future__ import annotations

import pytest
import trio

from tests.support.fake_engine import N_VOCAB, FakeEngine, expected_continuation
from tests.support.serving import serving
from uma_trio.client import Eos, ServerError, Token
from uma_trio.daemon.doors import connection
from uma_trio.protocol.answers import TokenList
from uma_trio.protocol.events import Failure

PROMPT = [byte + 100 for byte in b"hello"]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]


def texts(events):
    return "".join(event.text for event in events if isinstance(event, Token))


async def all_of(events):
    return [event async for event in events]


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_tokens_of_texts_and_chats_and_back(autojump_clock, encoding):
    async with serving() as harness, harness.client(encoding=encoding) as client:
        found = await client.tokenize("hé", keep_alive=True)
        assert found.tokens == [byte + 100 for byte in "hé".encode()]
        assert found.offsets == [0, 1, 1], "the second byte of é is at the character"
        assert found.text is None
        found = await client.tokenize(messages=CHAT, keep_alive=True)
        assert (found.tokens, found.text) == ([byte + 100 for byte in b"hello|you"], "hello|you")
        assert await client.detokenize([104, 105], keep_alive=True) == "104 105 "
        assert await client.detokenize([]) == ""
        assert await client.receive() is None, "without keep_alive the server closes"


async def test_a_query_is_answered_next_to_a_running_request(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "r", "prompt": "hello", "max_tokens": 50})
        await client.receive()
        for query in ({"type": "tokenize", "text": "hi"}, {"type": "models"}, {"type": "metrics"}):
            await client.send({**query, "id": query["type"]})
        events = []
        while (event := await client.receive()) is not None:
            events.append(event)
        ids = [event.id for event in events]
        assert ids.index("tokenize") < ids.index("models") < ids.index("metrics") < len(ids) - 1
        assert isinstance(events[-1], Eos)


async def test_a_prompt_of_tokens_is_the_prompt_of_their_text(autojump_clock):
    async with serving() as harness, harness.client() as client:
        events = await all_of(client.generate(prompt=PROMPT, max_tokens=5, echo=True, keep_alive=True))
        assert texts(events) == "".join(f"{token} " for token in [*PROMPT, *expected_continuation(PROMPT, 5)])
        first = await client.complete(prompt=PROMPT, session_id="s", max_tokens=3, keep_alive=True)
        assert first.usage.prompt_tokens == 5
        then = await client.complete(prompt=[7, 8], session_id="s", max_tokens=3)
        assert then.usage.prompt_tokens == 5 + 3 + 2, "a session appends tokens as they are"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"id": "q", "prompt": [1, N_VOCAB]}, "E_PROTO_BAD_REQUEST"),
        ({"id": "q", "prompt": [1] * 200_000}, "E_LIMIT_PROMPT_TOO_LARGE"),
        ({"id": "q", "prompt": [1] * 5000}, "E_LIMIT_CONTEXT"),
        ({"id": "q", "type": "tokenize", "tokens": [N_VOCAB]}, "E_PROTO_BAD_REQUEST"),
        ({"id": "q", "type": "tokenize", "tokens": [1] * 200_000}, "E_LIMIT_PROMPT_TOO_LARGE"),
        ({"id": "q", "type": "tokenize", "text": "x" * 300_000}, "E_LIMIT_PROMPT_TOO_LARGE"),
        (
            {"id": "q", "type": "tokenize", "messages": [{"role": "user", "content": "x" * 300_000}]},
            "E_LIMIT_PROMPT_TOO_LARGE",
        ),
        ({"id": "q", "type": "tokenize", "text": "x", "model": "none"}, "E_MODEL_NOT_FOUND"),
    ],
)
async def test_what_cannot_be_answered_is_refused_and_the_connection_goes_on(autojump_clock, message, code):
    async with serving() as harness, harness.client() as client:
        await client.send({**message, "keep_alive": True})
        event = await client.receive()
        assert isinstance(event, Failure)
        assert (event.code, event.id) == (code, "q")
        assert (await client.tokenize("hi")).tokens == [204, 205]


async def test_messages_without_a_template_have_no_tokens(autojump_clock):
    async with serving(has_template=False) as harness:
        async with harness.client() as client:
            with pytest.raises(ServerError) as refused:
                await client.tokenize(messages=CHAT)
            assert refused.value.code == "E_MODEL_NO_CHAT_TEMPLATE"
        async with harness.client() as client:
            assert "chat" not in (await client.models())[0].capabilities


async def test_the_models(autojump_clock):
    async with serving() as harness, harness.client() as client:
        [model] = await client.models()
        info = harness.engine.info
        assert (model.name, model.context, model.parallel) == (harness.service.name, info.n_ctx, info.n_seq_max)
        assert model.context_per_request == info.max_request_tokens
        assert model.capabilities[:2] == ["completion", "chat"]


# -- principals ---------------------------------------------------------------------------------------


async def test_a_principal_of_a_query_sees_its_own_sessions(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.complete(prompt="hello", max_tokens=2, session_id="s", principal="web", keep_alive=True)
        assert await client.sessions(keep_alive=True) == []
        assert [found.session_id for found in await client.sessions(principal="web")] == ["s"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello", "principal": "web"},
        {"prompt": "hello", "principal_weight": 2},
        {"prompt": "hello", "principal_max_requests": 1},
        {"type": "sessions", "principal": "web"},
        {"type": "tokenize", "text": "x", "principal": "web"},
        {"type": "models", "principal": "web"},
        {"type": "metrics", "principal": "web"},
    ],
)
async def test_nobody_else_may_act_for_a_principal(autojump_clock, monkeypatch, fields):
    monkeypatch.setattr(connection, "OWN_PRINCIPAL", "uid:somebody else")
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "q", "keep_alive": True, **fields})
        event = await client.receive()
        assert isinstance(event, Failure)
        assert (event.code, event.id) == ("E_PROTO_BAD_REQUEST", "q")
        assert (await client.tokenize("hi")).tokens == [204, 205]


async def test_a_principal_has_no_more_requests_than_it_may(autojump_clock):
    async with serving() as harness, harness.client() as first, harness.client() as second:
        fields = {"principal": "web", "principal_max_requests": 2}
        await first.send({"id": "a", "prompt": "hello", "max_tokens": 100, "n": 2, **fields})
        await first.receive()
        with pytest.raises(ServerError) as refused:
            await second.complete(prompt="hello", max_tokens=2, keep_alive=True, **fields)
        assert refused.value.code == "E_LIMIT_REQUESTS"
        await second.complete(prompt="hello", max_tokens=2, principal="other", principal_max_requests=1)


async def test_prefill_is_shared_by_weight(autojump_clock):
    """Two principals with endless prompts: tokens are prefilled in the ratio of the weights."""
    engine = FakeEngine(n_ctx=1 << 16, n_seq_max=2, cost_ms=lambda prompt, decodes: prompt)
    async with serving(engine) as harness, harness.client() as heavy, harness.client() as light:
        size = 20_000
        await heavy.send({"id": "h", "prompt": "h" * size, "max_tokens": 1, "principal": "h", "principal_weight": 3})
        await light.send({"id": "l", "prompt": "l" * size, "max_tokens": 1, "principal": "l"})
        with trio.fail_after(10_000):
            while len(found := {each.principal.name: each for each in harness.scheduler.answers()}) < 2:
                await trio.sleep(0.1)
            while found["h"].n_computed < size // 2:
                await trio.sleep(0.1)
        assert found["h"].n_computed / found["l"].n_computed == pytest.approx(3, rel=0.1)


async def test_many_tokens_take_several_events(autojump_clock):
    async with serving() as harness, harness.client() as client:
        text = "hé" * 5000
        await client.send({"type": "tokenize", "text": text, "keep_alive": True})
        events = [await client.receive() for _ in range(4)]
        assert [(len(event.tokens), event.more) for event in events] == [
            (4096, True),
            (4096, True),
            (4096, True),
            (15_000 - 12_288, False),
        ]
        found = await client.tokenize(text, keep_alive=True)
        assert found.tokens == [token for event in events for token in event.tokens]
        assert found.offsets == [offset for event in events for offset in event.offsets]
        assert (await client.detokenize(found.tokens)).split() == [str(token) for token in found.tokens]


@pytest.mark.parametrize("n", [0, 1, 4096, 4097, 20_000])
def test_a_list_of_tokens_is_the_same_after_it_was_divided(n):
    pairs = [[i, i + 1] for i in range(n)]
    for found in (
        TokenList(tokens=[*range(n)], text="a", id="q"),
        TokenList(tokens=[*range(n)], offsets=[*range(n)], bytes=pairs, byte_ranges=pairs),
        TokenList(tokens=[*range(n)], bytes=pairs),
    ):
        events = [*found.divided()]
        assert max(len(event.tokens) for event in events) <= 4096
        assert [event.more for event in events] == [True] * (len(events) - 1) + [False]
        assert TokenList.joined(events) == found
