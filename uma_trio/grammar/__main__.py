"""The process that checks constraints: ``python -m uma_trio.grammar``, started by ``checker.SandboxedChecker`` alone."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uma_trio.grammar.checker import LocalChecker, Refused
from uma_trio.grammar.vocabulary import STACK_BYTES, Vocabulary
from uma_trio.processes.sandbox import LAST, limit_cpu, limit_memory

MEMORY_BYTES: Final = 256 << 20
"""Address space for compiling a grammar, and for those that are kept."""

CPU_SECONDS: Final = 1.0
"""CPU time for a grammar; the system ends the process up to 1 s later."""


def _vocabulary(setup: Mapping[str, Any]) -> Vocabulary:
    tokens = [token.encode("latin-1") for token in setup["tokens"]]
    ids = {token: n for n, token in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        """By single bytes: a checker samples nothing, so it does not matter which tokens spell a text."""
        return [ids[token] for byte in text.encode() if (token := bytes([byte])) in ids]

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


if __name__ == "__main__":
    main()
