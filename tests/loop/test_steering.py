"""Running answers that are changed, over a fake engine in virtual time: what changes, how soon, and for nobody else."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import trio

from tests.support.asking import Client, Harness, Log, asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import FakeChat, serving
from uma_trio.client import Eos, Failure, Inserted, ServerError, Token, ToolCallDelta
from uma_trio.daemon.prompts.tool_prompts import PLAIN_TOOLS, template_chat
from uma_trio.daemon.serving.replaying import replay_of
from uma_trio.daemon.serving.steering import Steering, ends_sentence
from uma_trio.daemon.text.budget import ReasoningLimit
from uma_trio.errors import AnswerNotFound, BadRequest
from uma_trio.models.markers import ReasoningMarkers
from uma_trio.protocol.answers import Steered
from uma_trio.protocol.chat import ChatMessage, Tool
from uma_trio.protocol.queries import SteerQuery

PROMPT = random.Random(4).choices(range(1, 900), k=50)
N = 60
TEXT = [301, 302, 303]
END = [220, 221]
LOOK = Tool(name="look")
LIMIT = ReasoningLimit(
    n_tokens=10**6, end=END, markers=ReasoningMarkers(begin=("222",), end=("220 221",), opened_by=("",))
)


async def until(client: Client, n: int) -> None:
    while len(client.tokens) < n:
        await trio.sleep(0.0005)


def steer(harness: Harness, client: Client, **changes: Any) -> Steering:
    tokens = TEXT if "text" in changes else ()
    limit = LIMIT if "end_reasoning" in changes else None
    steering = Steering(query=SteerQuery(request_id="r", **changes), tokens=tokens, reasoning_limit=limit)
    harness.scheduler.steer(client.answer, steering)
    return steering


def steered(n_before: int, *inserted: int, n: int = N) -> list[int]:
    begun = [*expected_continuation(PROMPT, n_before), *inserted]
    return begun + expected_continuation(PROMPT + begun, n - len(begun))


@pytest.mark.parametrize("options", [{}, {"unified": False}, {"can_truncate": False}], ids=str)
async def test_text_is_appended_and_the_answer_goes_on(autojump_clock, options):
    async with asking(FakeEngine(**options)) as harness:
        client = harness.ask(PROMPT, N)
        await until(client, 8)
        done = await steer(harness, client, text="x").wait()
        await harness.ended(client)
        assert client.tokens == steered(done.after_tokens, *TEXT)
        assert (done.inserted_tokens, client.reason) == (3, "length")
        await harness.clean()


async def test_the_perf_log_knows_that_an_answer_was_changed_also_if_an_earlier_daemon_did_it(autojump_clock):
    async with asking() as harness:
        log = Log()
        plain, client = harness.ask([7], N), harness.ask(PROMPT, N, log=log)
        await until(client, 8)
        await steer(harness, client, text="x").wait()
        await harness.ended(plain, client)
        log.known = log.known[:-5]
        again = harness.ask(PROMPT, N, log=log)
        await harness.ended(again)
        assert again.tokens == client.tokens
        why = [replay_of(each.answer, "hashes").inexact for each in (plain, client, again)]
        assert why == ["", *2 * ["it was changed while it was written"]]
        await harness.clean()


async def test_text_before_the_first_token_follows_it(autojump_clock):
    async with asking() as harness:
        client = harness.ask(PROMPT, N)
        assert (await steer(harness, client, text="x").wait()).after_tokens == 1
        await harness.ended(client)
        assert client.tokens == steered(1, *TEXT)
        await harness.clean()


async def test_reasoning_ends(autojump_clock):
    async with asking() as harness:
        client = harness.ask(PROMPT, N)
        await until(client, 8)
        done = await steer(harness, client, end_reasoning=True, text="x").wait()
        await harness.ended(client)
        assert done.reasoning_ended
        assert client.tokens == steered(done.after_tokens, *END, *TEXT)
        await harness.clean()


async def test_max_tokens_is_lowered_and_raised_again(autojump_clock):
    async with asking() as harness:
        client = harness.ask(PROMPT, N)
        await until(client, 8)
        assert (await steer(harness, client, max_tokens=30).wait()).max_tokens == 30
        assert (await steer(harness, client, max_tokens=40).wait()).max_tokens == 40
        await harness.ended(client)
        assert (client.tokens, client.reason) == (steered(0, n=40), "length")
        late = harness.ask(PROMPT, N)
        await until(late, 8)
        done = await steer(harness, late, max_tokens=2).wait()
        await harness.ended(late)
        assert len(late.tokens) == done.max_tokens == done.after_tokens
        await harness.clean()


async def test_it_stops_now(autojump_clock):
    async with asking() as harness:
        client = harness.ask(PROMPT, N)
        await until(client, 8)
        done = await steer(harness, client, stop="now").wait()
        await harness.ended(client)
        assert (client.tokens, client.reason) == (steered(0, n=done.after_tokens), "stop")
        await harness.clean()


async def test_a_message_begins_an_answer_that_ends_where_it_ends(autojump_clock):
    """The end of the sentence was for the answer before it, also for a later daemon."""
    async with asking() as harness:
        log = Log()
        client = harness.ask(PROMPT, N, log=log)
        await until(client, 8)
        await steer(harness, client, stop="sentence").wait()
        assert client.answer.bounds.stops_at_sentence
        steering = Steering(query=SteerQuery(request_id="r", message="m"), tokens=TEXT)
        harness.scheduler.steer(client.answer, steering)
        await steering.wait()
        assert not client.answer.bounds.stops_at_sentence
        await harness.ended(client)
        assert client.reason == "length"
        log.known = log.known[:-5]
        again = harness.ask(PROMPT, N, log=log)
        assert not again.answer.bounds.stops_at_sentence
        await harness.ended(again)
        assert again.tokens == client.tokens
        await harness.clean()


async def test_sixteen_streams_change_within_two_ticks_and_nobody_else_does(autojump_clock):
    prompts = [[1 + n, *PROMPT] for n in range(16)]
    async with asking(FakeEngine(n_seq_max=16)) as harness:
        clients = [harness.ask(prompt, N) for prompt in prompts]
        for client in clients:
            await until(client, 3)
        changed: dict[Client, int] = {}
        for client in random.Random(7).sample(clients, 8):
            n_before = len(client.answer.tokens)
            done = await steer(harness, client, text="x").wait()
            assert done.after_tokens - n_before <= 2
            changed[client] = done.after_tokens
        await harness.ended(*clients)
        for client, prompt in zip(clients, prompts, strict=True):
            n = changed.get(client)
            begun = [] if n is None else [*expected_continuation(prompt, n), *TEXT]
            assert client.tokens == begun + expected_continuation(prompt + begun, N - len(begun))
        await harness.clean()


async def test_a_change_that_is_not_possible_names_the_remedy(autojump_clock):
    async with asking() as harness:
        client = harness.ask(PROMPT, N)
        await until(client, N - 5)
        with pytest.raises(BadRequest, match="room for 2 more: shorten the text"):
            steer(harness, client, text="x")
        with pytest.raises(BadRequest, match=f"max_tokens {N - 4} leaves no room for text"):
            steer(harness, client, text="x", max_tokens=N - 4)
        await until(client, N - 3)
        with pytest.raises(BadRequest, match="computed already"):
            steer(harness, client, text="x")
        with pytest.raises(BadRequest, match=f"room for max_tokens {N}"):
            steer(harness, client, max_tokens=N + 1)
        steer(harness, client, max_tokens=N)
        with pytest.raises(BadRequest, match="wait for its event"):
            steer(harness, client, stop="now")
        await harness.ended(client)
        await harness.clean()


async def test_an_answer_that_ends_before_its_change_says_so(autojump_clock):
    async with asking() as harness:
        client = harness.ask(PROMPT, N)
        await until(client, 8)
        steering = steer(harness, client, text="x")
        harness.scheduler.cancel(client.answer)
        with pytest.raises(AnswerNotFound, match="ended before"):
            await steering.wait()
        await harness.clean()


@pytest.mark.parametrize("text", ["So it is.", 'He said "no!" ', "Ende。", "a line\n", "Why?)"])
def test_the_end_of_a_sentence(text):
    assert ends_sentence(text)


@pytest.mark.parametrize("text", ["", "So it", "about 3.", "a, b,"])
def test_no_end_of_a_sentence(text):
    assert not ends_sentence(text)


# -- over the socket ----------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hello"}]
HELLO = [byte + 100 for byte in b"hello"]


def prompt_of(tools: list[Tool]) -> list[int]:
    [part] = FakeChat().parts(*template_chat(msgspec.convert(CHAT, list[ChatMessage]), tools, PLAIN_TOOLS))
    return [byte + 100 for byte in part.text.encode()]


INSERTED = [byte + 100 for byte in b"so"]


def expected_text(n_before: int, n: int) -> str:
    begun = [*expected_continuation(HELLO, n_before), *INSERTED]
    return "".join(f"{token} " for token in begun + expected_continuation(HELLO + begun, n - len(begun)))


async def test_a_connection_steers_its_own_request_and_can_still_cancel(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "r", "prompt": "hello", "max_tokens": N, "keep_alive": True})
        await client.receive()
        await client.send({"type": "steer", "request_id": "r", "text": "so", "id": "q"})
        events = [await client.receive()]
        while not isinstance(events[-1], Steered):
            events.append(await client.receive())
        assert (events[-1].id, events[-1].request_id, events[-1].inserted_tokens) == ("q", "r", 2)
        await client.send({"event": "cancel", "id": "r"})
        while not isinstance(events[-1], Eos):
            events.append(await client.receive())
        assert events[-1].reason == "cancelled"


async def test_another_connection_steers_a_detached_answer(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client:
            await client.detach(id="a", prompt="hello", max_tokens=N)
        await trio.sleep(0.1)
        async with harness.client() as client:
            done = await client.steer("a", text="so")
        async with harness.client() as client:
            events = [event async for event in client.attach("a")]
        text = "".join(event.text for event in events if isinstance(event, Token))
        assert text == expected_text(done.after_tokens, N)


@pytest.mark.parametrize("tools", [[], [LOOK]], ids=len)
async def test_a_message_interrupts_the_answer_of_a_session(autojump_clock, tools):
    """What follows answers it.  The transcript has both parts of the answer, and what was inserted where."""
    async with serving() as harness, harness.client() as client:
        fields = {"messages": CHAT, "session_id": "s", "max_tokens": N, "tools": msgspec.to_builtins(tools)}
        await client.send({"id": "r", "keep_alive": True, **fields})
        await client.receive()
        await client.send({"type": "steer", "request_id": "r", "message": "so", "id": "q"})
        events = [await client.receive()]
        while not isinstance(events[-1], Eos):
            events.append(await client.receive())
        [found] = [event.insertion for event in events if isinstance(event, Inserted)]
        n = found.after_tokens
        prompt = prompt_of(tools)
        begun = expected_continuation(prompt, n)
        inserted = [byte + 100 for byte in b"|so|"]
        rest = expected_continuation([*prompt, *begun, *inserted], N - n - len(inserted))
        shown = [event.token_id for event in events if isinstance(event, Token) and event.token_id is not None]
        assert [*begun, *rest] == [begun[0], *shown]
        assert (found.kind, found.tokens, found.text) == ("message", len(inserted), "so")
        transcript = await client.transcript("s", keep_alive=True)
        assert [(each.role, each.content.strip()) for each in transcript.messages] == [
            ("user", "hello"),
            ("assistant", " ".join(map(str, begun))),
            ("user", "so"),
            ("assistant", " ".join(map(str, rest))),
        ]
        assert transcript.messages[-1].generation.insertions == [found]


async def test_a_model_that_calls_a_tool_is_not_interrupted_by_a_message(autojump_clock):
    begins = {expected_continuation(prompt_of([LOOK]), 5)[-1]: b'<tool_call>{"name": "look", "arguments": {"a": "'}
    async with serving(spelled=begins) as harness, harness.client() as client, harness.client() as other:
        await client.send({"id": "r", "messages": CHAT, "tools": [{"name": "look"}], "max_tokens": N})
        while not isinstance(event := await client.receive(), ToolCallDelta):
            assert isinstance(event, Token), event
        with pytest.raises(ServerError, match="the answer calls a tool"):
            await other.steer("r", message="so")
        while isinstance(event, ToolCallDelta):
            event = await client.receive()
        assert isinstance(event, Token | Eos), event


async def test_what_runs_for_another_principal_or_not_at_all_is_not_found(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "r", "prompt": "hello", "max_tokens": N, "principal": "alice"})
        await client.receive()
        for principal, name in (("bob", "r"), (None, "r"), ("alice", "other")):
            async with harness.client(principal=principal) as other:
                with pytest.raises(ServerError, match="E_ANSWER_NOT_FOUND"):
                    await other.steer(name, stop="now")
        async with harness.client(principal="alice") as other:
            assert (await other.steer("r", stop="now")).stop == "now"


async def test_a_change_must_change_something(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"type": "steer", "request_id": "r", "keep_alive": True})
        refused = await client.receive()
        assert isinstance(refused, Failure)
        assert "nothing to change" in refused.message


@pytest.mark.parametrize(
    ("request_fields", "changes", "reason"),
    [
        ({"n": 2}, {"stop": "now"}, "2 answers run as 'r'"),
        ({"constraint": {"regex": "[0-9 ]{200}"}}, {"text": "so"}, "nothing can be inserted"),
        ({}, {"message": "so"}, "only an answer of a chat"),
        ({"prompt": None, "messages": CHAT, "stream": False}, {"message": "so"}, "only a streamed answer"),
        ({}, {"end_reasoning": True}, "no reasoning to end"),
        ({}, {"text": "s" * N}, "shorten the text"),
    ],
    ids=str,
)
async def test_what_cannot_be_changed_is_refused_and_goes_on(autojump_clock, request_fields, changes, reason):
    async with serving() as harness, harness.client() as client:
        fields = {"id": "r", "prompt": "hello", "max_tokens": N, **request_fields}
        await client.send({name: value for name, value in fields.items() if value is not None})
        if fields.get("stream", True):
            await client.receive()
        else:
            await trio.sleep(0.1)
        async with harness.client() as other:
            with pytest.raises(ServerError, match=reason):
                await other.steer("r", **changes)
        events = []
        while (event := await client.receive()) is not None:
            events.append(event)
        assert isinstance(events[-1], Eos)
