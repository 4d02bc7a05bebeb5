"""What a step leaves for the next one: the inputs that the next one need not send, because they follow from its tokens."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain

import msgspec
import numpy as np

from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import SampleRequest, StepInput, StepOutput
from uma_trio.engine_link.sampling import Past


class LastStep:
    """What the last step leaves for the next one.

    ``StepRunner`` has one, and never changes a part of it.  It is empty (``number`` 0) before the first step, while a step
    computes, and after one that failed or was interrupted: then no step may run ahead of it.  ``followed_by`` makes the
    one of a step that is complete.  From then on, all of it is valid until the next step begins.

    Args:
        end_ids: tokens that end a sequence.
        number: of the step.
    """

    __slots__ = ("_end_ids", "_mus", "_sampled", "calls", "ids", "next_inputs", "number", "rejected")

    def __init__(self, end_ids: Set[int], number: int = 0) -> None:
        self._end_ids = end_ids
        self.number = number
        self.next_inputs: dict[int, StepInput] = {}
        """Sequence id -> its next input, if that depends on the last one and its token alone: one object, which goes from
        step to step and which each token changes.  For other sequences ``_sampled`` has what it is made of."""
        self.calls: Sequence[Sequence[StepInput]] = ()
        """The inputs of the step, if all of them are in ``next_inputs`` as the next ones; otherwise empty."""
        self.ids: Sequence[Sequence[int]] = ()
        """The sequence ids of ``calls``."""
        self.rejected: list[Truncate] = []
        """The next step begins with them: they remove the draft tokens that this one rejected."""
        self._sampled: dict[int, tuple[StepInput, Sequence[int]]] = {}
        """Sequence id -> its input, and the tokens that it got: accepted draft tokens and one more."""
        self._mus: dict[int, float] = {}
        """Sequence id -> state of mirostat after the step."""

    def followed_by(self, number: int, calls: Sequence[Sequence[StepInput]], output: StepOutput) -> LastStep:
        """What the step ``number`` leaves, which came after this one.  Takes over the inputs of this one that go on.

        Args:
            calls: the inputs that the step computed.
        """
        after = LastStep(self._end_ids, number)
        if output.mus:
            after._mus = dict(output.mus)
        going_on, left, n_others = after.next_inputs, iter(output.tokens), 0
        for step_input in chain.from_iterable(calls):
            seq_id = step_input.seq_id
            if self.next_inputs.get(seq_id) is step_input:
                token = next(left)
                if token >= 0 and token not in self._end_ids and token not in step_input.stop_ids:
                    going_on[seq_id] = step_input
                    step_input.position += 1
                    step_input.tokens = (token,)
                    step_input.samples[0].n_before += 1
                    continue
            elif step_input.samples:
                after._note(step_input, [next(left) for _ in step_input.samples])
            n_others += 1
        if not n_others:
            after.calls = calls
            after.ids = (
                self.ids if calls is self.calls else [[step_input.seq_id for step_input in inputs] for inputs in calls]
            )
        return after

    def _note(self, step_input: StepInput, sampled: Sequence[int]) -> None:
        """Note the tokens that ``step_input`` got: draft tokens up to the first rejected one, and the token after them.

        Args:
            sampled: one token for each sample of ``step_input``.
        """
        n = 0
        for n, draft in enumerate(step_input.tokens[len(step_input.tokens) - len(sampled) + 1 :], 1):
            if sampled[n - 1] != draft:
                n -= 1
                break
        self._sampled[step_input.seq_id] = step_input, sampled[: n + 1]
        if n + 1 < len(sampled):
            self.rejected.append(Truncate(step_input.seq_id, _end(step_input, n + 1)))
        elif _is_plain(step_input) and (following := self.next_input(step_input.seq_id)):
            self.next_inputs[step_input.seq_id] = following

    def next_input(self, seq_id: int) -> StepInput | None:
        """The next input of a sequence; ``None`` if the tokens of the step ended it, or it got none."""
        if known := self.next_inputs.get(seq_id):
            return known
        if seq_id not in self._sampled:
            return None
        last, tokens = self._sampled[seq_id]
        sample = last.samples[len(tokens) - 1]
        ends = sample.controller_mask is None and any(
            token in self._end_ids or token in last.stop_ids for token in tokens
        )
        if tokens[-1] < 0 or ends:
            return None
        following = following_request(sample, tokens[-1:])
        if seq_id in self._mus:
            following.params = sample.params.with_mu(self._mus[seq_id])
        continued = _after(last, following, len(tokens))
        continued.tokens = tokens[-1:]
        if last.grammar is not None:
            continued.grammar = last.grammar.after(tokens)
        return continued

    def tokens_of(self, seq_id: int) -> Sequence[int]:
        """The tokens that a sequence with a ``next_input`` got."""
        known = self.next_inputs.get(seq_id)
        return known.tokens if known else self._sampled[seq_id][1]


def following_request(sample: SampleRequest, tokens: Sequence[int] = ()) -> SampleRequest:
    """The request to sample what follows ``tokens``: the one that ``sample`` gave, or none without ``past``."""
    past = sample.past
    if past is not None:
        past = Past(np.append(past.tokens, np.asarray(tokens, np.int32)), past.n_prompt)
    return msgspec.structs.replace(sample, n_before=sample.n_before + 1, past=past)


def _end(step_input: StepInput, n: int) -> int:
    """Number of tokens that a sequence holds after ``step_input``, if only the first ``n`` samples are accepted."""
    return step_input.position + len(step_input.tokens) - len(step_input.samples) + n


def _is_plain(step_input: StepInput) -> bool:
    """Whether the inputs that follow ``step_input`` differ in their tokens, their positions and the numbers of their draws alone."""
    if len(step_input.samples) != 1 or step_input.grammar is not None:
        return False
    [sample] = step_input.samples
    return sample.past is None and sample.controller_mask is None and not sample.params.is_adaptive


def _after(step_input: StepInput, following: SampleRequest, n: int) -> StepInput:
    """What the sequence goes on with after the first ``n`` samples of ``step_input``, without its token and its grammar."""
    return StepInput(
        step_input.seq_id, _end(step_input, n), (), (following,), step_input.stop_ids, None, step_input.adapters
    )
