"""What a model's file says, and whether it is safe to load; the embedded model."""
