"""The gateway's native API: the socket protocol over HTTP, field for field."""
