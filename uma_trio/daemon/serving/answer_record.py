"""What keeps a detached answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.store.answer_log import Change


class AnswerRecord(Protocol):
    """Keeps a detached answer, so that it goes on after the daemon was killed."""

    title: str
    """The title of the session whose first answer it is: the session is not on disk yet."""

    @property
    def known(self) -> Sequence[int]:
        """The tokens that the answer has at its beginning: those of an earlier daemon."""

    @property
    def mu(self) -> float | None:
        """The state of mirostat after them."""

    @property
    def changes(self) -> Sequence[Change]:
        """How a client has changed the answer meanwhile.  What it inserted is among these tokens."""

    @property
    def turns(self) -> int | None:
        """What ``begin`` got first; ``None`` before it was called."""

    def begin(self, prompt: Prompt, model: str, turns: int) -> Prompt:
        """Keep the prompt; returns it, or the one that an earlier daemon has kept.

        Args:
            model: names the content of the model.
            turns: that the answer's session has.

        Raises:
            UmaError: another model has begun the answer.
        """

    def attempt(self) -> None:
        """The answer is worked on from now on: a daemon that ends before the next token perhaps dies of it."""

    async def begin_attempt(self) -> None:
        """As ``attempt``; when it returns, the next daemon knows of it."""

    def pause(self) -> None:
        """The answer waits for its place: who ends the daemon now is somebody else."""

    def add(self, tokens: Sequence[int], mu: float | None, changes: Sequence[Change]) -> None:
        """Note new tokens, whose events have gone to the sink, and changes between them.  Never blocks."""

    async def kept(self, change: Change) -> None:
        """Wait until ``change`` is on disk, or in memory if nothing of the answer is on disk.

        Raises:
            AnswerNotFound: the answer has ended without it.
            ShuttingDown: the daemon ends, and the next one perhaps goes on without it.
        """

    async def rename(self, title: str) -> None:
        """Keep another title of the session.  When this returns, it survives the end of the daemon."""
