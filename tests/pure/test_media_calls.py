"""How calls that have rows of pictures are split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.engine.media_calls import split_by_media
from uma_trio.engine_link.media import MediaRows
from uma_trio.engine_link.messages import SampleRequest, StepInput
from uma_trio.engine_link.sampling import SamplingParams


def made(seq_id: int, parts: list[tuple[bool, int]], *, samples: bool) -> StepInput:
    """An input whose parts are rows or tokens."""
    media, at = [], 0
    for n_file, (is_rows, n) in enumerate(parts):
        if is_rows:
            media.append(MediaRows(at, n, n_file, 3))
        at += n
    wanted = [SampleRequest(SamplingParams())] if samples else []
    return StepInput(seq_id, 100 * seq_id, list(range(at)), wanted, media=media)


INPUTS = st.lists(
    st.tuples(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=5), st.booleans()), min_size=1
).map(lambda found: [made(n, parts, samples=samples) for n, (parts, samples) in enumerate(found)])


@given(INPUTS)
def test_calls_have_tokens_or_rows_of_one_file_and_everything_in_order(inputs: list[StepInput]) -> None:
    calls = split_by_media(inputs)
    assert all(calls)
    for call in calls:
        media = [each for each in call if each.media]
        assert not media or call == media[:1]
        for each in media:
            [rows] = each.media
            assert len(each.tokens) == rows.n
    parts = [part for call in calls for part in call]
    assert [(p.seq_id, p.position + n, token) for p in parts for n, token in enumerate(p.tokens)] == [
        (each.seq_id, each.position + n, token) for each in inputs for n, token in enumerate(each.tokens)
    ]
    assert [part.seq_id for part in parts for _ in part.samples] == [
        each.seq_id for each in inputs for _ in each.samples
    ]
    for part in parts:
        of_input = inputs[part.seq_id].media
        is_row = [any(m.at <= token < m.at + m.n for m in of_input) for token in part.tokens]
        assert all(is_row) if part.media else not any(is_row)
        assert not part.samples or part.tokens[-1] == inputs[part.seq_id].tokens[-1]


def test_a_call_without_rows_is_the_same_call() -> None:
    inputs = [made(0, [(False, 3)], samples=True), made(1, [(False, 1)], samples=True)]
    [call] = split_by_media(inputs)
    assert call is inputs
