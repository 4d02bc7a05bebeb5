"""Names of headers that keep their usual spelling."""

from __future__ import annotations


class HeaderName(bytes):
    """The name of a header as it is usually written.

    Case has no meaning in HTTP, but some clients put headers into a plain dictionary, and look for this name.  uvicorn
    sends names in lower case, which for this type changes nothing.
    """

    def lower(self) -> HeaderName:
        """The same."""
        return self
