"""Reads the keys with which this host and its target prove who they are (`[fabric]`, DH-HMAC-CHAP)."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from xkv_gateway.errors import ConfigError
from xkv_nvmeof.dhchap.host import HostKeys
from xkv_nvmeof.dhchap.secret import SECRET_TEXT_MAX, DhchapSecret, SecretFormatError
from xkv_process.files import regular_only

if TYPE_CHECKING:
    from xkv_gateway.config.fabric import FabricConfig


def read_host_keys(fabric: FabricConfig, credentials: Path | None) -> HostKeys | None:
    """Return the keys that the configuration names; None: it names none.

    Args:
        fabric: `[fabric]`.
        credentials: the directory of systemd's credentials, where there is one.

    Raises:
        ConfigError: a file cannot be read, others can read it too, or it holds no key; the setting and the file are named.
    """
    if fabric.dhchap_key_file is None:
        return None
    host = read_key("fabric.dhchap_key_file", fabric.dhchap_key_file, credentials)
    if fabric.dhchap_ctrl_key_file is None:
        return HostKeys(host)
    return HostKeys(host, read_key("fabric.dhchap_ctrl_key_file", fabric.dhchap_ctrl_key_file, credentials))


def read_key(setting: str, name: str, credentials: Path | None) -> DhchapSecret:
    """Return the key in a file or credential. Raises ConfigError, as `read_host_keys`."""
    credential = not name.startswith("/")
    if credential and credentials is None:
        raise ConfigError(
            f"{setting} = {name!r} is a systemd credential, and there are none here",
            advice="Write the absolute path of a file, or run it as a service with LoadCredential=.",
        )
    path = credentials / name if credential and credentials is not None else Path(name)
    try:
        with open(path, "rb", opener=regular_only) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            text = stream.read(SECRET_TEXT_MAX)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None
    if mode & 0o077 and not credential:  # who may read a credential is systemd's to decide
        raise ConfigError(f"{setting}: others can read {path}", advice=f"chmod 600 {path}")
    try:
        return DhchapSecret.parse(text.decode("ascii", "replace"))
    except SecretFormatError as error:
        raise ConfigError(
            f"{setting}: {path}: {error}", advice="`xkv-gateway fabric new-key` makes a good one."
        ) from None
