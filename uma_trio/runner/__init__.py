"""One task a model: the tick, and the requests that it serves."""

from uma_trio.runner.job import Job, Sink
from uma_trio.runner.runner import Runner

__all__ = ["Job", "Runner", "Sink"]
