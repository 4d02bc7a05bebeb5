"""Checks of the settings for HTTP, made before the model is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from uma_trio.config import Config, Http
from uma_trio.errors import ErrorWithRemedy
from uma_trio.files import read_text
from uma_trio.gateway.key_file import CurrentTenants
from uma_trio.gateway.origins import is_loopback
from uma_trio.gateway.peers.settings import PeerSettings
from uma_trio.protocol.address import InvalidAddress, http_address


class HttpSettingsError(ErrorWithRemedy):
    """The gateway would not be safe, or could not start, with these settings."""


def check_http_settings(config: Config) -> None:
    """Check what the gateway needs, if there is one.

    Raises:
        HttpSettingsError: other machines could use it without a key, or the files for TLS do not work.
        KeyFileError: the file of tenants cannot be used.
    """
    if config.http.listen is None:
        return
    tenants = CurrentTenants(config.http.keys).now()
    _check_tls(config.http)
    try:
        PeerSettings.of(config)
    except ValueError as error:
        raise HttpSettingsError(
            str(error),
            "make a secret with: (umask 077; od -An -tx1 -N32 /dev/urandom | tr -d ' \\n' > peers.key), and copy it to all peers",
        ) from None
    try:
        host, _ = http_address(config.http.listen)
    except InvalidAddress:  # reported when it is bound
        return
    if not is_loopback(host) and tenants is None and not config.http.insecure:
        raise HttpSettingsError(
            f"--http {config.http.listen} can be reached from other machines, and there are no API keys",
            "make one with: uma-trio keys create NAME; or use --http 127.0.0.1:PORT; or add --insecure to let everybody in",
        )


def _check_tls(http: Http) -> None:
    certificate, key = http.tls_certificate, http.tls_key
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise HttpSettingsError("HTTPS needs two files", "give both --tls-certificate and --tls-key")
    for path in (certificate, key):
        _check_readable(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise HttpSettingsError(
            f"--tls-certificate {certificate} and --tls-key {key} do not work: {str(reason).replace('_', ' ').lower()}",
            "give a certificate and its own key, both in PEM format, the key without a password",
        ) from None


def _check_readable(path: Path) -> None:
    try:
        read_text(path)
    except OSError as error:
        raise HttpSettingsError(f"cannot read {path}: {error.strerror}", "give the PEM file for TLS") from None
    except UnicodeDecodeError:
        raise HttpSettingsError(f"cannot read {path}: it is not text", "give the PEM file for TLS") from None


def _no_password() -> str:
    raise ValueError("the key has a password")
