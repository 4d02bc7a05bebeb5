"""The engine's process: computes steps with llama.cpp.  The daemon imports none of it, except with ``--engine thread``."""
