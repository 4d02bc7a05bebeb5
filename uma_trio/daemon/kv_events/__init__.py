"""KV events: tells routers which prefixes this daemon has, in the wire format of vLLM (docs/SCALE-OUT.md)."""
