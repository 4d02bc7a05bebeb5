"""Answers that outlive the connections of their clients, and the daemon."""
