"""Calls of decodes with gaps in their sequence ids, through llama.cpp with per-sequence KV.

The sequences in the gaps belong to ended requests, whose tokens later requests reuse, to prompts that are being
prefilled and to clients that do not read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from tests.support.asking import Client
from tests.support.engine_contract import alone, greedy, prefill_input, state_sizes, step
from tests.support.profile import thorough
from tests.support.random_adapters import two_adapters
from tests.support.random_models import random_model
from tests.support.serving import settings
from tests.support.state_files import memory_file
from uma_trio import config
from uma_trio.daemon.engines.link import ThreadLauncher
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.policy.cost import CostModel, LinearModel
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.engine_link.interrupts import Interrupts, new_file
from uma_trio.engine_link.kv_ops import CopyPrefix, SaveState, Truncate
from uma_trio.engine_link.messages import EngineError, SampleRequest, Start, Step, StepInput, StepInterrupted
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.models.packaged import EMBEDDED
from uma_trio.principal import Principal
from uma_trio.protocol.requests import Generate
from uma_trio.telemetry.perf_records import TickRecord

TEXTS = (
    "The capital of France",
    "Once upon a time a fox",
    "Monday, Tuesday, Wednesday,",
    "1 2 3 4 5 6",
    "The grey goose and the green frog",
    "Count from 1 to",
)
END_OF_LONG_TEXTS = " and the brown bear near the old mill sang to the moon, and the grey goose and the frog"
"""Makes a text of more than ``MIN_SHARED_TOKENS``."""

N = 24
"""Tokens of an answer."""


@pytest.fixture(scope="module", params=["on", "off"])
def flash_attn(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def open_engine(library: None) -> Iterator[Callable[..., Any]]:
    from uma_trio.engine.llama import LlamaEngine

    made = []

    def open_engine(flash_attn: str = "on", adapters: Any = (), path: Path = EMBEDDED, **settings: Any) -> LlamaEngine:
        options: dict[str, Any] = {"ctx": 8 * 512, "parallel": 8, "batch_tokens": 64, "threads": 1} | settings
        wanted = config.Model(**{"kv_unified": "off", "flash_attn": flash_attn} | options)
        made.append(LlamaEngine(path, wanted, adapters=adapters))
        return made[-1]

    yield open_engine
    for engine in made:
        engine.close()


@pytest.fixture
def engine(open_engine: Callable[..., Any], flash_attn: str) -> Any:
    return open_engine(flash_attn)


@pytest.fixture(scope="module")
def prompts(library: None) -> list[list[int]]:
    from uma_trio.tokenizer.tokenizer import open_vocabulary

    with open_vocabulary(EMBEDDED) as vocabulary:
        return [vocabulary.tokenizer.encode(text).tolist() for text in TEXTS]


class Streams:
    """Sequences that decode together.

    Args:
        prompts: of the sequences 0, 1, ...
        sample: (stream, number of the token) -> how it is sampled.
    """

    def __init__(self, engine: Any, prompts: list[list[int]], sample: Callable[[int, int], SampleRequest]) -> None:
        self.engine, self.prompts, self.sample = engine, prompts, sample
        self.answers: dict[int, list[int]] = {}

    def begin(self, *seq_ids: int) -> None:
        for seq in seq_ids:
            prompt = StepInput(seq, 0, self.prompts[seq], [self.sample(seq, 0)])
            self.answers[seq] = list(self.engine.step(Step([Truncate(seq)], [[prompt]])).tokens)

    def inputs(self, *seq_ids: int) -> list[StepInput]:
        found = []
        for seq in seq_ids:
            answer = self.answers[seq]
            at = len(self.prompts[seq]) + len(answer) - 1
            found.append(StepInput(seq, at, answer[-1:], [self.sample(seq, len(answer))]))
        return found

    def decode(self, *seq_ids: int, n: int = 1) -> None:
        for _ in range(n):
            tokens = self.engine.step(step(*self.inputs(*seq_ids))).tokens
            for seq, token in zip(seq_ids, tokens, strict=True):
                self.answers[seq].append(token)


def greedily(stream: int, n: int) -> SampleRequest:
    return greedy(n)


def sampled(stream: int, n: int) -> SampleRequest:
    return SampleRequest(SamplingParams(1.0, 40, 0.95, seed=100 + stream), n)


def rows_of_last_call(engine: Any) -> int:
    found: int = engine._batch.n_tokens
    return found


def state(engine: Any, seq: int) -> bytes:
    """Keys and values of all tokens of a sequence."""
    [size] = state_sizes(engine, seq)
    fd = memory_file(bytes(size))
    try:
        output = engine.step(Step([SaveState(seq, fd, 0, size)]))
        assert not output.refused
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


class _Performance(ctypes.Structure):
    """``llama_perf_context_data``."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("start_ms", "load_ms", "p_eval_ms", "eval_ms")),
        *((name, ctypes.c_int32) for name in ("n_p_eval", "n_eval", "n_reused")),
    ]


def n_graphs_reused(engine: Any) -> int:
    """How many passes had the same shape and the same sequences as the pass before, so llama.cpp kept its graph."""
    function = engine._model.library.c.llama_perf_context
    function.restype, function.argtypes = _Performance, [ctypes.c_void_p]
    found: int = function(engine._context._pointer).n_reused
    return found


# -- what llama.cpp computes ---------------------------------------------------------------------------


def test_a_call_with_gaps_is_one_pass(engine: Any, prompts: list[list[int]]) -> None:
    """Calls of the same sequences reuse the graph of the call before only if each call is one pass."""
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 2, 4, 5)
    for is_filled in (True, False, True):
        engine._info = msgspec.structs.replace(engine.info, fills_gaps=is_filled)
        streams.decode(0, 2, 4, 5)
        assert rows_of_last_call(engine) == (6 if is_filled else 4)
        before = n_graphs_reused(engine)
        streams.decode(0, 2, 4, 5, n=5)
        assert n_graphs_reused(engine) - before == (5 if is_filled else 0)


@pytest.mark.parametrize(
    ("sample", "flash_attn"),
    [
        (greedily, "on"),
        thorough(greedily, "off"),
        thorough(sampled, "on"),
    ],  # one row and several are rounded differently without it
    ids=["greedy", "greedy, padded", "sampled"],
    indirect=["flash_attn"],
)
def test_streams_next_to_ended_ones_have_the_same_text_as_alone(
    engine: Any, prompts: list[list[int]], sample: Callable[[int, int], SampleRequest]
) -> None:
    streams = Streams(engine, prompts, sample)
    expected = {}
    for seq in range(6):
        streams.begin(seq)
        streams.decode(seq, n=2 * N)
        expected[seq] = streams.answers[seq]
        engine.step(step(removing=[seq]))
    streams.begin(*range(6))
    streams.decode(*range(6), n=8)
    ended = {seq: state(engine, seq) for seq in (1, 3)}
    streams.decode(0, 2, 4, 5, n=N)
    assert rows_of_last_call(engine) == 6
    assert {seq: state(engine, seq) for seq in (1, 3)} == ended, "keys and values of other sequences have changed"
    assert engine.used_cells() == {seq: len(prompts[seq]) + len(streams.answers[seq]) - 1 for seq in range(6)}

    streams.decode(1, 3, 4, n=N - 8)  # requests that reuse all that the ended ones have left
    assert rows_of_last_call(engine) == 4
    for seq, answer in streams.answers.items():
        assert answer == expected[seq][: len(answer)], seq
    assert min(map(len, streams.answers.values())) >= N


def test_empty_sequences_stay_empty(engine: Any, prompts: list[list[int]]) -> None:
    expected = alone(engine, prompts[5], 4, seq_id=7)
    streams = Streams(engine, [prompts[0]] * 7 + [prompts[5]], greedily)
    streams.begin(0, 7)
    streams.decode(0, 7, n=3)
    assert rows_of_last_call(engine) == 8
    assert engine.used_cells() == {0: len(prompts[0]) + 3, 7: len(prompts[5]) + 3}
    assert streams.answers[7] == expected
    assert alone(engine, prompts[5], 4, seq_id=3) == expected


def test_a_prompt_that_is_being_prefilled_goes_on(engine: Any, prompts: list[list[int]]) -> None:
    expected = alone(engine, prompts[1], 4)
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 2)
    engine.step(step(StepInput(1, 0, prompts[1][:3], ())))
    rest = prefill_input(1, prompts[1][3:], 3)
    [*decoded, first] = engine.step(Step((), [streams.inputs(0, 2), [rest]])).tokens
    for seq, token in zip((0, 2), decoded, strict=True):
        streams.answers[seq].append(token)
    streams.answers[1] = [first]
    streams.decode(0, 1, 2, n=3)
    assert streams.answers[1] == expected


def test_a_copy_that_the_call_makes_is_whole(engine: Any, prompts: list[list[int]]) -> None:
    """llama.cpp copies keys and values in the next call, which has a row for the copy as well."""
    expected = alone(engine, prompts[0], 4)
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 3)
    n = len(prompts[0])
    first = streams.answers[0][0]
    tokens = engine.step(Step([CopyPrefix(0, 1, n)], [streams.inputs(0, 3)])).tokens
    assert rows_of_last_call(engine) == 4
    assert [first, tokens[0]] == expected[:2]
    assert engine.used_cells() == {0: n + 1, 1: n, 3: len(prompts[3]) + 1}
    streams.prompts, streams.answers = [prompts[0]] * 4, {1: [first]}
    streams.decode(1, n=3)
    assert streams.answers[1] == expected


def test_with_an_adapter_the_other_sequences_stay_without(open_engine: Callable[..., Any], prompts: Any) -> None:
    engine = open_engine(adapters=two_adapters(EMBEDDED))
    expected = alone(engine, prompts[1], 8)
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 1, 2)
    before = state(engine, 1)
    for _ in range(4):
        adapted = Step((), [[msgspec.structs.replace(each, adapters=((0, 1.0),)) for each in streams.inputs(0, 2)]])
        for seq, token in zip((0, 2), engine.step(adapted).tokens, strict=True):
            streams.answers[seq].append(token)
        assert rows_of_last_call(engine) == 3
    assert state(engine, 1) == before
    streams.decode(1, n=7)
    assert streams.answers[1] == expected


# -- where no rows are added ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["cells", "positions"])
def test_a_full_sequence_gets_no_row(open_engine: Callable[..., Any], prompts: list[list[int]], limit: str) -> None:
    """Some models have a table of positions that ends where they were trained to, before the cells do."""
    path = EMBEDDED if limit == "cells" else random_model("1x64", ctx=200)
    engine = open_engine(path=path, ctx=4 * 256, parallel=4)
    n = engine.info.max_request_tokens
    assert n == (256 if limit == "cells" else 200)
    assert engine.info.n_ctx_seq == 256
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 3)
    full = (prompts[1] * n)[: n - 1]
    for at in range(0, len(full), 64):
        engine.step(step(StepInput(1, at, full[at : at + 64], ())))
    streams.decode(0, 3)
    assert rows_of_last_call(engine) == 4, "there is room for one more token"
    engine.step(step(StepInput(1, n - 1, prompts[1][:1], ())))
    streams.decode(0, 3)
    assert rows_of_last_call(engine) == 2
    assert engine.used_cells() == {0: len(prompts[0]) + 2, 1: n, 3: len(prompts[3]) + 2}
    assert streams.answers[0] == alone(engine, prompts[0], 3)


def test_drafts_and_other_orders_get_no_rows(engine: Any, prompts: list[list[int]]) -> None:
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 2, 4)
    plain, drafts = streams.inputs(0, 2), streams.inputs(4)
    drafts[0].tokens, drafts[0].samples = [*drafts[0].tokens, 7], [greedy(1), greedy(2)]
    engine.step(step(*plain, *drafts))
    assert rows_of_last_call(engine) == 4
    engine.step(step(removing=(0, 2, 4)))
    streams.begin(0, 2, 4)
    engine.step(step(*streams.inputs(4, 0, 2)))
    assert rows_of_last_call(engine) == 3


@pytest.mark.parametrize(("kv_unified", "fills"), [("on", False), ("off", True)])
def test_only_per_sequence_kv_has_gaps(open_engine: Callable[..., Any], kv_unified: str, fills: bool) -> None:
    assert open_engine(kv_unified=kv_unified).info.fills_gaps is fills


# -- failures ------------------------------------------------------------------------------------------


def test_after_an_abort_nothing_is_left_of_the_rows(engine: Any, prompts: list[list[int]]) -> None:
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 1, 3)
    before = engine.used_cells()
    engine.abort()
    with pytest.raises(EngineError, match="aborted"):
        streams.decode(0, 3)
    assert rows_of_last_call(engine) == 4
    assert engine.used_cells() == before


@pytest.mark.parametrize("in_second_call", [False, True])
def test_an_interrupted_step_leaves_the_sequences_as_they_were(
    engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, in_second_call: bool
) -> None:
    """Its first call decodes next to filler rows, its second one begins a prompt."""
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 1, 3)
    prompt = prefill_input(2, prompts[2])
    gives_way = Step((), [streams.inputs(0, 3), [prompt]], 7, gives_way=True)
    before = engine.used_cells()
    fd = new_file()
    engine.interrupts = Interrupts(fd)
    os.close(fd)
    if in_second_call:
        sample = engine._sample

        def sample_and_set(*arguments: Any) -> Any:
            engine.interrupts.set(7)
            return sample(*arguments)

        monkeypatch.setattr(engine, "_sample", sample_and_set)
    else:
        engine.interrupts.set(7)
    with pytest.raises(StepInterrupted):
        engine.step(gives_way)
    assert engine.used_cells() == before
    monkeypatch.undo()
    streams.decode(1)  # no other step has this flag
    engine.interrupts.clear(7)
    found = engine.step(gives_way).tokens
    assert found == engine.step(Step([Truncate(2), *rewound(streams, 0, 3)], gives_way.calls)).tokens
    assert [*found[:2]] == [alone(engine, prompts[seq], 2)[1] for seq in (0, 3)]


def rewound(streams: Streams, *seq_ids: int) -> list[Truncate]:
    """Remove the last token of each."""
    return [Truncate(each.seq_id, each.position) for each in streams.inputs(*seq_ids)]


def test_after_a_failed_call_nothing_is_left_of_the_rows(
    engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_abi

    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 1, 3)
    before = engine.used_cells()
    computes = engine._context.decode

    def fails_at_its_end(batch: Any) -> int:
        computes(batch)
        raise llama_abi.LlamaError("the backend failed", code=-3)

    monkeypatch.setattr(engine._context, "decode", fails_at_its_end)
    with pytest.raises(EngineError, match="the backend failed"):
        streams.decode(0, 3)
    assert rows_of_last_call(engine) == 4
    computed = {0: before[0] + 1, 3: before[3] + 1}
    assert engine.used_cells() == before | computed, "only the rows that were asked for may be left"


def test_a_row_that_cannot_be_removed_fails_the_step(
    engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the sequence would go on behind a token that nobody has written."""
    streams = Streams(engine, prompts, greedily)
    streams.begin(0, 1, 3)
    monkeypatch.setattr(engine._context, "seq_remove", lambda seq_id, position: False)
    with pytest.raises(EngineError, match="cannot remove"):
        streams.decode(0, 3)


# -- with the scheduler --------------------------------------------------------------------------------

FILLS_ALWAYS = CostModel(LinearModel((10.0, 0.0, 0.1, 0.1, 0.0)), LinearModel((10.0, 10.0, 0.1, 0.1, 0.0)))
"""A call takes 10 ms and a row 0.01 ms, as on a GPU."""


class Records:
    """A perf log."""

    def __init__(self) -> None:
        self.ticks: list[TickRecord] = []

    def write(self, record: Any) -> None:
        if isinstance(record, TickRecord):
            self.ticks.append(record)


async def test_streams_between_which_others_end(
    open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "observed", lambda self, work, ms: self)
    calls: list[tuple[int, int]] = []  # decodes and rows of each call
    opened = []

    def open_and_watch(start: Start, on_progress: Any) -> Any:
        engine = open_engine(batch_tokens=512)  # all prompts in one step
        launch = engine._launch
        opened.append(engine)

        def watched(inputs: Any) -> float:
            at: float = launch(inputs)
            calls.append((len(inputs), rows_of_last_call(engine)))
            return at

        engine._launch = watched
        return engine

    start, records = Start(EMBEDDED, config.Model()), Records()
    async with trio.open_nursery() as nursery:
        launcher = ThreadLauncher(nursery, open_and_watch)
        link = launcher.launch("embedded")
        assert await link.load(start, lambda progress: None, lambda: True)
        [engine] = opened
        prompts = [engine.tokenizer.encode(text + END_OF_LONG_TEXTS).tolist() for text in TEXTS]
        supervised = SupervisedEngine(launcher, start, link, config.Engine())
        scheduler = Scheduler(supervised, engine.tokenizer.token_to_bytes, settings(speculation=False), FILLS_ALWAYS)
        scheduler.sinks.append(records)
        await nursery.start(scheduler.run)

        async def answers(*requests: tuple[int, int], **fields: Any) -> list[Client]:
            """Greedy answers at once: to which prompts, and of how many tokens."""
            clients = []
            for n, max_tokens in requests:
                client = Client(prompts[n])
                request = Generate(
                    id=str(n), prompt="", max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields
                )
                prompt = Prompt(np.asarray(prompts[n], np.int32), "")
                [client.answer] = scheduler.submit(PreparedRequest(request, prompt, client, Principal("uid:0")))
                clients.append(client)
            with trio.fail_after(60):
                for client in clients:
                    await client.answer.done.wait()
                await scheduler.wait_idle()
            assert engine.used_cells() == scheduler.cache.held()
            return clients

        alone = [(await answers((n, 40), cache_prompt=False))[0].tokens for n in range(6)]
        calls.clear()
        records.ticks.clear()
        before = scheduler.telemetry.totals["tokens"]
        requests = [(0, 40), (1, 6), (2, 40), (3, 12), (4, 40), (5, 40)]
        together = await answers(*requests)
        for (n, length), client in zip(requests, together, strict=True):
            assert client.tokens == alone[n][:length], n
        assert any(rows > n for n, rows in calls), "no call had a gap"
        assert scheduler.telemetry.totals["tokens"] - before == sum(length for _, length in requests)
        assert sum(tick.tokens for tick in records.ticks) == sum(length for _, length in requests)
        assert max(len(tick.decode_seq_ids) for tick in records.ticks) == 6
        assert [tick.decode_calls for tick in records.ticks if len(tick.decode_seq_ids) == 4][-1] == 1

        for n in (1, 3):
            [again] = await answers((n, 40))
            assert again.tokens == alone[n], "what the ended request left is as it was"
            assert again.cached == len(prompts[n]) - 1
        scheduler.check_integrity()
        await link.aclose()
        nursery.cancel_scope.cancel()
