"""What the daemon sees of a runtime: exchanges on the main channel, and calls on the side channel.

Nothing in an answer is trusted: a result that no engine could act on becomes the error of its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import attrs
import trio

from uma_trio.aici_link.messages import (
    Auth,
    MidAnswer,
    MidOp,
    MidResult,
    ModuleInfo,
    ModuleRecord,
    PostOp,
    PostPreAnswer,
    PostResult,
    PreOp,
    PreResult,
    Removal,
    SequenceResult,
    TagInfo,
    error_and_logs,
)
from uma_trio.engine_link.masks import MaskFile

T = TypeVar("T")

MAX_LOG_CHARACTERS: Final = 1 << 16
"""Longest log or error of one result; only its end is kept."""

NO_ANSWER: Final = "the runtime of controllers has not answered for this sequence"


@attrs.frozen
class PostPreResults:
    """Results by the ids of sequences."""

    post: Mapping[int, SequenceResult[PostResult]]
    """For each post op."""
    pre: Mapping[int, SequenceResult[PreResult]]
    """For each live sequence, also for those that are suspended or freed."""


MidResults: TypeAlias = Mapping[int, SequenceResult[MidResult]]
"""Results by the ids of sequences, one for each op.  Without an error: ``skipped``, or a splice, or ``None``, which means
that the row of the op is written."""


class Exchange(Generic[T]):
    """A request on the main channel, and its answer when it has come.  Used in trio's thread only."""

    def __init__(self) -> None:
        self.answer: T | None = None
        self.failure = ""
        """Why there will be no answer: the runtime has ended, hangs or answers nonsense.  All its sequences are lost."""
        self._event = trio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        """Whether there is an answer or a failure."""
        return self._event.is_set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until it is done, but no longer than ``timeout_s``; returns whether it is."""
        with trio.move_on_after(timeout_s):
            await self._event.wait()
        return self.is_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it is done; at once if it is."""
        if self.is_done:
            callback()
        else:
            self._callbacks.append(callback)

    def finish(self, answer: T | None = None, failure: str = "") -> None:
        """Set the answer, or the failure.  The first call counts."""
        if not self.is_done:
            self.answer, self.failure = answer, failure
            self._event.set()
            for callback in self._callbacks:
                callback()


class ControllerRuntime(Protocol):
    """A runtime of controllers that is started when it is needed, and again when it dies.

    A sequence lives in the ``generation`` in which its controller was instantiated.
    """

    is_usable: bool
    """Whether exchanges are possible now."""
    reason: str
    """Why not."""
    generation: int
    """Rises when a runtime starts.  All sequences of earlier ones are lost."""
    masks: MaskFile | None
    """Where ``mid`` writes: row ``n`` is that of op ``n``.  Another object in each generation."""
    on_change: Callable[[], None]
    """Called when ``is_usable`` has changed."""
    on_unused: Callable[[str], None]
    """Called with the ``req_id`` of a controller that was started although its request was cancelled meanwhile."""

    def post_pre(self, post: Sequence[PostOp], pre: Sequence[PreOp], freed: Sequence[int]) -> Exchange[PostPreResults]:
        """End a step and begin the next one.  Does not block.

        Without a usable runtime the exchange has failed already.

        Raises:
            RuntimeError: the exchange before is not done.
        """

    def mid(self, ops: Sequence[MidOp]) -> Exchange[MidResults]:
        """Have the masks written of sequences that sample in a step; otherwise as ``post_pre``.

        Args:
            ops: at most ``masks.n_rows``.
        """

    async def instantiate(
        self, req_id: str, module: str, argument: Any, prompt: Sequence[int], auth: Auth | None = None
    ) -> int:
        """Start the controller of a request; a ``PreOp`` with ``req_id`` then gives it to a sequence.

        Args:
            module: id or tag.
            argument: a text, or what becomes JSON.

        Returns:
            The generation that has it.

        Raises:
            ControllerNotFound: there is no such module.
            ControllerFailed: the controller does not start.
            ControllerUnavailable: there is no runtime.
        """

    async def make_module(self, wasm: bytes | bytearray, auth: Auth | None = None) -> ModuleInfo:
        """Upload a module.

        Raises:
            ControllerFailed: it is not a controller.
            ControllerUnavailable: there is no runtime.
        """

    async def set_tags(self, module_id: str, tags: Sequence[str], auth: Auth | None = None) -> list[TagInfo]:
        """Give names to a module; raises as ``instantiate``."""

    async def get_tags(self, auth: Auth | None = None) -> list[TagInfo]:
        """The names of modules that ``auth`` can run; raises as ``instantiate``."""

    async def get_modules(self, owner: str | None = None, auth: Auth | None = None) -> list[ModuleRecord]:
        """Modules of ``owner``, by default those of ``auth``, and for an administrator all; raises as ``instantiate``."""

    async def remove(self, removal: Removal, auth: Auth | None = None) -> list[str]:
        """Remove a module or names; returns what is gone; raises as ``instantiate``."""

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics: the process and its restarts."""


# -- what is in an answer -------------------------------------------------------------------------


@attrs.frozen
class AnswerCheck:
    """Bounds of what a runtime may ask of the engine."""

    n_vocab: int
    max_forks: int
    max_tokens: int
    """The longest text of one sequence."""

    def post_pre(self, answer: PostPreAnswer, post_ids: Sequence[int], pre_ids: Sequence[int]) -> PostPreResults:
        """The results of the sequences in question.

        Args:
            post_ids: of the post ops.
            pre_ids: of the pre ops.  Results of other sequences are passed on if they are there.
        """
        post = {id: self._checked(answer.post_seqs.get(str(id)), self._post_problem) for id in post_ids}
        known = {int(key): result for key, result in answer.pre_seqs.items() if key.isdecimal() and len(key) < 11}
        pre = {id: self._checked(known.get(id), self._pre_problem) for id in {**known, **dict.fromkeys(pre_ids)}}
        return PostPreResults(post, pre)

    def mid(self, answer: MidAnswer, ids: Sequence[int]) -> MidResults:
        """The results of the sequences in question."""
        return {id: self._checked(answer.seqs.get(str(id)), self._mid_problem) for id in ids}

    def _checked(
        self, received: SequenceResult[T] | None, problem: Callable[[SequenceResult[T]], str]
    ) -> SequenceResult[T]:
        if received is None:
            return SequenceResult(NO_ANSWER, None)
        error, logs = error_and_logs(received.error, received.logs)
        error, logs = error[-MAX_LOG_CHARACTERS:], logs[-MAX_LOG_CHARACTERS:]
        result = received.result
        if not error and received.skipped is not True and (why := problem(received)):
            error, result = f"the controller returned an invalid result: {why}", None
        return SequenceResult(error, result, received.storage, logs, received.micros, received.skipped)

    def _post_problem(self, received: SequenceResult[PostResult]) -> str:
        return "" if received.result is not None else "no result"

    def _pre_problem(self, received: SequenceResult[PreResult]) -> str:
        result = received.result
        if result is None:
            return "no result"
        if not 0 <= result.num_forks <= self.max_forks:
            return f"{result.num_forks} forks, at most {self.max_forks} are possible"
        if result.num_forks != 1 and result.suspend:
            return "suspend and fork together"
        if result.ff_tokens and result.suspend:
            return "suspend and append tokens"
        return self._token_problem(result.ff_tokens)

    def _mid_problem(self, received: SequenceResult[MidResult]) -> str:
        result = received.result
        if result is None:
            return ""
        if not 0 <= result.backtrack <= self.max_tokens:
            return f"a backtrack of {result.backtrack} tokens"
        if not result.ff_tokens and not result.backtrack:
            return "an empty splice"
        return self._token_problem(result.ff_tokens)

    def _token_problem(self, tokens: Sequence[int]) -> str:
        if len(tokens) > self.max_tokens:
            return f"{len(tokens)} tokens at once, at most {self.max_tokens} are possible"
        wrong = next((token for token in tokens if not 0 <= token < self.n_vocab), None)
        return "" if wrong is None else f"token {wrong} of a vocabulary of {self.n_vocab}"
