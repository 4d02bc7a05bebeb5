class SpillError(Exception):
    """."""
