"""Lifetimes: sockets, connections, signals, and what ends with what."""
