"""Constrained output: what a request's ``constraint`` allows next, as masks over the vocabulary.

The daemon has a constraint checked once, in a process of its own, to refuse a bad one before any token is computed.  The
engine follows it: its matchers fill the masks of the next step while ``llama_decode`` computes the logits.

Each name is imported when it is first used: the process that checks needs few of them, and starts soon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uma_trio.grammar.calls import AnswerShape
    from uma_trio.grammar.checker import Checker, LocalChecker, SandboxedChecker
    from uma_trio.grammar.compiler import Grammar, GrammarCompiler
    from uma_trio.grammar.matchers import AppliedMasks, Matchers, PendingMasks
    from uma_trio.grammar.state import GrammarState
    from uma_trio.grammar.vocabulary import Vocabulary

__all__ = [
    "AnswerShape",
    "AppliedMasks",
    "Checker",
    "Grammar",
    "GrammarCompiler",
    "GrammarState",
    "LocalChecker",
    "Matchers",
    "PendingMasks",
    "SandboxedChecker",
    "Vocabulary",
]

_MODULES = {
    "calls": ("AnswerShape",),
    "checker": ("Checker", "LocalChecker", "SandboxedChecker"),
    "compiler": ("Grammar", "GrammarCompiler"),
    "matchers": ("AppliedMasks", "Matchers", "PendingMasks"),
    "state": ("GrammarState",),
    "vocabulary": ("Vocabulary",),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
