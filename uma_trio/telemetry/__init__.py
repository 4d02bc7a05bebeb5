"""Counting what happens, cheaply; folded into a snapshot only when someone asks."""

from uma_trio.telemetry.meters import Average, Recent, Telemetry

__all__ = ["Average", "Recent", "Telemetry"]
