"""`xkv-frontend keys`: add, list, revoke."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xkv_frontend.clock import entropy
from xkv_frontend.core.keys import (
    FILE_BYTES_MAX,
    KEY_CHARACTERS_MAX,
    Keys,
    KeysFileError,
    empty_keys,
    format_keys,
    new_key,
    parse_keys,
)
from xkv_frontend.core.names import NameRefusedError, tenant_name, user_name
from xkv_frontend.errors import ConfigError
from xkv_frontend.files import read_keys_text, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTION = click.option(
    "--keys-file", required=True, type=_FILE, help="As for `serve`; made when it is not there."
)


@click.group()
def keys() -> None:
    """Manage API keys. A running front end sees changes within a second."""


@keys.command()
@click.argument("tenant")
@_OPTION
@click.option("--user", metavar="NAME", help="The key is this user's, who cannot claim to be another.")
@click.option(
    "--stdin",
    "from_stdin",
    is_flag=True,
    help="Take a key of yours from the standard input (24 characters or more).",
)
def add(tenant: str, keys_file: Path, user: str | None, from_stdin: bool) -> None:
    """Add a key of TENANT and print it, once: the file has only a hash."""
    try:
        name, owner = tenant_name(tenant), None if user is None else user_name(user)
    except NameRefusedError as error:
        raise ConfigError(str(error)) from None
    if (owner is not None and len(owner.split()) != 1) or (owner or "").find("#") >= 0:
        raise ConfigError("the user of a key in a file has no blanks and no #")
    key = sys.stdin.readline(KEY_CHARACTERS_MAX + 2).strip() if from_stdin else new_key(entropy)
    with _locked(keys_file):
        before = _read(keys_file) if keys_file.exists() else empty_keys(entropy)
        after = _or_complain(lambda: before.add(name, key, entropy, owner))
        _write(keys_file, after)
    click.echo(f"id {list(after.records)[-1]}", err=True)
    if not from_stdin:
        click.echo(key)


@keys.command("list")
@_OPTION
def list_(keys_file: Path) -> None:
    """List ids, tenants and states."""
    for record in _read(keys_file).records.values():
        state = "active" if record.active else "revoked"
        click.echo(f"{record.id}  {record.tenant}  {state}{f'  {record.user}' if record.user else ''}")


@keys.command()
@click.argument("key_id")
@_OPTION
def revoke(key_id: str, keys_file: Path) -> None:
    """Revoke the key with this id. What runs with it is ended."""
    with _locked(keys_file):
        before = _read(keys_file)
        after = _or_complain(lambda: before.revoke(key_id))
        _write(keys_file, after)
    click.echo(f"revoked {key_id}")


def _read(path: Path) -> Keys:
    return _or_complain(lambda: parse_keys(read_keys_text(path, FILE_BYTES_MAX)))


def _write(path: Path, keys_after: Keys) -> None:
    """Replace the file, and leave who may read it as the operator has set it."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    write_private(path, format_keys(keys_after).encode(), mode=mode, replace=True)


def _or_complain(make: Callable[[], Keys]) -> Keys:
    try:
        return make()
    except KeysFileError as error:
        raise ConfigError(str(error)) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two commands at once take turns; the lock is on the folder, since the file is replaced."""
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
