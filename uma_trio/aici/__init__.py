"""AICI: Wasm controllers that decide about every token.  docs/AICI.md describes the protocol and the ABI."""
