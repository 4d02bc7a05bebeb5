"""Decides what the next tick computes.  Pure functions and values: no clock, no model, no sockets."""
