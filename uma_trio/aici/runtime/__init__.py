"""The process ``uma-trio aicirt``: runs Wasm controllers for the daemon.  Threads, no event loop."""
