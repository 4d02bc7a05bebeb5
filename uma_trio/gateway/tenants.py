"""Tenants of the HTTP gateway: who may use it, with which keys, and how much of it.

A tenant is a principal with API keys and limits.  Tenants live in a YAML file of their own, which ``uma-trio keys``
writes and the gateway reads again when it changes::

    tenants:
      alice:
        weight: 2
        requests_per_minute: 60
        keys:
          - {id: 5f3a09c1, sha256: 9b74c98..., created: "2026-01-31"}

A key is ``uma-ID-SECRET``.  The id finds the hash to compare with.  The secret has 256 random bits, so the file holds plain
SHA-256 hashes: nobody can try that many, and a slow hash such as scrypt, made for passwords that people choose, would let
anyone keep the gateway busy with wrong keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from uma_trio.principal import Principal, PrincipalLimit, PrincipalWeight
from uma_trio.protocol.field_errors import explain

MAX_TENANTS: Final = 1000
"""Reading the file of so many takes about half a second, during which the gateway answers nobody."""
MAX_KEYS: Final = 100
"""Keys of one tenant."""

PREFIX: Final = "uma"
KEY: Final = re.compile(rf"{PREFIX}-([0-9a-f]{{8}})-[\w-]{{43}}", re.ASCII)
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
NAME_RULE: Final = "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit"

NOBODY: Final = hashlib.sha256(b"").digest()
"""Compared with a key that has no tenant, so that an unknown id takes as long as a wrong secret."""

Count = Annotated[int, Meta(ge=1, le=10**15)]
Period = Literal["day", "month"]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of an API key."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{8}$")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: str
    """Day on which it was made."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One party with keys of its own.  A limit that is ``None`` does not exist."""

    name: str = ""
    weight: PrincipalWeight = 1.0
    """Share of the model against other principals."""
    max_requests: PrincipalLimit | None = None
    """Answers in flight at a time, waiting ones included."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Tokens of prompts and answers together, here and in ``token_quota``."""
    token_quota: Count | None = None
    """Tokens in a ``quota_period``."""
    quota_period: Period = "month"
    """A day or a month of the calendar, in UTC."""
    admin: bool = False
    """Whether the tenant may use the routes for operators."""
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()

    @property
    def principal(self) -> Principal:
        """The principal that the daemon charges.  No Unix user has such a name."""
        return Principal(f"tenant:{self.name}", self.weight, self.max_requests)


class TenantsError(Exception):
    """The tenants are not valid.  The message names the tenant, the field and its bounds."""


class Tenants:
    """All tenants, by name and by key."""

    def __init__(self, by_name: Mapping[str, Tenant]) -> None:
        self.by_name = by_name
        self._by_key = {
            key.id: (bytes.fromhex(key.sha256), tenant) for tenant in by_name.values() for key in tenant.keys
        }

    def find(self, presented: str) -> Tenant | None:
        """Return the tenant of an API key, ``None`` if it is nobody's.  How long that takes says nothing about a key."""
        match = KEY.fullmatch(presented)
        expected, tenant = self._by_key.get(match[1] if match else "", (NOBODY, None))
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        return tenant if hmac.compare_digest(digest, expected) else None

    def owner_of(self, key_id: str) -> Tenant | None:
        """Return the tenant that has a key of this id."""
        return self._by_key.get(key_id, (NOBODY, None))[1]


def new_key(known: Tenants, today: str) -> tuple[str, Key]:
    """Make a key: the text for the tenant, and what is kept of it."""
    while known.owner_of(key_id := secrets.token_hex(4)) is not None:
        """Ids are short, so another one may have this one."""
    text = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
    return text, Key(id=key_id, sha256=hashlib.sha256(text.encode()).hexdigest(), created=today)


def change(name: str, tenant: Tenant | None, fields: Mapping[str, object], key: Key) -> Tenant:
    """Return a tenant with other values of ``fields`` and one more key; a new one if ``tenant`` is ``None``.

    Raises:
        TenantsError: the name or a field is not valid, or there are too many keys.
    """
    before = {} if tenant is None else _plain(tenant)
    keys = () if tenant is None else tenant.keys
    return make(name, {**before, **fields, "keys": [*keys, key]})


def without_keys(tenants: dict[str, Tenant], name: str) -> list[str]:
    """Remove the key with the id ``name``, and all keys of the tenant ``name``; returns the ids of what was removed."""
    removed: list[str] = []
    for tenant in list(tenants.values()):
        kept = tuple(key for key in tenant.keys if name not in (key.id, tenant.name))
        removed += [key.id for key in tenant.keys if key not in kept]
        tenants[tenant.name] = msgspec.structs.replace(tenant, keys=kept)
    return removed


def parse(content: object) -> Tenants:
    """Check the content of the file of tenants.

    Raises:
        TenantsError: something in it is unknown, of the wrong type, out of bounds, or there twice.
    """
    if content is None:
        return Tenants({})
    if not isinstance(content, dict) or content.keys() - {"tenants"}:
        raise TenantsError("expected one key, tenants:, and below it a name and limits for each tenant")
    tenants = content.get("tenants") or {}
    if not isinstance(tenants, dict):
        raise TenantsError("tenants: expected a name and limits for each tenant")
    if len(tenants) > MAX_TENANTS:
        raise TenantsError(f"{len(tenants):,} tenants; at most {MAX_TENANTS:,} are possible")
    by_name: dict[str, Tenant] = {}
    key_ids: set[str] = set()
    for name, fields in tenants.items():
        tenant = make(name, {} if fields is None else fields)
        by_name[tenant.name] = tenant
        for key in tenant.keys:
            if key.id in key_ids:
                raise TenantsError(f"{tenant.name}: the key {key.id} is there twice; remove one of them")
            key_ids.add(key.id)
    return Tenants(by_name)


def make(name: object, fields: object) -> Tenant:
    """Make a tenant of what the file or the command line says.

    Raises:
        TenantsError: the name or a field is not valid.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise TenantsError(f"{str(name)[:100]!r} is not a valid tenant name: use {NAME_RULE}")
    if not isinstance(fields, dict) or "name" in fields:
        raise TenantsError(f"{name}: expected limits such as requests_per_minute, and keys")
    try:
        return msgspec.convert({**fields, "name": name}, Tenant)
    except msgspec.ValidationError as error:
        raise TenantsError(f"{name}: {explain(error, Tenant, fields).message[:300]}") from None


def to_plain(tenants: Mapping[str, Tenant]) -> dict[str, object]:
    """The reverse of ``parse``: the content of the file."""
    return {"tenants": {name: _plain(tenant) for name, tenant in tenants.items()}}


def _plain(tenant: Tenant) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(tenant)
    del fields["name"]
    return fields
