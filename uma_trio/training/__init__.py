"""Scripts that train the embedded model: ``python -m uma_trio.training --help``.

Serving does not need them, so the wheel leaves them out.  The text generators (``skills/``, ``corpus``) and the
tokenizer (``bpe``) are pure Python.  ``network`` and ``train`` need torch, which comes with the ``[train]`` extra
and is imported only when used.
"""
