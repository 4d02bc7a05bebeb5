"""What the daemon and the runtime of controllers both know: messages, and the shared memory that carries them."""
