"""Constrained output: what a request's ``constraint`` allows next, as masks over the vocabulary.

The daemon has a constraint checked once, in a process of its own, to refuse a bad one before any token is computed.  The
engine follows it: its matchers fill the masks of the next step while ``llama_decode`` computes the logits.
"""

from uma_trio.grammar.calls import AnswerShape
from uma_trio.grammar.checker import Checker, LocalChecker, SandboxedChecker
from uma_trio.grammar.compiler import Grammar, GrammarCompiler
from uma_trio.grammar.matchers import AppliedMasks, GrammarState, Matchers, PendingMasks
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
