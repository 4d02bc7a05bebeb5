"""OpenAI's API, with what llama-server and vLLM add to it, and what routers ask."""
