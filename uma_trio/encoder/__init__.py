"""Pictures and sound: rows that stand in a prompt in place of tokens.

Files are decoded and encoded in a process of their own (``python -m uma_trio.encoder``): image files come from anywhere,
and encoding is one call of libmtmd that cannot be interrupted. The daemon runs ``encoder`` and ``media_file``, the
child ``__main__``.
"""
