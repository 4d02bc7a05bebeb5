"""The process ``uma-trio aicirt``: runs Wasm controllers for an engine.  Threads, no event loop."""
