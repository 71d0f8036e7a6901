"""The directory of keys: what lies in it, what of that counts, and how it changes.

    server.key  server.key_secret     the gateway's own pair
    NAME.key                          a client: its public key, and the namespaces that it may touch
    NAME.key_secret                   what that client needs; the gateway does without it, so it may be moved away
    audit.log                         who made and revoked which key

A client is known as long as its `NAME.key` is there. Whoever can write here decides who gets in, so nobody but the owner may.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import ConfigError, KeyNameError
from xkv_rpc.curve_files import (
    PUBLIC_SUFFIX,
    SECRET_MODE,
    SECRET_SUFFIX,
    Certificate,
    CertificateError,
    read_certificate,
    refuse_open_secret,
    write_certificate,
)
from xkv_rpc.doors import Grant
from xkv_rpc.messages import DEFAULT_NAME, NAMESPACE_BYTES_MAX
from xkv_rpc.porter import new_key_pair

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xkv_rpc.doors import KeyPair

SERVER: Final = "server"
AUDIT_FILE: Final = "audit.log"
KEYS_MAX: Final = 4096
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
EVERY_NAMESPACE: Final = "*"
NAMESPACES_MAX: Final = 256
_PUBLIC_MODE: Final = 0o644


@dataclass(frozen=True, slots=True)
class KeySet:
    """What a directory said when it was read."""

    server: KeyPair
    grants: dict[str, Grant]
    """By public key."""
    faults: list[str] = field(default_factory=list)
    """What does not count, and why; a sentence each, without a secret."""


def check_name(name: str) -> str:
    """Return the name of a client's key. Raises KeyNameError where it cannot be one."""
    if name == SERVER or not NAME.fullmatch(name):
        raise KeyNameError(
            f"{name!r} cannot be the name of a key",
            advice=f"Use letters, digits and . _ - (64 at most); {SERVER!r} is the gateway itself.",
        )
    return name


def check_namespaces(spelled: Sequence[str]) -> frozenset[str]:
    """Return the namespaces as the protocol writes them: `_default` is the empty one."""
    for namespace in spelled:
        if not namespace or "\0" in namespace or len(os.fsencode(namespace)) > NAMESPACE_BYTES_MAX:
            raise KeyNameError(
                f"{namespace!r} is not a namespace",
                advice=f"Write 1 to {NAMESPACE_BYTES_MAX} bytes; the default one is {DEFAULT_NAME}.",
            )
    if len(spelled) > NAMESPACES_MAX:
        raise KeyNameError(f"a key has at most {NAMESPACES_MAX} namespaces")
    return frozenset("" if namespace == DEFAULT_NAME else namespace for namespace in spelled)


def spelled_namespaces(grant: Grant) -> list[str]:
    """Return the namespaces of a grant as operators write them."""
    if grant.namespaces is None:
        return [EVERY_NAMESPACE]
    return sorted(namespace or DEFAULT_NAME for namespace in grant.namespaces)


class KeyDirectory:
    """The directory at a path.

    Args:
        path: where it is.
        credentials: systemd's directory of credentials, where the gateway's own pair may lie instead.
    """

    def __init__(self, path: Path, credentials: Path | None = None) -> None:
        self.path = path
        self._credentials = credentials

    # --- reading --------------------------------------------------------------------------------------------

    def server_pair(self) -> KeyPair:
        """Return the gateway's own pair.

        Raises:
            ConfigError: there is none, or it is open to others.
        """
        given = None if self._credentials is None else self._credentials / f"{SERVER}{SECRET_SUFFIX}"
        try:
            if given is not None and given.exists():
                # systemd has placed it for us alone; its mode is for others to read there.
                return read_certificate(given, secret=True, private=False).pair
            return read_certificate(self._secret(SERVER), secret=True).pair
        except CertificateError as error:
            raise ConfigError(
                f"no usable server key: {error}",
                advice=f"`xkv-gateway keys init --keys {self.path}` makes one.",
            ) from None

    def read(self) -> KeySet:
        """Read everything.

        Raises:
            ConfigError: no server key.
            OSError: the directory cannot be read.
        """
        server = self.server_pair()
        grants, faults = self.clients()
        return KeySet(server, grants, faults)

    def clients(self) -> tuple[dict[str, Grant], list[str]]:
        """Return the clients by public key, and what does not count and why.

        Raises:
            OSError: the directory cannot be read.
        """
        grants: dict[str, Grant] = {}
        faults: list[str] = []
        if self.path.stat().st_mode & 0o022:
            raise PermissionError(0, "others than its owner may write to it", str(self.path))
        for name in sorted(entry.name for entry in self.path.iterdir()):
            try:
                if name.endswith(SECRET_SUFFIX):
                    refuse_open_secret(self.path / name, stat.S_IMODE((self.path / name).stat().st_mode))
                elif name.endswith(PUBLIC_SUFFIX) and name != f"{SERVER}{PUBLIC_SUFFIX}":
                    public, grant = self._client(name.removesuffix(PUBLIC_SUFFIX))
                    if public in grants:
                        faults.append(f"{self.path / name}: has the key of {grants[public].name}")
                    elif len(grants) < KEYS_MAX:
                        grants[public] = grant
                    else:
                        faults.append(f"{self.path / name}: more than {KEYS_MAX} keys")
            except CertificateError as error:
                faults.append(str(error))
            except FileNotFoundError:
                continue  # revoked meanwhile
        return grants, faults

    def _client(self, name: str) -> tuple[str, Grant]:
        path = self._public(name)
        if path.stat().st_mode & 0o022:
            raise CertificateError(f"{path}: others than its owner may write to it")
        certificate = read_certificate(path)
        if not NAME.fullmatch(name):
            raise CertificateError(f"{path}: is not the name of a key")
        return certificate.public, Grant(name, _namespaces_of(path, certificate))

    def fingerprint(self) -> tuple[tuple[str, int, int, int, int], ...]:
        """Return what differs once anything in the directory has changed. Raises OSError."""
        own = self.path.stat()
        entries = [(".", own.st_ino, own.st_mode, own.st_mtime_ns, 0)]
        with os.scandir(self.path) as found:
            for entry in found:
                if entry.name.endswith((PUBLIC_SUFFIX, SECRET_SUFFIX)):
                    with contextlib.suppress(FileNotFoundError):
                        now = entry.stat()
                        entries.append((entry.name, now.st_ino, now.st_mode, now.st_mtime_ns, now.st_size))
        return tuple(sorted(entries))

    # --- changing -------------------------------------------------------------------------------------------

    def init(self) -> KeyPair:
        """Make the directory and the gateway's own pair.

        Raises:
            ConfigError: there is one already, or it cannot be written.
        """
        pair = new_key_pair()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_certificate(self._secret(SERVER), Certificate(pair.public, pair.secret), mode=SECRET_MODE)
            self._public(SERVER).unlink(missing_ok=True)
            write_certificate(self._public(SERVER), Certificate(pair.public), mode=_PUBLIC_MODE)
        except FileExistsError:
            raise ConfigError(
                f"{self._secret(SERVER)} is there already and was left alone",
                advice="To change the server's key, move it away; every client needs new keys then.",
            ) from None
        except OSError as error:
            raise self._unusable(error) from None
        return pair

    def new(self, name: str, namespaces: frozenset[str] | None) -> Path:
        """Make a client's pair; returns the secret certificate, which is all that the client needs.

        Raises:
            ConfigError: there is one of this name, or no server key, or it cannot be written.
        """
        check_name(name)
        pair, server = new_key_pair(), self.server_pair()
        grant = Grant(name, namespaces)
        spelled = json.dumps(spelled_namespaces(grant)) if namespaces is not None else EVERY_NAMESPACE
        secret = Certificate(pair.public, pair.secret, {"server-key": server.public, "namespaces": spelled})
        public, path = Certificate(pair.public, None, {"namespaces": spelled}), self._secret(name)
        try:
            if self._public(name).exists():
                raise FileExistsError  # noqa: TRY301 - one place says so
            write_certificate(path, secret, mode=SECRET_MODE)
            # The gateway knows the key from here on.
            write_certificate(self._public(name), public, mode=_PUBLIC_MODE)
        except FileExistsError:
            raise KeyNameError(
                f"there is a key {name} already", advice=f"`xkv-gateway keys revoke {name}` first."
            ) from None
        except OSError as error:
            raise self._unusable(error) from None
        return path

    def revoke(self, name: str) -> None:
        """Forget a client's key; running gateways do so within a second.

        Raises:
            KeyNameError: there is none of this name.
            ConfigError: it cannot be removed.
        """
        check_name(name)
        try:
            self._public(name).unlink()
            self._secret(name).unlink(missing_ok=True)
        except FileNotFoundError:
            raise KeyNameError(f"there is no key {name}", advice="`xkv-gateway keys list`") from None
        except OSError as error:
            raise self._unusable(error) from None

    def note(self, line: str) -> None:
        """Append to the audit file; a change is not undone where that fails, so the caller says so.

        Raises:
            OSError: it cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path / AUDIT_FILE, flags, SECRET_MODE)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)

    def _public(self, name: str) -> Path:
        return self.path / f"{name}{PUBLIC_SUFFIX}"

    def _secret(self, name: str) -> Path:
        return self.path / f"{name}{SECRET_SUFFIX}"

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the key directory {self.path} cannot be used: {error.strerror}",
            advice="Choose another one with --keys, or change its owner.",
        )


def _namespaces_of(path: Path, certificate: Certificate) -> frozenset[str] | None:
    """Return what the certificate grants. What says nothing grants nothing."""
    text = certificate.metadata.get("namespaces")
    if text is None:
        raise CertificateError(
            f'{path}: does not say which namespaces the key may touch; write `namespaces = ["NS"]` or'
            f" `namespaces = {EVERY_NAMESPACE}` below `metadata`"
        )
    if text == EVERY_NAMESPACE:
        return None
    try:
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError  # noqa: TRY301 - one place says so
        return check_namespaces(names)
    except (ValueError, KeyNameError):
        raise CertificateError(f"{path}: its namespaces are not a list of names") from None
