"""What our processes have in common: how one starts another, watches it, and ends with it."""
