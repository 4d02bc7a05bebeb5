"""Constrained output: what a request's ``constraint`` allows next, as masks over the vocabulary.

The daemon compiles a constraint once, to refuse a bad one before any token is computed.  The engine follows it: its
matchers fill the masks of the next step while ``llama_decode`` computes the logits.  Both use llguidance.
"""

from uma_trio.grammar.compiler import Grammar, GrammarCompiler
from uma_trio.grammar.matchers import AppliedMasks, GrammarState, Matchers, PendingMasks
from uma_trio.grammar.vocabulary import Vocabulary

__all__ = ["AppliedMasks", "Grammar", "GrammarCompiler", "GrammarState", "Matchers", "PendingMasks", "Vocabulary"]
