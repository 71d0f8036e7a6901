"""The command line of the soft card: what can be said, and what of it makes sense."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from xkv_nvmeof.dhchap.controller import ControllerKeys
from xkv_nvmeof.dhchap.secret import SECRET_TEXT_MAX, DhchapSecret, SecretFormatError
from xkv_nvmeof.spec import DISCOVERY_NQN, NQN_MAX_BYTES
from xkv_process.files import regular_only

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_nvmeof.digest import DigestPolicy

_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
PORTALS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked. `listen` are numeric addresses and ports."""

    file: Path | None
    size_bytes: int | None
    block_bytes: int | None
    listen: tuple[tuple[str, int], ...]
    nqn: str | None
    allowed_hosts: frozenset[str] | None
    exit_with_stdin: bool
    read_only: bool
    reservations: bool
    authentication: ControllerKeys | None
    header_digest: DigestPolicy
    data_digest: DigestPolicy


def parse_size(text: str) -> int:
    """Return bytes: a number, perhaps with KiB, MiB, GiB or TiB.

    Raises:
        click.BadParameter: something else.
    """
    match = re.fullmatch(r"(\d{1,15})(KiB|MiB|GiB|TiB)?", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size: a number of bytes, or one with KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[match[2] or ""]


def parse_listen(text: str, *, allow_remote: bool) -> tuple[str, int]:
    """Return the numeric address and the port of `ADDRESS:PORT` (IPv6 in brackets).

    Raises:
        click.BadParameter: something else, or an address beyond this machine without permission.
    """
    host, separator, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} does not begin with a numeric address") from error
    if not separator or not port_text.isdecimal() or int(port_text) > 65535:
        raise click.BadParameter(f"{text!r} does not end with a port")
    if not address.is_loopback and not allow_remote:
        raise click.BadParameter(f"{host} is not a loopback address: --allow-remote is needed for that")
    return str(address), int(port_text)


def parse_nqn(text: str | None) -> str | None:
    """Return the name, if it is one for a card.

    Raises:
        click.BadParameter: it is not.
    """
    if text is not None and (
        not text.startswith("nqn.") or len(text.encode()) > NQN_MAX_BYTES or text == DISCOVERY_NQN
    ):
        raise click.BadParameter(f"{text!r} is no NVMe qualified name for a card")
    return text


def read_keys(host_file: Path | None, controller_file: Path | None) -> ControllerKeys | None:
    """Return the keys of the files; None without files.

    Raises:
        click.BadParameter: a file cannot be read, others can read it too, or it holds no key; it is named.
    """
    if host_file is None:
        if controller_file is not None:
            raise click.BadParameter("--dhchap-ctrl-key-file goes with --dhchap-key-file")
        return None
    controller = None if controller_file is None else _read_secret(controller_file)
    return ControllerKeys(_read_secret(host_file), os.urandom, controller)


def _read_secret(path: Path) -> DhchapSecret:
    try:
        with open(path, "rb", opener=regular_only) as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) & 0o077:
                raise click.BadParameter(f"{path}: others can read the key; chmod 600 it")
            text = stream.read(SECRET_TEXT_MAX)
        return DhchapSecret.parse(text.decode("ascii", "replace"))
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from error
    except SecretFormatError as error:
        raise click.BadParameter(f"{path}: {error}") from None
