"""Decides: what a tick computes, who has a place, when answers end.  Pure: no clock, no engine; ``serving`` acts on it."""
