"""Which requests guess at their next tokens, and how many guesses are looked for."""

from __future__ import annotations

from typing import Final

import attrs

from uma_trio.runner.job import Job
from uma_trio.sampling import PromptLookup

MOST_GUESSES: Final = 16
"""Of one stream in one step."""

GUESSES_UP_TO: Final = 8
"""Streams; beside more of them guesses are not even looked for: a wide batch has little to gain, and the search
would be between two steps."""

TRUSTED: Final = 0.95
"""How far the first guesses are trusted, of a request that asks for them."""


def most_guesses(n_streams: int) -> int:
    """Of each of so many streams."""
    return MOST_GUESSES if n_streams <= GUESSES_UP_TO else 0


@attrs.frozen
class Guessing:
    """Who guesses."""

    possible: bool
    """Tokens of wrong guesses can be removed from the cache."""
    usual: bool
    """Of a request that does not say."""

    def begin(self, job: Job) -> None:
        """``job`` has its first token: it looks for guesses from now on, if it should."""
        wanted = job.request.speculate
        if self.possible and (self.usual if wanted is None else wanted):
            trust = TRUSTED if wanted else 0.5
            job.lookup = PromptLookup([*job.prompt.tokens.tolist(), *job.tokens], acceptance_rate=trust)
