"""A change of a running answer that its client asks for.  It is applied between two steps, where a reasoning budget ends reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs
import trio

from uma_trio.daemon.store.answer_log import Change
from uma_trio.daemon.text.budget import ReasoningLimit
from uma_trio.errors import BadRequest, UmaError
from uma_trio.protocol.answers import Steered
from uma_trio.protocol.queries import SteerQuery

_SENTENCE_END: Final = re.compile(r"""((?<!\d)[.!?…]["'”’)\]]*\s*|[。！？]\s*|\n)\Z""")
TAIL_TOKENS: Final = 8
"""How many of the last tokens are searched for the end of a sentence."""


@attrs.define(eq=False, kw_only=True)
class Steering:
    """One change of one answer, from its acceptance to its outcome."""

    query: SteerQuery
    tokens: Sequence[int] = ()
    """Those of ``query.text``, or of ``query.message`` in the chat template."""
    opens_reasoning: bool = False
    """After the message the model begins with reasoning."""
    reasoning_limit: ReasoningLimit | None = None
    """How reasoning ends; set if the query ends it, or has a message and the model reasons."""
    change: Change | None = None
    """What was changed, in the log of a detached answer."""
    outcome: Steered | UmaError | None = None
    done: trio.Event = attrs.field(factory=trio.Event)
    """Set when there is an outcome."""

    def end(self, outcome: Steered | UmaError) -> None:
        """Report ``outcome``."""
        self.outcome = outcome
        self.done.set()

    async def wait(self) -> Steered:
        """Wait for the outcome.

        Raises:
            UmaError: the answer ended before the change.
        """
        await self.done.wait()
        assert self.outcome is not None
        if isinstance(self.outcome, UmaError):
            raise self.outcome
        return self.outcome


def called_already() -> BadRequest:
    """A message would cut off a call, or hide it from the client that has to answer it."""
    return BadRequest(
        "the answer calls a tool: wait for its end, and send the message with the results", field="message"
    )


def ends_sentence(text: str) -> bool:
    """Whether a sentence or a line ends where ``text`` ends.  A dot after a digit does not count."""
    return _SENTENCE_END.search(text) is not None
