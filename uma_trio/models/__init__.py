"""Models: validate, load and describe a GGUF; render and tokenize its prompts; the embedded model."""
