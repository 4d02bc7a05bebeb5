"""Who the peers of this daemon are, as its settings say it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attrs

from uma_trio.config import MB, Config, Http
from uma_trio.files import read_text, state_folder
from uma_trio.protocol.address import InvalidAddress, http_address

MIN_SECRET_CHARS: Final = 32


@attrs.frozen
class PeerSettings:
    """The other daemons, and how they call this one."""

    urls: tuple[str, ...]
    """The own one may be among them."""
    own_url: str
    secret: bytes = attrs.field(repr=False)
    folder: Path
    """For files that arrive."""
    max_state_bytes: int

    @property
    def others(self) -> list[str]:
        """The URLs of the others."""
        return [url for url in self.urls if url != self.own_url]

    @classmethod
    def of(cls, config: Config) -> PeerSettings | None:
        """
        Returns:
            The settings; ``None`` if there are no peers.

        Raises:
            ValueError: they cannot be used; the message says why.
        """
        http = config.http
        if not http.peers:
            return None
        secret = _secret_in(http.peers_key)
        return cls(
            _urls_of(http),
            _own_url_of(http),
            secret,
            state_folder(config.sessions.state_dir) / "incoming",
            config.sessions.offload_max_mb * MB,
        )


def _secret_in(file: Path | None) -> bytes:
    if file is None:
        raise ValueError("--peers needs --peers-key, a file with the secret that they share")
    try:
        secret, mode = read_text(file).strip(), os.stat(file).st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --peers-key {file}: {error}") from None
    if len(secret) < MIN_SECRET_CHARS:
        raise ValueError(f"the secret in {file} has fewer than {MIN_SECRET_CHARS} characters")
    if mode & 0o077:
        raise ValueError(f"others may read {file}: chmod 600 it")
    return secret.encode()


def _urls_of(http: Http) -> tuple[str, ...]:
    urls = tuple([url.strip().rstrip("/") for url in http.peers.split(",") if url.strip()])
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--peers: {url!r} is not a URL such as http://10.0.0.2:8080")
    return urls


def _own_url_of(http: Http) -> str:
    own_url = (http.peer_url or _listening_at(http)).rstrip("/")
    if http.peer_url is None and urlsplit(own_url).hostname in ("0.0.0.0", "::"):
        raise ValueError(
            "--peers needs --peer-url, which is how the others call this daemon, since it has many addresses"
        )
    return own_url


def _listening_at(http: Http) -> str:
    scheme = "http" if http.tls_certificate is None else "https"
    try:
        host, port = http_address(http.listen or "0")
    except InvalidAddress as error:
        raise ValueError(f"--http {error}") from None
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
