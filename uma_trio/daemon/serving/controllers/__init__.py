"""An answer with a controller: its state, its masks, its forks, and what the runtime is asked."""
