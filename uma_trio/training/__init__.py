"""Scripts that train the embedded model: ``python -m uma_trio.training --help``.

Serving does not need them, so the wheel leaves them out.  The text generators (``skills/``, ``corpus``) and the
tokenizer (``bpe``) are pure Python.  ``network`` and ``train`` need torch, ``export`` needs gguf.  Both come with the
``[train]`` extra and are imported only when used.
"""
