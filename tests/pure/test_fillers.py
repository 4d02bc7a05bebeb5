"""Which filler rows a call of decodes needs."""

from __future__ import annotations

from msgspec.structs import replace

import llama_abi
from tests.support.cases import all_cases
from uma_trio.engine.fillers import DIVIDED_CELLS, FILLER_TOKEN, add_filled, company, missing_ids
from uma_trio.engine_link.messages import SampleRequest, StepInput
from uma_trio.engine_link.sampling import SamplingParams


def decode(seq_id: int, n_tokens: int = 1, n_samples: int = 1) -> StepInput:
    return StepInput(seq_id, 10 + seq_id, [5] * n_tokens, [SampleRequest(SamplingParams())] * n_samples)


@all_cases(
    ("seq_ids", "missing"),
    [
        ([], []),
        ([3], []),
        ([0, 1, 2], []),
        ([0, 2], [1]),
        ([1, 4, 5, 9], [2, 3, 6, 7, 8]),
        ([2, 0], []),
        ([0, 5, 3], []),
        ([0, 3, 3], []),
    ],
)
def test_missing_ids(seq_ids: list[int], missing: list[int]) -> None:
    assert missing_ids([decode(seq_id) for seq_id in seq_ids]) == missing


@all_cases("other", [decode(4, n_samples=0), decode(4, 3), decode(4, 3, 3)])
def test_only_calls_of_decodes_are_filled(other: StepInput) -> None:
    """Prompts and drafts have rows of unequal number, which llama.cpp does not compute together anyway."""
    assert missing_ids([decode(0), decode(2), other]) == []
    assert missing_ids([decode(0), decode(2), decode(4)]) == [1, 3]


def test_a_decode_that_is_alone_gets_company_where_its_threads_would_divide_its_cells() -> None:
    long, short = (replace(decode(2), position=n) for n in (DIVIDED_CELLS, DIVIDED_CELLS - 1))
    assert company([long], 4) == [1]
    assert company([replace(long, seq_id=0)], 4) == [1]
    assert [company([short], 4), company([long], 1), company([long, decode(3)], 4)] == [[], [], []]


def test_the_batch_has_all_rows_in_the_order_of_their_ids() -> None:
    batch = llama_abi.Batch(8)
    add_filled(batch, [decode(1), decode(4), decode(5)], {2: 7, 3: 0})
    n = batch.n_tokens
    rows = zip(batch._seq[:n], batch._pos[:n], batch._token[:n], batch._needs_logits[:n], strict=True)
    assert [tuple(map(int, row)) for row in rows] == [
        (1, 11, 5, 1),
        (2, 7, FILLER_TOKEN, 0),
        (3, 0, FILLER_TOKEN, 0),
        (4, 14, 5, 1),
        (5, 15, 5, 1),
    ]
    assert batch.n_outputs == 3
