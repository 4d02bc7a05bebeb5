"""llama-server's own API, and what it says next to an answer in all of its APIs."""
