"""The table of metrics, the records of the perf log, and what they say about a run."""
