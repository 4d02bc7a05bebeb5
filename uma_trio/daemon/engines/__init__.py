"""Engines, as the daemon sees them: start one, send it steps, restart it, and learn what ticks cost."""
