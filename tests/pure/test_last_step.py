"""What a step of the engine leaves for the next one."""

from __future__ import annotations

import numpy as np

from uma_trio.engine.last_step import LastStep
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import SampleRequest, StepInput, StepOutput
from uma_trio.engine_link.sampling import Past, SamplingParams

END = 2
GREEDY = SamplingParams(temperature=0.0)


def prompt(seq_id: int, *, n_samples: int = 1, past: Past | None = None, stop_ids: tuple[int, ...] = ()) -> StepInput:
    """Three tokens at positions 10 to 12, of which the last ``n_samples`` are sampled after."""
    samples = [SampleRequest(GREEDY, n_before=n, past=past) for n in range(n_samples)]
    return StepInput(seq_id, 10, (7, 8, 9), samples, stop_ids)


def after(step_input: StepInput, *tokens: int, last: LastStep | None = None) -> LastStep:
    return (last or LastStep({END})).followed_by(1, [[step_input]], StepOutput(tokens=tokens))


def test_the_next_input_is_the_sampled_token_behind_the_last_one() -> None:
    following = after(prompt(3), 42).next_input(3)
    assert following is not None
    assert (following.position, [*following.tokens], following.samples[0].n_before) == (13, [42], 1)
    assert after(prompt(3), 42).next_input(4) is None, "another sequence got no token"


def test_plain_inputs_go_on_as_one_object_and_the_step_repeats() -> None:
    first = after(prompt(3), 42)
    assert not first.calls, "a prompt is not repeated"
    step_input = first.next_input(3)
    assert step_input is not None
    second = first.followed_by(2, [[step_input]], StepOutput(tokens=(43,)))
    assert second.next_input(3) is step_input
    assert (step_input.position, [*step_input.tokens], step_input.samples[0].n_before) == (14, [43], 2)
    assert (second.number, second.calls, second.ids) == (2, [[step_input]], [[3]])
    ended = second.followed_by(3, second.calls, StepOutput(tokens=(END,)))
    assert (ended.next_input(3), ended.calls) == (None, ())


def test_ends_of_the_model_and_of_the_request_end_a_sequence() -> None:
    assert after(prompt(3), END).next_input(3) is None
    assert after(prompt(3, stop_ids=(42,)), 42).next_input(3) is None
    assert after(prompt(3), -1).next_input(3) is None, "no token was sampled"


def test_rejected_draft_tokens_are_removed_by_the_next_step() -> None:
    # 8 and 9 are draft tokens behind 7: the model wants 8, then 5 instead of 9.
    last = after(prompt(3, n_samples=3), 8, 5, 6)
    assert last.rejected == [Truncate(3, 12)]
    assert [*last.tokens_of(3)] == [8, 5]
    following = last.next_input(3)
    assert following is not None
    assert (following.position, [*following.tokens]) == (12, [5])
    accepted = after(prompt(3, n_samples=3), 8, 9, 6)
    assert (accepted.rejected, [*accepted.tokens_of(3)]) == ([], [8, 9, 6])


def test_what_penalties_look_at_grows() -> None:
    following = after(prompt(3, past=Past(np.array([7, 8, 9], np.int32), 3)), 42).next_input(3)
    assert following is not None
    assert following.samples[0].past is not None
    assert following.samples[0].past.tokens.tolist() == [7, 8, 9, 42]


def test_nothing_goes_on_after_a_step_that_failed() -> None:
    empty = LastStep({END})
    assert (empty.number, empty.next_input(3), empty.calls) == (0, None, ())
