"""The ways into the daemon: the socket, and what serves its clients.  A door knows the service and nothing behind it."""
