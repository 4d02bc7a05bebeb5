"""The framed protocol of docs/PROTOCOL.md, without I/O: bytes in, messages out, and back.

``messages`` says what can be said, ``payload`` turns it into JSON or CBOR, ``framing`` cuts a byte
stream into payloads, and ``codec`` puts the three together for one connection.
"""
