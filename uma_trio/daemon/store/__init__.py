"""Durable storage: the states of KV sequences, and the journals of sessions.

Blocking functions, to be called from worker threads.  They handle bytes, tokens and files, and know no engine.
"""
