"""`xkv-frontend secret new` and `xkv-frontend salt`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from xkv_frontend.clock import entropy
from xkv_frontend.core.names import NameRefusedError, Scope, ScopeIds, session_name, tenant_name, user_name
from xkv_frontend.core.salt import SECRET_BYTES_MIN, Salter, scope_tag
from xkv_frontend.errors import ConfigError
from xkv_frontend.files import load_secret, write_private

_FILE = click.Path(path_type=Path, dir_okay=False)
ROTATED: Final = "Rotated: every tenant has a new salt, so that the cache is empty for all of them, and what was stored stays unused"


@click.group()
def secret() -> None:
    """Make the secret that all salts come from."""


@secret.command()
@click.argument("file", type=_FILE)
@click.option(
    "--rotate", is_flag=True, help="Replace the secret in FILE: the cache is then empty for everybody."
)
def new(file: Path, rotate: bool) -> None:
    """Write a new random secret to FILE (mode 0600)."""
    existed = file.exists()
    if existed and not rotate:
        raise ConfigError(
            f"{file} exists already",
            advice="--rotate replaces it: all tenants get new salts, and their cache is empty until it fills again.",
        )
    write_private(file, entropy(SECRET_BYTES_MIN).hex().encode() + b"\n", replace=rotate)
    click.echo(f"Wrote a new secret to {file}.")
    if existed:
        click.echo(
            f"{ROTATED} until it is evicted. Restart every front end of the deployment with it, and set the scopes of "
            "tenants again (`xkv-frontend salt TENANT`, `xkv-gateway tenant set`)."
        )
    else:
        click.echo("Keep it: a new one empties the cache for all tenants.")


@click.command()
@click.argument("tenant")
@click.option("--deployment", required=True, metavar="NAME", help="As for `serve`.")
@click.option("--secret-file", type=_FILE, help="As for `serve`.")
@click.option("--user", metavar="NAME", help="The scope of a user of the tenant.")
@click.option(
    "--session", metavar="NAME", help="The scope of a session of the tenant (with --user: of that user)."
)
@click.option(
    "--reveal", is_flag=True, help="Print the salt itself: whoever has it can read what the tenant caches."
)
def salt(
    tenant: str,
    deployment: str,
    secret_file: Path | None,
    user: str | None,
    session: str | None,
    reveal: bool,
) -> None:
    """Print the scope tag of a tenant: the name by which the gateway knows it, for quotas and wiping."""
    try:
        ids = ScopeIds(
            tenant_name(tenant),
            None if user is None else user_name(user),
            None if session is None else session_name(session),
        )
        salter = Salter(load_secret(secret_file, dict(os.environ)), deployment)
    except NameRefusedError as error:
        raise ConfigError(str(error)) from None
    scope = Scope.SESSION if session is not None else Scope.USER if user is not None else Scope.TENANT
    value = salter.salt(scope, ids)
    assert value is not None
    click.echo(value if reveal else scope_tag(value))
