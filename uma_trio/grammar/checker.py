"""Checks grammars before anything follows them.

Compiling a grammar can take minutes, gigabytes or all of the stack, in spite of llguidance's limits.  So the daemon never
compiles one itself: a child process does (``__main__.py``), within limits of the operating system.
The engine then compiles what has passed.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from uma_trio.errors import ModelUnavailable
from uma_trio.grammar.vocabulary import Vocabulary, start_matcher
from uma_trio.processes.interpreter import python_module
from uma_trio.processes.sandbox import CannotStart, Interrupted, NoAnswer, Sandbox

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE_BYTES: Final = 64 * 1024
"""Size of a grammar."""

MAX_GRAMMAR_BYTES: Final = 48 << 20
"""Memory of a compiled grammar.  Ordinary ones take 1 to 5 MB."""

ANSWER_SECONDS: Final = 20.0
"""Longest wait for an answer: one second of CPU time on a busy machine."""


class Refused(Exception):
    """The grammar cannot be used.  The text is llguidance's."""


class Checker(Protocol):
    """Checks the grammars of one model.  Blocks; thread-safe."""

    def check(self, rules: str, *, is_gbnf: bool = False) -> str:
        """The grammar as matchers read it.

        Args:
            rules: in llguidance's Lark, or in GBNF.

        Raises:
            Refused: no matcher can follow it, or it costs too much.
            ModelUnavailable: somebody has killed or stopped the process that checks twice.
        """


class LocalChecker:
    """Checks in this process, without limits of memory and time.

    Args:
        vocabulary: makes the vocabulary, when the first grammar comes.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary

    def check(self, rules: str, *, is_gbnf: bool = False) -> str:
        from llguidance import LLMatcher

        if is_gbnf:
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                rules = gbnf_to_lark(rules)
            except Exception as error:  # noqa: BLE001  (the converter raises whatever its parser stumbles over)
                raise Refused(str(error)) from None
            if len(rules.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
                raise Refused("too big when it is written out")
        source: str = LLMatcher.grammar_from_lark(rules)
        tokenizer = self._tokenizer  # made at the first grammar; its memory is not that grammar's
        before = _resident_bytes()
        matcher = start_matcher(tokenizer, source)
        _require_usable(matcher)
        matcher.compute_bitmask()  # a part of the work is done here, and some grammars fail only here
        _require_usable(matcher)
        if _resident_bytes() - before > MAX_GRAMMAR_BYTES:
            raise Refused("too much memory")
        return source

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary().tokenizer()


class SandboxedChecker:
    """Checks in a child process, which starts with the first constraint.

    Args:
        vocabulary: as for ``LocalChecker``.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._sandbox = Sandbox(python_module("uma_trio.grammar"), lambda: _setup(vocabulary()), ANSWER_SECONDS)

    def close(self) -> None:
        """End the process.  The next constraint would start another one."""
        self._sandbox.stop()

    def check(self, rules: str, *, is_gbnf: bool = False) -> str:
        try:
            answer = self._sandbox.ask({"rules": rules, "is_gbnf": is_gbnf})
        except CannotStart as error:
            raise Refused(f"the process that checks constraints cannot start: {error}") from None
        except Interrupted as error:
            raise ModelUnavailable(f"the constraint could not be checked: {error}; send the request again") from None
        except NoAnswer:
            raise Refused("too much memory or time") from None
        if "error" in answer:
            raise Refused(answer["error"])
        source: str = answer["source"]
        return source


def _require_usable(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise Refused(matcher.get_error())


def _resident_bytes() -> int:
    """Memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux: the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return pages * resource.getpagesize()


def _setup(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "control_ids": [*vocabulary.control_ids],
        "end_ids": [*vocabulary.end_ids],
        "bos_id": vocabulary.bos_id,
    }
