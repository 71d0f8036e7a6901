"""The state directory: where it is, and the host identity that is kept in it."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import StateDirError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAME: Final = "xkv-gateway"
IDENTITY_FILE: Final = "host.json"
LOCK_FILE: Final = "lock"
IDENTITY_BYTES_MAX: Final = 4096
UNIX_PATH_BYTES_MAX: Final = 107
"""`sun_path` has 108 bytes, the last one is NUL."""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Who this host is to NVMe targets: one name and one UUID, always the same pair."""

    host_nqn: str
    host_id: uuid.UUID


def choose_state_dir(configured: str | None, environment: Mapping[str, str], home: Path) -> Path:
    """Return the state directory.

    In this order: the setting; $STATE_DIRECTORY, which systemd sets; $XDG_STATE_HOME; ~/.local/state.
    """
    if configured:
        return Path(configured).expanduser().absolute()
    given = environment.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given)
    base = Path(environment.get("XDG_STATE_HOME", ""))
    # The XDG specification: a relative path is invalid and must be ignored.
    return (base if base.is_absolute() else home / ".local" / "state") / NAME


def make_state_dir(path: Path) -> None:
    """Make the directory, for its owner alone, unless it is there.

    Raises:
        StateDirError: it cannot be made or used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StateDirError(
            f"the state directory {path} cannot be read and written by this user",
            advice="Choose another one with --state-dir, or change its owner.",
        )


def _unusable(path: Path, error: OSError) -> StateDirError:
    return StateDirError(
        f"the state directory cannot be used: {path}: {error.strerror}",
        advice="Choose another one with --state-dir.",
    )


def lock_state_dir(path: Path) -> int:
    """Take the directory for this process; returns the descriptor that holds the lock until it is closed.

    Raises:
        StateDirError: another gateway has it, or the lock file cannot be made.
    """
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateDirError(
            f"another gateway uses the state directory {path}",
            advice="Stop it, or give this one its own with --state-dir.",
        ) from None
    return descriptor


def host_identity(state_dir: Path, entropy: Callable[[int], bytes]) -> HostIdentity:
    """Return the identity kept in the state directory; make it on the first call.

    Raises:
        StateDirError: the file cannot be read or written, or does not hold an identity.
    """
    path = state_dir / IDENTITY_FILE
    try:
        with path.open("rb") as stream:
            return _parse_identity(path, stream.read(IDENTITY_BYTES_MAX))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unusable(path, error) from None
    host_id = uuid.UUID(bytes=entropy(16), version=4)
    identity = HostIdentity(host_nqn=f"nqn.2014-08.org.nvmexpress:uuid:{host_id}", host_id=host_id)
    text = json.dumps({"host_nqn": identity.host_nqn, "host_id": str(host_id)}, indent=2) + "\n"
    try:
        _write_whole(path, text.encode())
    except OSError as error:
        raise _unusable(path, error) from None
    return identity


def configured_identity(
    host_nqn: str | None, host_id: str | None, state_dir: Path, entropy: Callable[[int], bytes]
) -> HostIdentity:
    """Return the identity of the settings, where they have one, else the one kept in the state directory."""
    if host_nqn is not None and host_id is not None:
        return HostIdentity(host_nqn, uuid.UUID(host_id))
    return host_identity(state_dir, entropy)


def _parse_identity(path: Path, data: bytes) -> HostIdentity:
    try:
        fields = json.loads(data)
        identity = HostIdentity(host_nqn=fields["host_nqn"], host_id=uuid.UUID(fields["host_id"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        identity = None
    if identity is None or not isinstance(identity.host_nqn, str) or identity.host_id.int == 0:
        raise StateDirError(
            f"{path} does not hold a host identity",
            advice="Remove the file to have a new one made (targets that allow only the old one must learn the new one), "
            "or set nvme.host_nqn and nvme.host_id.",
        )
    return identity


def _write_whole(path: Path, data: bytes) -> None:
    """Write the file so that a crash leaves the old one or the new one, never a part; on return it outlives a loss of power."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def regions_socket_path(configured: str | None, state_dir: Path) -> Path:
    """Return the path of the Unix socket for shared memory.

    Raises:
        StateDirError: too long for a Unix socket.
    """
    path = Path(configured).expanduser().absolute() if configured else state_dir / "regions.sock"
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise StateDirError(
            f"{path} is too long for a Unix socket ({UNIX_PATH_BYTES_MAX} bytes at most)",
            advice="Set control.regions_socket to a shorter path, or choose a shorter --state-dir.",
        )
    return path
