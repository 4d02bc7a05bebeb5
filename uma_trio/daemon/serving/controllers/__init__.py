"""A sequence that a controller steers: its state, its masks, its forks, and what the runtime is asked."""
