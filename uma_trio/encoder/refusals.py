"""Why a file is not encoded."""

from __future__ import annotations


class Refused(Exception):
    """The file is no picture or sound that can be encoded; says why, and what can."""


class TooManyRows(Exception):
    """What a file becomes in a prompt has more tokens than a request may have."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"{n_tokens} tokens")
        self.n_tokens = n_tokens
