"""Starling's API, the gateway's own: the socket protocol over HTTP, field for field."""
