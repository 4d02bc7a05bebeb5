"""Constrained output: a request's ``constraint`` becomes a grammar, which is checked before anything follows it.

The check is a process of its own (``python -m uma_trio.grammar``), to refuse a bad constraint before any token is
computed.  The engine follows a grammar: ``engine/matchers.py`` fills the masks of the next step while ``llama_decode``
computes the logits.

The daemon and the runtime of controllers run ``compiler`` and what it uses, the child ``__main__`` and what it uses, and the
engine ``vocabulary``.
"""
