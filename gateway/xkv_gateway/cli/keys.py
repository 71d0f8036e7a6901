"""`xkv-gateway keys`: who may connect to the endpoint with keys, and which namespaces they may touch."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xkv_gateway.cli.options import config_option, load_settings, state_dir_of
from xkv_gateway.daemon.ports import keys_directory
from xkv_gateway.errors import ConfigError, ExitCode
from xkv_gateway.keys.directory import (
    EVERY_NAMESPACE,
    KeyDirectory,
    check_namespaces,
    spelled_namespaces,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.decorators import FC


@click.group()
def keys() -> None:
    """Keys: let clients in from other machines, each to its own namespaces.

    Keys are files in a directory: that of --keys, else control.curve.keys, else `keys` in the state directory.
    """


def _directory_options(command: FC) -> FC:
    path = click.Path(path_type=Path)
    option: Callable[[FC], FC] = click.option(
        "--keys", "directory", type=path, metavar="DIR", help="Directory of the keys."
    )
    state: Callable[[FC], FC] = click.option(
        "--state-dir", metavar="DIR", help="Directory of what is kept between runs."
    )
    return option(state(config_option()(command)))


def _directory(directory: Path | None, state_dir: str | None, file: Path | None) -> KeyDirectory:
    if directory is not None:
        return KeyDirectory(directory.absolute())
    loaded = load_settings(file, {"state_dir": state_dir})
    return KeyDirectory(keys_directory(loaded.config, state_dir_of(loaded)))


@keys.command()
@_directory_options
def init(directory: Path | None, state_dir: str | None, file: Path | None) -> None:
    """Make the directory and the gateway's own key pair (mode 0600)."""
    found = _directory(directory, state_dir, file)
    pair = found.init()
    _note(found, "init server")
    click.echo(f"made the gateway's key pair in {found.path}")
    click.echo(f"public key of the gateway: {pair.public}")


@keys.command()
@click.argument("name")
@click.option(
    "--namespace", "namespaces", multiple=True, metavar="NS", help="One that the key may touch; repeat it."
)
@_directory_options
def new(
    name: str,
    namespaces: tuple[str, ...],
    directory: Path | None,
    state_dir: str | None,
    file: Path | None,
) -> None:
    """Make a key pair for a client; a running gateway knows it within a second.

    Without --namespace the key may touch every namespace; the default one is spelled _default.
    """
    found = _directory(directory, state_dir, file)
    granted = check_namespaces(namespaces) if namespaces else None
    path = found.new(name, granted)
    spelled = ", ".join(sorted(namespaces)) if namespaces else "every namespace"
    _note(found, f"new {name}, for {spelled if namespaces else EVERY_NAMESPACE}")
    click.echo(f"made the key {name}, for {spelled}")
    click.echo(f"move this file, which is all that the client needs, to it over a safe way: {path}")


@keys.command("list")
@_directory_options
def list_(directory: Path | None, state_dir: str | None, file: Path | None) -> ExitCode:
    """List the keys and what they may touch; exit code 1: some file does not count."""
    found = _directory(directory, state_dir, file)
    try:
        grants, faults = found.clients()
    except OSError as error:
        raise ConfigError(
            f"the key directory {found.path} cannot be read: {error.strerror}",
            advice="`xkv-gateway keys init` makes one.",
        ) from None
    rows = sorted(
        (grant.name, ", ".join(spelled_namespaces(grant)), public) for public, grant in grants.items()
    )
    table = [("name", "namespaces", "public key"), *rows]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    for name, namespaces, public in table:
        click.echo(f"{name:{widths[0]}}  {namespaces:{widths[1]}}  {public}")
    for fault in faults:
        click.echo(f"does not count: {fault}", err=True)
    return ExitCode.DEGRADED if faults else ExitCode.OK


@keys.command()
@click.argument("name")
@_directory_options
def revoke(name: str, directory: Path | None, state_dir: str | None, file: Path | None) -> None:
    """Forget a client's key: a running gateway refuses it within a second, also on open connections."""
    found = _directory(directory, state_dir, file)
    found.revoke(name)
    _note(found, f"revoke {name}")
    click.echo(f"revoked {name}")


def _note(directory: KeyDirectory, what: str) -> None:
    """Write who did it, and from where, into the audit file."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    on_behalf_of = os.environ.get("SUDO_USER", "")
    # SSH_CONNECTION begins with the address of the client.
    origin = os.environ.get("SSH_CONNECTION", "").partition(" ")[0] or "this machine"
    who = f"{user} (uid {os.getuid()}{', sudo by ' + on_behalf_of if on_behalf_of else ''})"
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        directory.note(ascii(f"{when} {what} by {who} from {origin}")[1:-1])
    except OSError as error:
        click.echo(f"the audit file could not be written: {error.strerror}", err=True)
