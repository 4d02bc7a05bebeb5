"""What the daemon and the engine both know: messages, and the values in them.  No event loop, no model."""
