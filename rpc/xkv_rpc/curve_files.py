"""CURVE certificates as files, in the format of pyzmq's `zmq.auth`: `NAME.key` public, `NAME.key_secret` not.

metadata
    name = "alice"
    namespaces = "team-a, team-b"       what the key may touch; "*" = every namespace
    server-key = "..."                  in a client's secret certificate: whom it may trust
curve
    public-key = "..."
    secret-key = "..."                  in a secret certificate only
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from xkv_process.files import regular_only
from xkv_rpc.doors import KEY_CHARACTERS, ClientKeys, KeyPair
from xkv_rpc.errors import XkvRpcError
from xkv_rpc.porter import is_key, public_key_of

CERTIFICATE_BYTES_MAX: Final = 64 << 10
PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - the end of a file's name
SECRET_MODE: Final = 0o600
_SECTIONS: Final = frozenset({"metadata", "curve"})


class CertificateError(XkvRpcError):
    """A certificate cannot be used. The message names the file and never holds a key."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a file says."""

    public: str
    secret: str | None = field(default=None, repr=False)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def pair(self) -> KeyPair:
        """The pair; the certificate is a secret one."""
        assert self.secret is not None
        return KeyPair(self.public, self.secret)


def read_certificate(path: Path, *, secret: bool = False, private: bool = True) -> Certificate:
    """Read a certificate.

    Args:
        path: The file.
        secret: It must have the secret key.
        private: Refuse a secret one that its group or others may read.

    Raises:
        CertificateError: It is not there, not one, or open to others.
    """
    try:
        with open(path, "rb", opener=regular_only) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            raw = stream.read(CERTIFICATE_BYTES_MAX + 1)
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None
    if len(raw) > CERTIFICATE_BYTES_MAX:
        raise CertificateError(f"{path}: too large for a certificate")
    try:
        certificate = _parse(raw.decode())
    except (UnicodeDecodeError, ValueError) as error:
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise CertificateError(f"{path}: {reason}") from None
    if certificate.secret is None:
        if secret:
            raise CertificateError(f"{path}: has no secret key")
        return certificate
    if private:
        refuse_open_secret(path, mode)
    if public_key_of(certificate.secret) != certificate.public:
        raise CertificateError(f"{path}: its public and its secret key do not belong together")
    return certificate


def refuse_open_secret(path: Path, mode: int) -> None:
    """Raise CertificateError where more than the owner may read or write the secret."""
    if mode & 0o077:
        raise CertificateError(
            f"{path}: holds a secret and is open to others (mode {mode:04o}); chmod 600 it, and exchange"
            " the key if anybody may have read it"
        )


def write_certificate(path: Path, certificate: Certificate, *, mode: int) -> None:
    """Write a certificate whole or not at all; nothing is ever overwritten.

    Raises:
        FileExistsError: There is such a file.
        OSError: It cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        data = _text(certificate).encode()
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def read_client_keys(path: str | Path, server_public: str | None = None) -> ClientKeys:
    """Read a client's keys from its secret certificate, for `ClientOptions`.

    Args:
        path: The `NAME.key_secret` that `xkv-gateway keys new NAME` has written.
        server_public: The public key of the gateway, where the certificate does not hold it.

    Raises:
        CertificateError: The file cannot be used, or nobody says whom to trust.
    """
    certificate = read_certificate(Path(path), secret=True)
    trusted = server_public or certificate.metadata.get("server-key", "")
    if not is_key(trusted):
        raise CertificateError(f"{path}: does not hold the server's public key, and none was given")
    return ClientKeys(trusted, certificate.pair)


def _parse(text: str) -> Certificate:
    """Parse the text. Raises ValueError, without a value in it."""
    values: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
    section: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in stripped.partition("="))
        if not equals and name in _SECTIONS:
            section = name
            continue
        if not equals or section is None or name in values[section]:
            raise ValueError(f"line {number} is not one of a certificate")
        quoted = len(value) >= 2 and value[0] == value[-1] == '"'
        values[section][name] = value[1:-1] if quoted else value
    curve = values["curve"]
    public, secret = curve.get("public-key", ""), curve.get("secret-key")
    if not is_key(public) or (secret is not None and not is_key(secret)):
        raise ValueError(f"has no key of {KEY_CHARACTERS} characters where one belongs")
    return Certificate(public, secret, values["metadata"])


def _text(certificate: Certificate) -> str:
    lines = ["# CURVE certificate of xkv-gateway (the format of zmq.auth)"]
    if certificate.secret is not None:
        lines.append("# It holds a SECRET key: whoever can read it can be its owner.")
    lines += ["metadata", *(f"    {name} = {value}" for name, value in certificate.metadata.items())]
    lines += ["curve", f'    public-key = "{certificate.public}"']
    if certificate.secret is not None:
        lines.append(f'    secret-key = "{certificate.secret}"')
    return "\n".join(lines) + "\n"
