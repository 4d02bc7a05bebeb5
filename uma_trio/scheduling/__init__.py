"""What goes into the next tick: pure decisions, no clock, no model, no sockets."""
