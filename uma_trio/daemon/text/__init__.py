"""From tokens to an answer: text, stop strings, reasoning, calls of tools."""
