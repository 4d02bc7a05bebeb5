"""Counters and recent measurements. Recording is cheap; percentiles are computed when someone asks."""

from uma_trio.telemetry.metrics import Average, RecentValues, Telemetry

__all__ = ["Average", "RecentValues", "Telemetry"]
