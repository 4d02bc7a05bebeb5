"""Translates constraints into grammars of llguidance, and has them checked."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import attrs
import xxhash

from uma_trio.errors import InvalidConstraint
from uma_trio.grammar.calls import AnswerShape, answer_rules
from uma_trio.grammar.checker import MAX_SOURCE_BYTES, Checker, Refused
from uma_trio.grammar.explain import explain_constraint, explain_shape
from uma_trio.grammar.regex import in_lark, in_slashes
from uma_trio.grammar.terms import json_expression
from uma_trio.grammar.vocabulary import Vocabulary
from uma_trio.protocol.requests import Constraint

MAX_KEPT: Final = 64
"""Checked grammars that are kept for later requests, as text."""


@attrs.frozen
class Grammar:
    """A constraint that can be followed."""

    key: str
    """Hash of ``source``."""
    source: str
    """As llguidance reads it."""


class GrammarCompiler:
    """Compiles the constraints of one model's requests.  Thread-safe.

    Args:
        vocabulary: makes the vocabulary, when it is needed.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], checker: Checker) -> None:
        self._make_vocabulary = vocabulary
        self._checker = checker
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bool], Grammar] = OrderedDict()
        self.compiled_total = 0
        self.reused_total = 0
        self.refused_total = 0

    def snapshot(self) -> dict[str, int]:
        """Numbers for the metrics."""
        return {
            "compiled_total": self.compiled_total,
            "reused_total": self.reused_total,
            "refused_total": self.refused_total,
        }

    def find(self, constraint: Constraint | AnswerShape) -> Grammar | None:
        """The grammar of ``constraint``, if it was compiled before.  Blocks for less than a millisecond.

        Raises:
            InvalidConstraint: it is too large.
        """
        try:
            key = self._key(constraint)
        except InvalidConstraint:
            self._count_refusal()
            raise
        with self._lock:
            grammar = self._kept.get(key)
            if grammar is not None:
                self._kept.move_to_end(key)
                self.reused_total += 1
            return grammar

    def compile(self, constraint: Constraint | AnswerShape) -> Grammar:
        """The grammar of ``constraint``.  Blocks for milliseconds; hostile ones and the first one for seconds.

        Raises:
            InvalidConstraint: it cannot be followed; the message names the keyword or the position.
            ModelUnavailable: see ``Checker``.
        """
        grammar = self.find(constraint)
        if grammar is not None:
            return grammar
        key = rules, is_gbnf = self._key(constraint)
        try:
            source = self._checker.check(rules, is_gbnf=is_gbnf)
        except Refused as error:
            self._count_refusal()
            if isinstance(constraint, AnswerShape):
                wrong = explain_shape(str(error), constraint)
            else:
                wrong = explain_constraint(str(error), constraint)
            raise InvalidConstraint(wrong.message, field=wrong.field) from None
        grammar = Grammar(xxhash.xxh3_128_hexdigest(source.encode()), source)
        with self._lock:
            self.compiled_total += 1
            self._kept[key] = grammar
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _count_refusal(self) -> None:
        with self._lock:
            self.refused_total += 1

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    def _key(self, constraint: Constraint | AnswerShape) -> tuple[str, bool]:
        """The rules of ``constraint``, and whether they are GBNF."""
        if isinstance(constraint, AnswerShape):
            return self._rules_of_shape(constraint), False
        return self._rules(constraint), constraint.gbnf is not None

    def _rules_of_shape(self, shape: AnswerShape) -> str:
        text = shape.text
        if text is not None and (text.lark or text.gbnf or text.after):
            raise InvalidConstraint(
                "with tools, a constraint is json_schema, json_object, regex or choice, without after: the answer may be a call",
                field="constraint",
            )
        try:
            rules = answer_rules(shape, None if text is None else _expression(text))
        except ValueError as error:
            raise InvalidConstraint(f"the parameters of a tool are not valid JSON: {error}", field="tools") from None
        if len(rules.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
            raise InvalidConstraint(
                f"the constraint has more than {MAX_SOURCE_BYTES // 1024} KiB"
                if not shape.tools
                else f"the tools have more than {MAX_SOURCE_BYTES // 1024} KiB, too much for a grammar; name one of them in "
                "tool_choice, or send fewer",
                field="tools" if shape.tools else "constraint",
            )
        return rules

    def _rules(self, constraint: Constraint) -> str:
        """``constraint`` in llguidance's Lark, or in GBNF if it is given so.

        Raises:
            InvalidConstraint: it is too large, or no grammar of its kind.
        """
        own = constraint.lark if constraint.lark is not None else constraint.gbnf
        if own is not None:
            if constraint.after is not None:
                raise InvalidConstraint(
                    "constraint.after goes with json_schema, json_object, regex and choice", field="constraint.after"
                )
            rules = own if constraint.lark is None else in_lark(own)
        elif constraint.after is not None:
            rules = f"{self._free_text_until(constraint.after)}\nanswer: {_expression(constraint)}"
        else:
            rules = f"start: {_expression(constraint)}"
        if len(rules.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
            raise InvalidConstraint(f"the constraint has more than {MAX_SOURCE_BYTES // 1024} KiB", field="constraint")
        return rules

    def _free_text_until(self, marker: str) -> str:
        """Rules for any text up to the first ``marker``, then the rule ``answer``."""
        for token in self._vocabulary.control_ids:
            if self._vocabulary.tokens[token] == marker.encode():
                return f"start: before <[{token}]> answer\nbefore: /(.|\\n)*/"
        return f"start: before answer\nbefore[suffix={json.dumps(marker, ensure_ascii=False)}]: /(.|\\n)*/"


def _expression(constraint: Constraint) -> str:
    """A constraint that is not a grammar, as one expression of llguidance's Lark."""
    if constraint.json_schema is not None:
        return _json(constraint.json_schema)
    if constraint.json_object:
        return _json({"type": "object"})
    if constraint.regex is not None:
        return in_slashes(constraint.regex)
    assert constraint.choice is not None
    return "(" + " | ".join([json.dumps(choice, ensure_ascii=False) for choice in constraint.choice]) + ")"


def _json(schema: dict[str, Any]) -> str:
    try:
        return json_expression(schema)
    except ValueError as error:
        raise InvalidConstraint(
            f"constraint.json_schema is not valid JSON: {error}", field="constraint.json_schema"
        ) from None
