"""Which sequence holds how much of the KV cache: bookkeeping, no tensors."""
