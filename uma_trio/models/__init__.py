"""Models: which file, whether it is sound, loading it, and the one that comes with the package."""
