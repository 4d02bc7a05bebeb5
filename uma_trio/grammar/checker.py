"""Checks grammars before anything follows them.

Compiling a grammar can take minutes, gigabytes or all of the stack, in spite of llguidance's limits.  So the daemon never
compiles one itself: a child process does (``python -m uma_trio.grammar``), within limits of the operating system.
The engine then compiles what has passed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from uma_trio.errors import ModelUnavailable
from uma_trio.grammar.vocabulary import STACK_BYTES, Vocabulary, start_matcher
from uma_trio.processes.interpreter import python_module
from uma_trio.processes.sandbox import LAST, CannotStart, Interrupted, NoAnswer, Sandbox, limit_cpu, limit_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE_BYTES: Final = 64 * 1024
"""Size of a grammar."""

MAX_GRAMMAR_BYTES: Final = 48 << 20
"""Memory of a compiled grammar.  Ordinary ones take 1 to 5 MB."""

MEMORY_BYTES: Final = 256 << 20
"""Address space for compiling a grammar, and for those that are kept."""

CPU_SECONDS: Final = 1.0
"""CPU time for a grammar; the system ends the process up to 1 s later."""

ANSWER_SECONDS: Final = 20.0
"""Longest wait for an answer: ``CPU_SECONDS`` on a busy machine."""


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


# -- the child ------------------------------------------------------------------------------------


def _setup(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "control_ids": [*vocabulary.control_ids],
        "end_ids": [*vocabulary.end_ids],
        "bos_id": vocabulary.bos_id,
    }


def _vocabulary(setup: Mapping[str, Any]) -> Vocabulary:
    tokens = [token.encode("latin-1") for token in setup["tokens"]]
    ids = {token: n for n, token in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        """By single bytes: a checker samples nothing, so it does not matter which tokens spell a text."""
        return [ids[each] for byte in text.encode() if (each := bytes([byte])) in ids]

    return Vocabulary(tokens, setup["control_ids"], setup["end_ids"], setup["bos_id"], encode)


def _answer(checker: LocalChecker, question: Mapping[str, Any]) -> dict[str, Any]:
    limit_cpu(CPU_SECONDS)
    try:
        return {"source": checker.check(question["rules"], is_gbnf=question["is_gbnf"])}
    except Refused as error:
        return {"error": str(error)}
    except BaseException as error:  # noqa: BLE001  (a panic of llguidance)
        return {"error": f"{type(error).__name__}: {error}"}


def _serve() -> None:
    lines = map(json.loads, sys.stdin.buffer)
    vocabulary = _vocabulary(next(lines))
    checker = LocalChecker(lambda: vocabulary)
    checker._tokenizer  # noqa: B018  (made before the limits)
    os.nice(5)  # answers come first
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what llguidance says as it dies is no log record
    before = _address_bytes()
    limit_memory(before + MEMORY_BYTES)
    _send({})
    for question in lines:
        answer = _answer(checker, question)
        is_last = _address_bytes() - before > MEMORY_BYTES // 2  # the next grammar must find room
        _send({**answer, LAST: True} if is_last else answer)


def _send(answer: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _address_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux, where the limit has no effect
        return 0


def main() -> None:
    """Serve the daemon at the other end of stdin and stdout."""
    threading.stack_size(STACK_BYTES // 2)  # what passes here has room in the engine
    thread = threading.Thread(target=_serve, name="checker")
    thread.start()
    thread.join()
