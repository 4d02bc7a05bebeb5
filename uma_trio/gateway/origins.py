"""Which hosts a request may name, and which web pages may send one.  Pure.

A page whose name was rebound to this machine (DNS rebinding) sends that name as ``Host``.  An IP address has no name that
could be rebound, so every address is allowed, and so are the names of this machine itself.  Other names have to be
configured.  A page of another origin sends its ``Origin``, and may only use the gateway if that is configured.  Pages
that this machine serves to its own browser, at any port, are allowed unless the operator says otherwise: whoever can put
one there can also use the gateway without a browser.

Starlette's own middlewares for hosts and CORS know neither addresses as a whole, nor pages of the same host, of this
machine or of a scheme of applications, and they refuse in plain text instead of in the dialect of the path.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from typing import Final

import attrs

ANY: Final = "*"
LOCAL: Final = "localhost"
"""In the setting of origins: all pages that this machine serves."""
LOCAL_NAMES: Final = ("localhost", ".localhost")
HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)
DEFAULT_PORTS: Final = {"http": "80", "https": "443"}


def split_host(value: str) -> tuple[str, str] | None:
    """Split a ``Host`` into its name, in lower case and without brackets, and its port; ``None`` if it is not valid."""
    match = HOST.fullmatch(value)
    if match is None:
        return None
    return match[1].strip("[]").rstrip(".").lower(), match[2] or ""


@functools.lru_cache(64)
def is_address(name: str) -> bool:
    """Whether ``name`` is an IP address.  Clients mostly give the same one in each request."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach what listens at ``name``."""
    if is_address(name):
        return ipaddress.ip_address(name).is_loopback
    return _matches(name.lower(), LOCAL_NAMES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of ``patterns`` is ``name``, ``*``, or the end of ``name`` with a dot in front."""
    return any(pattern in (ANY, name) or (pattern.startswith(".") and name.endswith(pattern)) for pattern in patterns)


@attrs.frozen
class Origins:
    """What is allowed besides this machine.

    Args:
        hosts: names, ``.example.com`` for all below a name, or ``*``.
        origins: as pages send them, such as ``https://chat.example.com``; ``app://*`` for all of a scheme of
            applications; ``localhost`` for all pages of this machine; ``*`` for all pages.
    """

    hosts: frozenset[str]
    origins: frozenset[str]

    @classmethod
    def of(cls, hosts: str, origins: str) -> Origins:
        """Make them of two settings, which are lists with commas."""
        return cls(
            frozenset(host.strip().lower() for host in hosts.split(",") if host.strip()),
            frozenset(origin.strip().rstrip("/").lower() for origin in origins.split(",") if origin.strip()),
        )

    def allows_host(self, host: str) -> bool:
        """Whether a request may name this ``Host``."""
        split = split_host(host)
        if split is None:
            return False
        name = split[0]
        return is_address(name) or _matches(name, (*LOCAL_NAMES, *self.hosts))

    def allows_origin(self, origin: str, host: str, scheme: str) -> bool:
        """Whether a page of ``origin`` may send a request to ``host``: a page of the same host and port, or a known one."""
        origin = origin.lower()
        its_scheme, separator, its_host = origin.partition("://")
        if (separator and origin in self.origins) or ANY in self.origins or _is_same(origin, host, scheme):
            return True
        if its_scheme in DEFAULT_PORTS:
            name = split_host(its_host) if separator else None
            return LOCAL in self.origins and name is not None and is_loopback(name[0])
        return bool(separator) and f"{its_scheme}://{ANY}" in self.origins


def _is_same(origin: str, host: str, scheme: str) -> bool:
    its_scheme, separator, its_host = origin.partition("://")
    ours, theirs = split_host(host), split_host(its_host)
    if not separator or ours is None or theirs is None or its_scheme not in DEFAULT_PORTS:
        return False
    if its_scheme != scheme:  # a proxy may have ended TLS in front of the gateway, and then only names can be compared
        return its_scheme == "https" and ours[0] == theirs[0] and ours[1] == theirs[1]
    default = DEFAULT_PORTS[scheme]
    return ours[0] == theirs[0] and (ours[1] or default) == (theirs[1] or default)
