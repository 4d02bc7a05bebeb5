"""What survives on disk: states of KV sequences, and the tokens of sessions.

Plain functions that block, to be called from worker threads; they know bytes, tokens and files, and no engine.
"""
