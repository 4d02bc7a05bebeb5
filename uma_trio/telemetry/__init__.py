"""Counters and recent measurements. Recording is cheap; percentiles are computed when someone asks."""
