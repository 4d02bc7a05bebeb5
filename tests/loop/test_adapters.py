"""LoRA adapters in the scheduler: one call for all, nobody starves, and no prefix is shared between sets of adapters."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio

from tests.support.asking import asking
from tests.support.controlling import Client as Controlled
from tests.support.controlling import controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount
from tests.support.programs import Back, Fork, Gen, Insert, Program, Say, by_path, expected, straight
from tests.support.serving import remembering, serving
from tests.support.state_files import MemoryFiles
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.errors import AdapterNotFound, BadRequest
from uma_trio.protocol.requests import AdapterChoice

NAMES = ("a", "b", "c", "d")
SHARED = list(range(100, 300))


def choice(name, scale=None):
    return AdapterChoice(name=name, scale=scale)


def engine(**options):
    return FakeEngine(**{"n_seq_max": 16, "n_ctx": 32_768, "adapters": NAMES} | options)


def scales_of(adapters):
    """What the engine gets for the adapters of a request."""
    found = {NAMES.index(each.name): 1.0 if each.scale is None else each.scale for each in adapters}
    return tuple(sorted((number, scale) for number, scale in found.items() if scale))


def is_right(client, adapters=()):
    return client.tokens == expected_continuation(client.prompt, len(client.tokens), adapters=scales_of(adapters))


SETS = [(), (choice("a"),), (choice("a", 0.5),), (choice("b"),), (choice("b"), choice("a", -1.0)), (choice("c", 0.0),)]


@pytest.mark.parametrize("unified", [True, False])
async def test_every_request_is_computed_with_its_own_adapters(autojump_clock, unified):
    async with asking(engine(unified=unified)) as harness:
        clients = [
            (harness.ask(SHARED[: 20 + n], 12, adapters=list(chosen)), chosen) for n in (0, 7) for chosen in SETS
        ]
        await harness.ended(*[client for client, _ in clients])
        for client, chosen in clients:
            assert is_right(client, chosen)
        await harness.clean()


@pytest.mark.parametrize("unified", [True, False])
async def test_every_stream_is_in_every_tick_and_all_adapters_are_in_one_call(autojump_clock, unified):
    async with asking(engine(unified=unified), prefix_reuse=False, speculation=False) as harness:
        clients = [harness.ask([5, 6, n + 1], 60, adapters=[choice(name)]) for n in range(4) for name in NAMES]
        await harness.ended(*clients)
        decoding = [step.calls for step in harness.engine.steps if sum(map(len, step.calls)) == 16]
        assert len(decoding) > 50
        for calls in decoding:
            assert len(calls) == 1
            assert {each.adapters for each in calls[0]} == {((number, 1.0),) for number in range(4)}
        await harness.clean()


async def test_without_adapters_a_step_names_none(autojump_clock):
    async with asking(engine()) as harness:
        await harness.answer([5, 6, 7], 20)
        await harness.answer([5, 6, 7], 20, adapters=[choice("a", 0.0)])
        assert not any(each.adapters for step in harness.engine.steps for call in step.calls for each in call)


@pytest.mark.parametrize("unified", [True, False])
async def test_nobody_starves_next_to_others_with_many_prompts(autojump_clock, unified):
    """Long prompts with other adapters keep coming.  Streams with any adapters stay near their target."""
    async with asking(engine(unified=unified), prefix_reuse=False, speculation=False) as harness:
        streams = [harness.ask([5, n + 1], 100, adapters=[choice(name)]) for n, name in enumerate(NAMES)]
        plain = harness.ask([5, 9], 100)
        prompts = [
            harness.ask([n % 900 + 1 for n in range(700 + size)], 3, adapters=[choice(name)])
            for size, name in enumerate("abcdabcd")
        ]
        with trio.fail_after(600):
            await harness.ended(*streams, plain, *prompts)
        for stream, name in zip(streams, NAMES, strict=True):
            assert is_right(stream, [choice(name)])
            assert max(stream.answer.times.gaps_ms or [0]) < 300
        assert is_right(plain)
        for prompt, name in zip(prompts, "abcdabcd", strict=True):
            assert is_right(prompt, [choice(name)])
        await harness.clean()


# -- no prefix is shared ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("other", [(), (choice("b"),), (choice("a", 0.999),), (choice("a"), choice("b"))], ids=str)
async def test_a_prefix_is_reused_with_exactly_the_same_adapters_only(autojump_clock, unified, other):
    async with asking(engine(unified=unified)) as harness:
        await harness.answer(SHARED, adapters=[choice("a")])
        different = await harness.answer([*SHARED, 7], adapters=list(other))
        assert different.cached == 0
        assert is_right(different, other)
        same = await harness.answer([*SHARED, 8], adapters=[choice("a", 1.0)])
        assert same.cached == len(SHARED)
        assert is_right(same, [choice("a")])
        await harness.clean()


async def test_a_running_prefix_is_not_waited_for_with_other_adapters(autojump_clock):
    async with asking(engine()) as harness:
        first = harness.ask([*SHARED, 1], adapters=[choice("a")])
        second = harness.ask([*SHARED, 2], adapters=[choice("b")])
        third = harness.ask([*SHARED, 3], adapters=[choice("a")])
        await harness.ended(first, second, third)
        assert [client.cached for client in (first, second, third)] == [0, 0, len(SHARED)]
        assert is_right(second, [choice("b")])


async def test_checkpoints_of_recurrent_models_belong_to_their_adapters(autojump_clock):
    async with asking(engine(can_truncate=False)) as harness:
        await harness.answer(SHARED, adapters=[choice("a")])
        other = await harness.answer([*SHARED, 9, 9, 9], adapters=[choice("b")])
        same = await harness.answer([*SHARED, 9, 9, 9], adapters=[choice("a")])
        assert other.cached == 0
        assert same.cached > 0
        assert is_right(other, [choice("b")])
        assert is_right(same, [choice("a")])
        await harness.clean()


async def test_saved_states_belong_to_their_adapters(autojump_clock):
    """Also after a restart, by what the files contain and not by their names."""
    files = MemoryFiles()
    async with asking(engine(), files, offload_after_s=0) as harness:
        await harness.answer(SHARED, session_id="s", adapters=[choice("a")])
        await harness.scheduler.offloader.save_everything()
    assert len(files.scan()) == 1
    async with asking(engine(), files) as harness:
        assert (await harness.answer([*SHARED, 1])).cached == 0
    async with asking(engine(), files) as harness:
        client = await harness.answer([*SHARED, 1], adapters=[choice("a", 0.5)])
        assert client.cached == 0
        assert is_right(client, [choice("a", 0.5)])
    renamed = engine(adapters=("z", "y"))
    first, second = renamed.info.adapters
    for_a = engine().info.adapters[0].fingerprint
    renamed.info = type(renamed.info)(
        **{name: getattr(renamed.info, name) for name in renamed.info.__struct_fields__}
        | {"adapters": (first, type(second)(name="y", path=second.path, fingerprint=for_a))}
    )
    async with asking(renamed, files) as harness:
        assert (await harness.answer([*SHARED, 1], adapters=[choice("z")])).cached == 0
        assert (await harness.answer([*SHARED, 2], adapters=[choice("y")])).cached == len(SHARED)


@pytest.mark.parametrize("seed", range(amount(quick=2, thorough=200)))
async def test_whatever_comes_no_sequence_holds_tokens_of_other_adapters(autojump_clock, seed):
    """Random requests with common prefixes: the fake model's text shows how each token was computed."""
    rng = random.Random(seed)
    can_truncate, unified = rng.random() < 0.7, rng.random() < 0.5
    fake = engine(
        can_truncate=can_truncate,
        unified=unified,
        n_seq_max=rng.choice([2, 4, 16]),
        repeats=rng.choice([0, 3]),
        draft_errors=rng.choice([None, 0, 3]),
    )
    async with asking(fake, parallel=fake.info.n_seq_max) as harness:
        clients = []
        for _ in range(60):
            chosen = rng.choice(SETS)
            prompt = [*SHARED[: rng.choice([40, 120, 200])], *rng.choices(range(1, 90), k=rng.randrange(1, 40))]
            client = harness.ask(prompt, rng.randrange(1, 30), adapters=list(chosen), speculate=rng.random() < 0.5)
            clients.append((client, chosen))
            await trio.sleep(rng.choice([0, 0.01, 0.2]))
            if rng.random() < 0.15:
                harness.scheduler.cancel(rng.choice(clients)[0].answer)
            if rng.random() < 0.05:
                fake.fail_next = rng.choice([EngineError("broken"), EngineDied("gone")])
        await harness.ended(*[client for client, _ in clients])
        for client, chosen in clients:
            repeats = {"repeats": fake.repeats} if fake.repeats else {}
            expected = expected_continuation(client.prompt, len(client.tokens), adapters=scales_of(chosen), **repeats)
            assert client.tokens == expected
        await harness.clean()


# -- recovery, refusals, names ------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [EngineError("broken"), EngineDied("gone")])
async def test_a_text_with_a_crash_in_the_middle_is_that_without(autojump_clock, failure):
    async with asking(engine()) as harness:
        clients = [(harness.ask([5, n + 1], 40, adapters=list(chosen)), chosen) for n, chosen in enumerate(SETS)]
        await trio.sleep(0.2)
        harness.engine.fail_next = failure
        await harness.ended(*[client for client, _ in clients])
        for client, chosen in clients:
            assert len(client.tokens) == 40
            assert is_right(client, chosen)
        await harness.clean()


async def test_a_request_that_kills_the_engine_is_found_among_others_with_its_adapters(autojump_clock):
    async with asking(engine()) as harness:
        harness.engine.poison = 77
        good = [harness.ask([5, n + 1], 30, adapters=[choice(name)]) for n, name in enumerate("aabb")]
        bad = harness.ask([77, 5], 30, adapters=[choice("a")])
        await harness.ended(*good, bad)
        assert bad.reason == "E_RUNTIME_DECODE"
        for client, name in zip(good, "aabb", strict=True):
            assert is_right(client, [choice(name)])


async def test_unknown_names_and_names_given_twice_are_refused(autojump_clock):
    async with asking(engine()) as harness:
        with pytest.raises(AdapterNotFound, match="no adapter 'x'; it has a, b, c, d"):
            harness.ask([1, 2], adapters=[choice("x")])
        with pytest.raises(BadRequest, match="'a' twice"):
            harness.ask([1, 2], adapters=[choice("a"), choice("a", 0.5)])
    async with asking(engine(adapters=())) as harness:
        with pytest.raises(AdapterNotFound, match="it has none"):
            harness.ask([1, 2], adapters=[choice("a")])


async def test_a_model_with_an_adapter_has_a_name_of_its_own(autojump_clock):
    async with serving(engine()) as harness:
        async with harness.client() as client:
            [model] = await client.models()
        assert [each.name for each in model.adapters] == list(NAMES)
        request = {"prompt": [5, 6], "max_tokens": 5, "temperature": 0, "stream": False}
        texts = []
        for fields in ({"model": "fake:b"}, {"adapters": [{"name": "b"}]}, {"model": "fake"}):
            async with harness.client() as client:
                texts += [event.text async for event in client.generate(**request, **fields)]
        assert texts[0] == texts[1] != texts[2]


async def test_a_session_that_changes_its_adapters_is_prefilled_again(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(engine(), storage) as harness, harness.client() as client:

            async def turn(n, *adapters):
                fields = {"prompt": [n] * 40, "max_tokens": 5, "session_id": "s", "keep_alive": True}
                events = [each async for each in client.generate(id=str(n), adapters=list(adapters), **fields)]
                return events[-1].usage

            assert (await turn(1, {"name": "a"})).cached_tokens == 0
            assert (await turn(2, {"name": "a"})).cached_tokens >= 40
            changed = await turn(3)
            assert (changed.cached_tokens, changed.prompt_tokens) == (0, 3 * 40 + 2 * 5)
            assert (await turn(4)).cached_tokens >= 120


async def test_texts_with_different_adapters_are_embedded_in_different_chunks(autojump_clock):
    async with serving(engine()) as harness:
        texts = [[5, 6, n + 1] for n in range(6)]
        found = {}

        async def embed(name, adapters):
            async with harness.client() as client:
                found[name] = (await client.embed(texts, adapters=adapters)).embeddings

        async with trio.open_nursery() as nursery:
            for number, name in enumerate(("", "a", "b", "a")):
                nursery.start_soon(embed, f"{name}{number}", [{"name": name}] if name else [])
        assert found["a1"] == found["a3"]
        assert found["0"] != found["a1"] != found["b2"]
        steps = [step for step in harness.engine.steps if step.embeddings]
        assert {step.embedding_adapters for step in steps} == {(), ((0, 1.0),), ((1, 1.0),)}
        async with harness.client() as client:
            assert (await client.embed(texts, model="fake:b")).embeddings == found["b2"]


@pytest.mark.parametrize("unified", [True, False])
async def test_forks_of_a_controller_keep_its_adapters(autojump_clock, unified):
    """Forks equal separate runs with the same adapters, next to the same program without."""
    script = [Say(list(range(100, 200))), Fork([[Gen(5)], [Insert([7, 8]), Gen(6)], [Gen(4), Back(3, [11]), Gen(2)]])]
    async with controlling({"program": Program}, engine(unified=unified)) as harness:

        async def run(program, **fields):
            client = Controlled()
            await harness.done(await harness.control("program", client, 300, argument=program, **fields))
            return client

        found = {}
        async with trio.open_nursery() as nursery:

            async def keep(name, **fields):
                client = await run(script, id=name, **fields)
                found[name] = by_path(client, client.tokens)

            nursery.start_soon(partial(keep, "with", adapters=[choice("a")]))
            nursery.start_soon(partial(keep, "without"))
        assert found["without"] == expected(script)
        assert found["with"].keys() == found["without"].keys()
        for number, (path, tokens) in enumerate(expected(script).items()):
            alone = await run(straight(script, [number]), adapters=[choice("a")])
            assert alone.tokens[0] == found["with"][path] != tokens
        await harness.clean()
