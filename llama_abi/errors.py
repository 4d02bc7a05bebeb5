"""Exceptions of this package.

``LibraryError`` is about the installation: libllama is missing, outdated, or not the one that the declarations were
checked against. It names the command that repairs it. ``LlamaError`` is about one call, which either this
package or llama.cpp refused.
"""

from __future__ import annotations


class LibraryError(Exception):
    """There is no usable libllama. ``reason`` says why, and ``remedy`` which command to run; the message has both."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class LlamaError(Exception):
    """A call was refused or failed. The process and all other handles stay usable.

    ``code`` is the C function's return value, or ``None`` if the call never reached C.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class HandleClosed(LlamaError):
    """A handle was used after ``close()``."""


class StaleLogits(LlamaError):
    """Logits were read after a later ``decode()``, or after ``close()``."""


class TooManyTokens(LlamaError):
    """A text, a picture or sound has more tokens than the caller allows. ``n_tokens`` is their number."""

    def __init__(self, n_tokens: int, limit: int) -> None:
        super().__init__(f"it has {n_tokens} tokens, and {limit} are allowed")
        self.n_tokens = n_tokens
        self.limit = limit
