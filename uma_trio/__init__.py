"""uma-trio: one daemon, one continuously batched llama.cpp context, many clients."""

__version__ = "0.1.0"
