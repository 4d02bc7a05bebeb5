"""Tokenizes with a model's vocabulary, which libllama reads without the weights.  For every process that needs tokens."""
