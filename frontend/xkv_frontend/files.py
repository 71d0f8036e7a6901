"""Files that hold secrets and keys: read only where nobody else may, written so that they are never half there."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from xkv_frontend.core.salt import Secret, SecretRefusedError
from xkv_frontend.errors import ConfigError

SECRET_VARIABLE: Final = "CACHE_SALT_SECRET"  # noqa: S105 - the name of it
CREDENTIAL_NAME: Final = "cache-salt-secret"
SECRET_FILE_BYTES_MAX: Final = 64 << 10
_OTHERS: Final = stat.S_IRWXO
_WRITERS: Final = stat.S_IWGRP | stat.S_IWOTH


def read_private(path: Path, what: str, bytes_max: int, *, forbidden: int = _OTHERS | stat.S_IWGRP) -> bytes:
    """Return the content of a file that belongs to us or root and that others cannot use.

    Raises:
        ConfigError: It is missing, not a regular file, too large, or open to others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from None
    found = os.fstat(descriptor)
    if stat.S_ISDIR(found.st_mode):
        os.close(descriptor)
        raise ConfigError(f"{what} {path}: not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{what} {path}: not a regular file")
        if found.st_mode & forbidden:
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            raise ConfigError(
                f"{what} {path}: its mode {mode} lets others at it",
                advice=f"chmod 600 {path}, and consider it known.",
            )
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{what} {path}: it belongs to another user")
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ConfigError(f"{what} {path}: larger than {bytes_max} bytes")
    return content


def read_keys_text(path: Path, bytes_max: int) -> str:
    """Return the text of a keys file: hashes, so that others may read it, but not write it.

    Raises:
        ConfigError: As for secrets, or not UTF-8.
    """
    try:
        return read_private(path, "the keys file", bytes_max, forbidden=_WRITERS).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"the keys file {path}: not UTF-8") from None


def load_secret(path: Path | None, environment: dict[str, str]) -> Secret:
    """Return the secret: of `path`, else of the service manager's credential, else of the environment.

    Raises:
        ConfigError: There is none, or it cannot protect anything.
    """
    source = "the secret"
    try:
        if path is not None:
            source = f"the secret file {path}"
            return Secret.from_file_content(read_private(path, "the secret file", SECRET_FILE_BYTES_MAX))
        folder = environment.get("CREDENTIALS_DIRECTORY")
        credential = Path(folder, CREDENTIAL_NAME) if folder else None
        if credential is not None and credential.exists():
            source = f"the credential {CREDENTIAL_NAME}"
            return Secret.from_file_content(read_private(credential, "the credential", SECRET_FILE_BYTES_MAX))
        source = f"the variable {SECRET_VARIABLE}"
        if text := environment.get(SECRET_VARIABLE):
            return Secret.from_hex(text.encode("utf-8", "surrogateescape"))
    except SecretRefusedError as error:
        raise ConfigError(
            f"{source}: {error}", advice="`xkv-frontend secret new FILE` makes a good one."
        ) from None
    raise ConfigError(
        "there is no secret, and without one salts could be guessed",
        advice=f"`xkv-frontend secret new FILE`, then --secret-file FILE; or {SECRET_VARIABLE} in hexadecimal.",
    )


def write_private(path: Path, content: bytes, *, mode: int = 0o600, replace: bool = False) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        ConfigError: It exists and `replace` is false, or it cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                Path(temporary).replace(path)
            else:
                os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} exists already") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
