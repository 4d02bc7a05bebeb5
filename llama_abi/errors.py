"""What can go wrong between Python and llama.cpp.

``LibraryError`` is about the installation: the library is absent, stale, or not the one that the
declarations were checked against.  Its message names the fix.  Everything else is a ``LlamaError``:
one call was refused, by us before it reached C or by llama.cpp itself.
"""

from __future__ import annotations


class LibraryError(Exception):
    """No usable libllama; ``str()`` says why and what to run."""


class LlamaError(Exception):
    """A call was refused or failed; the process and every other handle are unharmed.

    ``code`` is what the C function returned, or ``None`` where we refused before calling it.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Closed(LlamaError):
    """A handle was used after ``close()``."""


class LogitsPassed(LlamaError):
    """Logits were read after the ``decode()`` or ``close()`` that took their memory back."""


class TooManyTokens(LlamaError):
    """A text has more tokens than the caller allowed; ``n_tokens`` is how many it has."""

    def __init__(self, n_tokens: int, limit: int) -> None:
        super().__init__(f"the text has {n_tokens} tokens, and {limit} are allowed")
        self.n_tokens = n_tokens
        self.limit = limit
