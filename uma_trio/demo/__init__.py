"""Mixed load as a thing to watch and to measure: what to ask, asking it, and judging the answers' timing.

``uma-trio demo`` shows it; benches/mixed_load.py measures with the same core.
"""
