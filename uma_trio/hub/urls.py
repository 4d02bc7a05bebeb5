"""Which URLs may be opened, and which of them get the token."""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

from uma_trio.hub.errors import HubError

MAX_URL: Final = 8192
_PORTS: Final = {"https": 443, "http": 80}

NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that end with an IPv4 address.  Source: RFC 6052."""
GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All that the internet uses of IPv6.  Source: RFC 4291."""
DOCUMENTATION: Final = ipaddress.IPv6Network("3fff::/20")
"""Source: RFC 9637, which older versions of Python do not know."""

Origin = tuple[str, str, int]
"""Scheme, host and port."""


def parse_url(url: str) -> SplitResult:
    """Parse a URL that may be opened: https, or http of this machine.

    Raises:
        HubError: it may not.
    """
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise HubError(f"{shown} is not a URL", "check the spelling") from None
    if parts.scheme not in _PORTS or not host or len(url) > MAX_URL or not url.isprintable() or " " in url:
        raise HubError(f"{shown} is not a URL of a web server", "give one that begins with https://")
    if parts.username is not None or parts.password is not None:
        raise HubError(
            f"{shown} has a user name or a password in it, which would end up in files and logs",
            "download the file with another program, and serve it by its path",
        )
    if parts.scheme == "http" and not is_loopback(host):
        raise HubError(f"{shown} is not encrypted, so anybody on the way could replace the model", "use https://")
    return parts


def redirected(url: str, location: str) -> str:
    """The URL that a redirect of ``url`` leads to.

    Raises:
        HubError: it may not be followed.
    """
    try:
        target = urljoin(url, location)
        parts = parse_url(target)
    except ValueError:
        raise HubError(
            f"{urlsplit(url).hostname} redirects to something that is not a URL", "use another source"
        ) from None
    except HubError as error:
        raise HubError(
            f"{urlsplit(url).hostname} redirects to a place that may not be opened: {error.reason}",
            "use another source",
        ) from None
    if parts.scheme == "http" and urlsplit(url).scheme == "https":
        raise HubError(f"{urlsplit(url).hostname} redirects from https to http", "use another source")
    return target


def origin_of(url: str) -> Origin:
    """The origin of a URL that ``parse_url`` accepts."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet: not of this machine, a private network, or a single link."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in GLOBAL_UNICAST or ip in DOCUMENTATION:
            return False
    return ip.is_global and not ip.is_multicast


def without_secrets(url: str) -> str:
    """The URL for people and files: without user, password, query and fragment, which may be secret."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        shown = urlunsplit((parts.scheme, host, parts.path, "", ""))
    except ValueError:
        shown = url.partition("?")[0]
    return "".join(character if character.isprintable() else "?" for character in shown)[:200]
