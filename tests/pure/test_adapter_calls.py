"""How calls whose rows have different LoRA adapters are split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.engine.adapter_calls import split_by_adapters, split_into_passes
from uma_trio.engine_link.adapters import Scales
from uma_trio.engine_link.messages import SampleRequest, StepInput
from uma_trio.engine_link.sampling import SamplingParams

ONE, TWO = ((0, 1.0),), ((1, 0.5),)


def each(seq_id: int, n_tokens: int = 1, n_samples: int = 1, adapters: Scales = ()) -> StepInput:
    samples = [SampleRequest(SamplingParams())] * n_samples
    return StepInput(seq_id, 10 * seq_id, list(range(n_tokens)), samples, adapters=adapters)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3))), st.integers(1, 16))
def test_passes_have_all_rows_in_order_and_no_more_than_fit(shapes: list[tuple[int, int]], n_rows: int) -> None:
    inputs = [each(seq_id, max(n, k), k) for seq_id, (n, k) in enumerate(shapes)]
    found = split_into_passes(inputs, n_rows)
    rows = [
        (part.seq_id, part.position + at, token)
        for of_pass in found
        for part in of_pass
        for at, token in enumerate(part.tokens)
    ]
    assert rows == [(e.seq_id, e.position + at, token) for e in inputs for at, token in enumerate(e.tokens)]
    assert sum(len(part.samples) for of_pass in found for part in of_pass) == sum(len(e.samples) for e in inputs)
    for of_pass in found:
        n = sum(len(part.tokens) for part in of_pass)
        assert n <= max([n_rows, *[len(part.samples) for part in of_pass]])
        assert of_pass or not inputs


def test_where_rows_are_in_order_a_call_is_one_pass_after_another() -> None:
    inputs = [each(0, adapters=ONE), each(1, adapters=TWO), each(2, 10, 1)]
    assert split_by_adapters(inputs, 12, lambda _: False) == [inputs]
    first, second = split_by_adapters(inputs, 8, lambda _: False)
    assert [len(part.tokens) for part in first] == [1, 1, 6]
    assert [(part.position, len(part.tokens), len(part.samples)) for part in second] == [(26, 4, 1)]


def test_otherwise_decodes_of_consecutive_ids_are_together() -> None:
    decodes = [each(3, adapters=ONE), each(4), each(5, adapters=TWO)]
    assert split_by_adapters(decodes, None, lambda _: False) == (decodes,)
    with_gap = [decodes[0], decodes[2]]
    assert split_by_adapters(with_gap, None, lambda _: True) == (with_gap,)
    assert split_by_adapters(with_gap, None, lambda _: False) == [[decodes[0]], [decodes[2]]]


def test_prompts_with_the_same_adapters_stay_together() -> None:
    prompts = [each(0, 5, 1, ONE), each(1, 9, 0, ONE), each(2, 4, 1), each(3, 4, 1, ONE)]
    assert split_by_adapters(prompts, None, lambda _: True) == [prompts[:2], prompts[2:3], prompts[3:]]
    assert split_by_adapters(prompts[:2], None, lambda _: False) == (prompts[:2],)
