"""A mixed load of short chats and a long document: its script, its driver, its measurements and its display.

``uma-trio demo`` shows it; benches/mixed_load.py measures with the same modules.
"""
