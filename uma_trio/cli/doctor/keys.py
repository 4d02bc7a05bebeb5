"""Check of the API keys of the HTTP gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uma_trio.cli.doctor.findings import Finding

if TYPE_CHECKING:
    from uma_trio.config import Config


def check_keys(settings: Config) -> Iterator[Finding]:
    """Check the file of tenants, if there is one.  A file without keys refuses everybody."""
    from uma_trio.gateway.key_file import KeyFileError, default_path, read

    path = settings.http.keys or default_path()
    if settings.http.keys is None and not path.exists():
        return
    try:
        tenants = read(path).by_name.values()
    except KeyFileError as error:
        yield Finding("keys", "problem", error.reason, error.remedy)
        return
    n_keys = sum(len(tenant.keys) for tenant in tenants)
    if n_keys:
        holders = sum(bool(tenant.keys) for tenant in tenants)
        yield Finding("keys", "ok", f"API keys in {path}: {n_keys}, of tenants: {holders}; HTTP needs one of them")
        return
    fix = "uma-trio keys create NAME; to serve without keys, delete the file and restart the daemon"
    yield Finding("keys", "warning", f"{path} has no API key, so HTTP refuses everybody", fix)
