"""KV cache bookkeeping: which sequence holds which tokens, and which requests can reuse them.  Holds no tensors."""
