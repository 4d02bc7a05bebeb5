"""Tests for batches: their content as C sees it, and invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest

from llama_abi import Batch, LlamaError


def content(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(token, position, sequence, needs logits) of every token, read through the struct's pointers."""
    filled = batch._filled()
    return [
        (filled.token[i], filled.pos[i], filled.seq_id[i][0], filled.logits[i])
        for i in range(filled.n_tokens)
        if filled.n_seq_id[i] == 1
    ]


def test_consecutive_tokens() -> None:
    batch = Batch(8)
    assert batch.add([5, 6, 7], pos=10, seq=2) == 2
    assert batch.add(np.array([8, 9], np.int64), pos=0, seq=0, logits="all") == 4
    assert batch.add([3], pos=4, seq=1, logits="none") == 5
    assert content(batch) == [(5, 10, 2, 0), (6, 11, 2, 0), (7, 12, 2, 1), (8, 0, 0, 1), (9, 1, 0, 1), (3, 4, 1, 0)]
    assert (batch.n_tokens, batch.n_outputs, batch.max_seq) == (6, 3, 2)


def test_one_token_for_each_of_several() -> None:
    batch = Batch(8)
    batch.add([1], pos=0, seq=9, logits="none")
    assert batch.add_decodes([5, 6], positions=[10, 20], seqs=[2, 3]) == 1
    assert batch.add_decodes([7], positions=[0], seqs=[4], logits=False) == 3
    assert content(batch) == [(1, 0, 9, 0), (5, 10, 2, 1), (6, 20, 3, 1), (7, 0, 4, 0)]
    assert (batch.n_outputs, batch.max_seq) == (2, 9)
    assert batch.add_decodes([8, 9, 7], positions=[1, 2, 3], seqs=[5, 6, 7], logits=[True, False, True]) == 4
    assert content(batch)[4:] == [(8, 1, 5, 1), (9, 2, 6, 0), (7, 3, 7, 1)]
    assert batch.n_outputs == 4


def test_the_next_token_of_each() -> None:
    batch = Batch(8)
    batch.add_decodes([5, 6], positions=[10, 20], seqs=[2, 3], logits=[True, False])
    batch.go_on([7, 8])
    batch.go_on(np.array([9, 1]))
    assert content(batch) == [(9, 12, 2, 1), (1, 22, 3, 0)]
    for tokens in ([1], [1, 2, 3], [1, -1], [1, 2**31]):
        with pytest.raises(LlamaError):
            batch.go_on(tokens)
    assert content(batch) == [(9, 12, 2, 1), (1, 22, 3, 0)]


def test_clear() -> None:
    batch = Batch(4)
    batch.add([1, 2, 3, 4], pos=0, seq=3, logits="all")
    batch.clear()
    assert (batch.n_tokens, batch.n_outputs, batch.max_seq) == (0, 0, -1)
    batch.add([9], pos=0, seq=0, logits="none")
    assert content(batch) == [(9, 0, 0, 0)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"tokens": [1, 2, 3, 4], "pos": 0, "seq": 0}, "4 more tokens do not fit: the batch has 1 of 4"),
        ({"tokens": [], "pos": 0, "seq": 0}, "no tokens"),
        ({"tokens": [-1], "pos": 0, "seq": 0}, "token ids must be integers in"),
        ({"tokens": [2**31], "pos": 0, "seq": 0}, "token ids must be integers in"),
        ({"tokens": [2**70], "pos": 0, "seq": 0}, "token ids"),
        ({"tokens": [1.5], "pos": 0, "seq": 0}, "token ids must be integers in"),
        ({"tokens": ["a"], "pos": 0, "seq": 0}, "token ids must be integers in"),
        ({"tokens": [[1]], "pos": 0, "seq": 0}, "one dimension"),
        ({"tokens": [[1], [1, 2]], "pos": 0, "seq": 0}, "token ids"),
        ({"tokens": [1], "pos": -1, "seq": 0}, "position -1"),
        ({"tokens": [1, 2], "pos": 2**31 - 2, "seq": 0}, "position 2147483646"),
        ({"tokens": [1], "pos": 0, "seq": -1}, "sequence -1"),
        ({"tokens": [1], "pos": 0, "seq": 2**31}, "sequence 2147483648"),
        ({"tokens": [1], "pos": 0, "seq": 0, "logits": "some"}, "logits must be"),
    ],
)
def test_refused(arguments: dict[str, object], complaint: str) -> None:
    batch = Batch(4)
    batch.add([7], pos=0, seq=1)
    before = content(batch), batch.n_outputs, batch.max_seq
    with pytest.raises(LlamaError, match=complaint):
        batch.add(**arguments)  # type: ignore[arg-type]
    assert (content(batch), batch.n_outputs, batch.max_seq) == before


@pytest.mark.parametrize(
    ("tokens", "positions", "seqs"),
    [([1, 2], [0], [0, 1]), ([1], [0], [-1]), ([1], [-1], [0]), ([1] * 5, [0] * 5, [0] * 5), ([], [], [])],
)
def test_each_refused(tokens: list[int], positions: list[int], seqs: list[int]) -> None:
    batch = Batch(4)
    with pytest.raises(LlamaError):
        batch.add_decodes(tokens, positions=positions, seqs=seqs)
    assert content(batch) == []


def test_logits_of_another_number_of_tokens_are_refused() -> None:
    batch = Batch(4)
    with pytest.raises(LlamaError, match="do not match"):
        batch.add_decodes([1, 2], positions=[0, 0], seqs=[0, 1], logits=[True])
    assert content(batch) == []


@pytest.mark.parametrize("capacity", [0, -1, 2**31])
def test_capacity(capacity: int) -> None:
    with pytest.raises(LlamaError, match="capacity of 1 to"):
        Batch(capacity)
