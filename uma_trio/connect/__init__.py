"""A client's way to the daemon's socket, the reason when there is none, and one question without an event loop."""
