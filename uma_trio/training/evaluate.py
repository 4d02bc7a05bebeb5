"""The exam: held-out questions, answered greedily by the GGUF through libllama.

Decodes one sequence token by token, like the daemon with one client.  Counts answers that are right as a whole, and
records the margin between the best and the second logit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from uma_trio import config
from uma_trio.engine.call import Call, SampledCall
from uma_trio.engine.call_masks import CallMasks
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.messages import SampleRequest, Step, StepInput
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.training.chat import segments
from uma_trio.training.corpus import Question
from uma_trio.training.sample import Sample
from uma_trio.training.tool_format import parse_calls

GREEDY = SamplingParams(temperature=0.0)


class WatchedEngine(LlamaEngine):
    """An engine that records the gap between the two highest logits of each sampled token."""

    margins: list[float]

    def _sample(self, call: Call, masks: CallMasks | None) -> SampledCall:
        second, best = np.partition(self._context.logits(len(call.samples)).array, -2, axis=-1)[:, -2:].T
        self.margins.extend((best - second).tolist())
        return super()._sample(call, masks)


@attrs.frozen
class Marked:
    """The result of one question."""

    question: Question
    said: str
    tokens: int
    margins: tuple[float, ...]

    @property
    def right(self) -> bool:
        """Whether the answer is the expected one; of calls, whether names and arguments are, as parsed JSON."""
        calls = parse_calls(self.question.answer)
        return self.said == self.question.answer if calls is None else parse_calls(self.said) == calls


def rendered(sample: Sample) -> str:
    """The prompt of the last turn, rendered as the chat template does.  For a raw sample the bare question."""
    if sample.raw:
        return sample.turns[0].question + "\n"
    *before, (_, answered), _ = segments(sample)
    assert answered
    return "".join(text for text, _ in before)


class Examiner:
    """Answers questions with an engine of its own.  A context manager; closes the engine.

    Args:
        threads: compute threads; 0 takes all physical cores but one.
    """

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self._engine = WatchedEngine(path, config.Model(ctx=8192, parallel=1, threads=threads))
        self._info = self._engine.info

    def __enter__(self) -> Examiner:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def answer(self, prompt: str, *, longest: int = 6000) -> tuple[str, int, tuple[float, ...]]:
        """Text, number of tokens and margins of the greedy answer.  Control tokens are spelled out, in both."""
        tokens = self.encode(prompt)
        self._engine.margins = []
        said, pos = b"", 0
        pending: npt.NDArray[np.int32] = tokens
        for at in range(min(longest, self._info.max_request_tokens - len(tokens))):
            for start in range(0, len(pending), self._info.n_batch):
                part = pending[start : start + self._info.n_batch]
                last = start + len(part) == len(pending)
                prefill = StepInput(0, pos, part.tolist(), [SampleRequest(GREEDY, at)] if last else ())
                drawn = self._engine.step(Step([Truncate(0)] if pos == 0 else (), [[prefill]])).tokens
                pos += len(part)
            if drawn[0] in self._info.eog_ids:
                return said.decode(errors="replace"), at, tuple(self._engine.margins)
            said += self._engine.tokenizer.tokens_to_bytes(drawn)[0]
            pending = np.array(drawn, np.int32)
        return said.decode(errors="replace"), longest, tuple(self._engine.margins)

    def encode(self, prompt: str) -> npt.NDArray[np.int32]:
        return self._engine.tokenizer.encode(prompt)

    def mark(self, questions: Iterable[Question]) -> Iterator[Marked]:
        for question in questions:
            said, tokens, margins = self.answer(rendered(question.sample), longest=2 * len(question.answer) + 32)
            yield Marked(question, said, tokens, margins)


@attrs.frozen
class Mark:
    """One row of the model card."""

    skill: str
    asked: int
    right: int
    tokens: int
    margin_median: float
    """Median, over the right answers, of the smallest margin in an answer."""
    margin_least: float
    """The smallest margin in all right answers."""


def marks_of(marked: Iterable[Marked]) -> list[Mark]:
    by_skill: dict[str, list[Marked]] = {}
    for one in marked:
        by_skill.setdefault(one.question.skill, []).append(one)
    marks = []
    for skill, those in by_skill.items():
        least = [min(one.margins) for one in those if one.right]
        marks.append(
            Mark(
                skill,
                len(those),
                sum(one.right for one in those),
                sum(one.tokens for one in those),
                round(float(np.median(least)), 2) if least else 0.0,
                round(min(least), 2) if least else 0.0,
            )
        )
    return marks


def shown(marked: Iterable[Marked]) -> Iterator[Marked]:
    """Pass results through; print wrong answers and, every 500 questions, the progress."""
    start = time.monotonic()
    for at, one in enumerate(marked, 1):
        if not one.right:
            print(f"wrong, {one.question.skill}: {one.question.sample.turns[-1].question[-150:]!r}")
            print(f"   expected {one.question.answer[:200]!r}\n   said     {one.said[:200]!r}", flush=True)
        if at % 500 == 0:
            print(f"{at} answered, {time.monotonic() - start:.0f} s", flush=True)
        yield one
