"""``uma-trio keys``: make, list and revoke the API keys of the HTTP gateway."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from uma_trio.cli import SuggestingGroup
from uma_trio.cli.stdio import fail, print_table

if TYPE_CHECKING:
    from uma_trio.gateway.tenants import Tenant

FILE_VARIABLE: Final = "UMA_HTTP_KEYS"

_file = click.option(
    "--file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=FILE_VARIABLE,
    help="The file of tenants.  [default: $UMA_HTTP_KEYS, or keys.yaml in the configuration folder]",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("keys", cls=SuggestingGroup)
def command() -> None:
    """Make, list and revoke the API keys of the HTTP gateway.

    A key belongs to a tenant, who has a share of the model and limits.  As soon as there is a key, the gateway serves only
    requests that have one.  A running gateway notices changes at once.

    \b
      uma-trio keys create alice --weight 2 --rpm 60
      uma-trio keys create ops --admin
      uma-trio keys list
      uma-trio keys revoke alice
    """


@command.command(short_help="Make a key for a tenant, and print it.")
@click.argument("name")
@click.option("--weight", type=float, help="Share of the model, relative to tenants with 1.")
@click.option("--max-requests", type=int, help="Most answers in flight at a time.")
@click.option("--rpm", "requests_per_minute", type=int, help="Most requests a minute.")
@click.option("--tpm", "tokens_per_minute", type=int, help="Most tokens a minute, of prompts and answers together.")
@click.option("--quota", help="Most tokens a day or a month, such as 1000000/month.", metavar="TOKENS[/day|/month]")
@click.option("--admin/--no-admin", default=None, help="Whether the tenant may use the routes for operators.")
@_file
@_json
def create(name: str, quota: str | None, file: Path | None, as_json: bool, **limits: Any) -> None:
    """Make a key for the tenant NAME, and print it: it is stored nowhere and cannot be shown again.

    A tenant may have several keys, for example to replace one without a break.  Limits that you give replace those of
    an existing tenant.

    \b
      uma-trio keys create alice --weight 2 --rpm 60 --tpm 20000 --quota 5000000/month
    """
    with _reporting():
        import datetime

        from uma_trio.gateway.key_file import editing
        from uma_trio.gateway.tenants import Tenants, change, new_key

        given = {field: value for field, value in limits.items() if value is not None} | _parse_quota(quota)
        path = _path(file)
        with editing(path) as tenants:
            is_first = not tenants
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            text, key = new_key(Tenants(tenants), today)
            before = tenants.get(name)
            tenants[name] = after = change(name, before, given, key)
    if as_json:
        click.echo(json.dumps({"tenant": name, "id": key.id, "key": text}))
        return
    click.echo(text)
    click.echo(f"\nThis key of {name} is not stored and will not be shown again.  Its hash is in {path}.", err=True)
    if before is not None:
        click.echo(_about_earlier_keys(before), err=True)
        if given:
            click.echo(f"The limits of {name}, for all keys together, are now: {_limits(after) or 'none'}.", err=True)
    if is_first:
        click.echo(
            "From now on a gateway that uses this file asks every client for a key.  To serve without keys again, delete "
            "the file and restart the daemon.",
            err=True,
        )


@command.command("list", short_help="List all tenants, their keys and limits.")
@_file
@_json
def list_(file: Path | None, as_json: bool) -> None:
    """List all tenants: their keys by id, their limits, and what they have used of their quotas."""
    with _reporting():
        from uma_trio import config
        from uma_trio.gateway.key_file import read
        from uma_trio.gateway.tenants import to_plain
        from uma_trio.gateway.usage import read_usage, usage_path

        path = _path(file)
        tenants = read(path).by_name if path.exists() else {}
        used = read_usage(usage_path(config.load(environment=os.environ)))
    if as_json:
        click.echo(json.dumps(to_plain(tenants)))
        return
    if not tenants:
        click.echo("no tenants yet; make a key with: uma-trio keys create NAME")
        return
    print_table([("TENANT", "KEYS", "WEIGHT", "LIMITS"), *(_row(tenant, used) for tenant in tenants.values())])


@command.command()
@click.argument("names", metavar="NAME_OR_ID...", nargs=-1, required=True)
@_file
def revoke(names: tuple[str, ...], file: Path | None) -> None:
    """Revoke a key by its id, or all keys of a tenant by its name.

    Requests with the key are refused from now on; answers that have begun go on.  A tenant without keys stays, with its
    limits, until you remove it from the file.

    \b
      uma-trio keys revoke 5f3a09c1
      uma-trio keys revoke alice
    """
    with _reporting():
        from uma_trio.gateway.key_file import editing
        from uma_trio.gateway.tenants import without_keys

        path = _path(file)
        done: list[str] = []
        with editing(path) as tenants:
            for name in names:
                revoked = without_keys(tenants, name)
                if not revoked and name not in tenants:
                    fail(
                        "keys",
                        f"{name} is neither a tenant nor the id of a key in {path}; uma-trio keys list shows them",
                    )
                done += revoked
        is_last = bool(done) and not any(tenant.keys for tenant in tenants.values())
    for key_id in done:
        click.echo(f"revoked {key_id}")
    if is_last:
        click.echo(
            "No key is left, so a gateway that uses this file now refuses everybody.  Make a key with: uma-trio keys create "
            f"NAME.  To serve without keys, delete {path} and restart the daemon.",
            err=True,
        )


def _path(file: Path | None) -> Path:
    from uma_trio.gateway.key_file import default_path

    return Path(os.path.abspath(file.expanduser())) if file is not None else default_path()


def _parse_quota(quota: str | None) -> dict[str, Any]:
    if quota is None:
        return {}
    tokens, _, period = quota.partition("/")
    try:
        quota_fields: dict[str, Any] = {"token_quota": int(tokens.replace("_", "").replace(",", ""))}
    except ValueError:
        raise click.UsageError(f"--quota {quota}: expected a number of tokens, such as 1000000/month") from None
    if period not in ("", "day", "month"):
        raise click.UsageError(f"--quota {quota}: a quota is for a day or a month, such as 1000000/month")
    return {**quota_fields, "quota_period": period} if period else quota_fields


def _row(tenant: Tenant, used: Mapping[tuple[str, str], int]) -> tuple[str, str, str, str]:
    import time

    from uma_trio.gateway.limits import QuotaPeriod

    period = QuotaPeriod.at(time.time(), tenant.quota_period)
    limits = _limits(tenant, f" ({used.get((tenant.name, period.name), 0):,} used)")
    return tenant.name, " ".join(key.id for key in tenant.keys) or "none", f"{tenant.weight:g}", limits


def _limits(tenant: Tenant, used: str = "") -> str:
    """The limits of a tenant in words.

    Args:
        used: what to say of the quota besides.
    """
    limits = [
        f"{value:,} {unit}"
        for value, unit in (
            (tenant.max_requests, "in flight"),
            (tenant.requests_per_minute, "requests/minute"),
            (tenant.tokens_per_minute, "tokens/minute"),
            (tenant.token_quota, f"tokens/{tenant.quota_period}{used}"),
        )
        if value is not None
    ]
    return ", ".join([*limits, "admin"] if tenant.admin else limits)


def _about_earlier_keys(tenant: Tenant) -> str:
    n = len(tenant.keys)
    if not n:
        return f"{tenant.name} had no key any more; the limits are those from before."
    keys = "a key" if n == 1 else f"{n} keys"
    return f"{tenant.name} had {keys} already; all of them work.  uma-trio keys revoke ID revokes one."


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """End the program with one line if the file or a name is not valid."""
    from uma_trio.config import ConfigError
    from uma_trio.gateway.key_file import KeyFileError
    from uma_trio.gateway.tenants import TenantsError

    try:
        yield
    except (ConfigError, KeyFileError, TenantsError) as error:
        fail("keys", str(error))
