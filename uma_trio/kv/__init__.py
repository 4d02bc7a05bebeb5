"""Which sequence holds which tokens, and who may go on from there: bookkeeping, no tensors."""
