"""How the embedded model is made: ``python -m uma_trio.training --help``.

Nothing here is needed to serve.  The generators of text (``skills/``, ``corpus``, ``bpe``) are pure
Python; ``network``, ``train`` need torch and ``export`` needs gguf, both from the ``[train]`` extra,
and are imported only when used.
"""
