"""Compiles constraints: translates each kind into a grammar of llguidance, and finds what is wrong with it.

Runs in the daemon, in a worker thread.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from uma_trio.errors import InvalidConstraint
from uma_trio.grammar.vocabulary import Vocabulary, start_matcher
from uma_trio.protocol.messages import Constraint

MAX_SOURCE_BYTES: Final = 64 * 1024
"""Size of a grammar.  It bounds the time that compiling takes: the slowest schema of this size that was found took 0.6 s."""

MAX_KEPT: Final = 64
"""Compiled grammars that are kept for later requests."""

COMPACT_JSON: Final = {"whitespace_flexible": False}
"""No optional whitespace: a small model would write line breaks for ever."""


@attrs.frozen(eq=False)
class Grammar:
    """A constraint that can be followed."""

    source: str
    """As llguidance reads it."""
    _start: LLMatcher

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens``, an answer or the beginning of one, can end here.  Blocks for about 3 us a token."""
        matcher = self._start.deep_copy()
        return matcher.try_consume_tokens([*tokens]) == len(tokens) and bool(matcher.is_accepting())


class GrammarCompiler:
    """Compiles the constraints of one model's requests.  Thread-safe.

    Args:
        vocabulary: makes the vocabulary, when the first constraint comes.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self.compiled_total = 0
        self.reused_total = 0

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of ``constraint``.  Blocks for milliseconds, at most for about a second.

        Raises:
            InvalidConstraint: it cannot be followed; the message names the keyword or the position.
        """
        with self._lock:
            source = self._source(constraint)
            grammar = self._kept.get(source)
            if grammar is not None:
                self._kept.move_to_end(source)
                self.reused_total += 1
                return grammar
            self._tokenizer  # noqa: B018  (made once)
        matcher = start_matcher(self._tokenizer, source)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # part of the work is done here, and some grammars fail only here
        if matcher.is_error():
            raise InvalidConstraint(f"the constraint cannot be used: {explain(matcher.get_error())}")
        grammar = Grammar(source, matcher)
        with self._lock:
            self.compiled_total += 1
            self._kept[source] = grammar
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()

    def _source(self, constraint: Constraint) -> str:
        """The grammar as llguidance reads it.

        Raises:
            InvalidConstraint: it is too large, or no grammar of its kind.
        """
        body, is_rules = _body(constraint)
        if constraint.after is not None:
            if is_rules:
                raise InvalidConstraint("constraint.after goes with json_schema, json_object, regex and choice")
            body = f"{self._free_text_until(constraint.after)}\nanswer: {body}"
        elif not is_rules:
            body = f"start: {body}"
        if len(body.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
            raise InvalidConstraint(f"the constraint has more than {MAX_SOURCE_BYTES // 1024} KiB")
        source: str = LLMatcher.grammar_from_lark(body)
        return source

    def _free_text_until(self, marker: str) -> str:
        """Rules for any text up to the first ``marker``, then the rule ``answer``."""
        for token in self._vocabulary.control_ids:
            if self._vocabulary.tokens[token] == marker.encode():
                return f"start: before <[{token}]> answer\nbefore: /(.|\\n)*/"
        return f"start: before answer\nbefore[suffix={json.dumps(marker, ensure_ascii=False)}]: /(.|\\n)*/"


def _body(constraint: Constraint) -> tuple[str, bool]:
    """``constraint`` in llguidance's Lark; and whether that is a list of rules instead of one expression."""
    if constraint.json_schema is not None:
        return _json(constraint.json_schema), False
    if constraint.json_object:
        return _json({"type": "object"}), False
    if constraint.regex is not None:
        return f"/{_escape_slashes(constraint.regex)}/", False
    if constraint.choice is not None:
        return "(" + " | ".join([json.dumps(each, ensure_ascii=False) for each in constraint.choice]) + ")", False
    if constraint.gbnf is not None:
        try:
            return gbnf_to_lark(constraint.gbnf), True
        except Exception as error:  # noqa: BLE001  (the converter raises whatever its parser stumbles over)
            raise InvalidConstraint(f"the constraint cannot be used: GBNF: {explain(str(error))}") from None
    assert constraint.lark is not None
    return constraint.lark, True


def _json(schema: dict[str, Any]) -> str:
    try:
        return "%json " + msgspec.json.encode({**schema, "x-guidance": COMPACT_JSON}).decode()
    except (RecursionError, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidConstraint(f"constraint.json_schema is no JSON: {error}") from None


def _escape_slashes(regex: str) -> str:
    r"""``regex`` for between two slashes: ``/`` becomes ``\/``, and a line break its escape."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL)


def explain(error: str) -> str:
    """An error of llguidance on one line, without what concerns only its developers."""
    lines = [line.strip() for line in error.splitlines()]
    text = " ".join([line for line in lines if line and not line.startswith(("<", "^", "1 |"))])
    return text[:300]
