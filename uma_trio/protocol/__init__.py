"""The framed protocol of docs/PROTOCOL.md, without I/O: bytes in, messages out, and back.

============  ==========================================================
``messages``  requests, queries and events, each kind in a module of its own, and the bounds of their fields
``payload``   one message as JSON or CBOR
``framing``   a byte stream as length-prefixed payloads
``codec``     the three above combined, for one end of a connection
``address``   where the socket is
============  ==========================================================
"""
