"""Who may have the path of a Unix socket: stale sockets are replaced, live ones and everything else are left alone."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Final

from xkv_rpc.errors import AddressInUseError, BadEndpointError, NotASocketError, SocketPathTooLongError

SOCKET_PATH_BYTES_MAX: Final = 107
"""`sun_path` has 108 bytes and ends with NUL."""

LISTEN_BACKLOG: Final = 1024
"""A client that does not block is refused by the kernel beyond it; a host starts hundreds at once."""


def claim_socket_path(path: str, kind: socket.SocketKind) -> None:
    """Make sure that a Unix socket can be bound at `path`; removes a stale socket that nobody serves any more.

    Two processes that start in the same instant can both find the stale socket; who serves one card is settled by the
    lock on its state directory, not here.

    Raises:
        AddressInUseError: Somebody accepts connections there.
        NotASocketError: A file, directory, link or anything else lies there.
        SocketPathTooLongError: The kernel would not take it.
        BadEndpointError: The directory is missing, or the path may not be looked at.
    """
    check_socket_path(path)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not Path(path).parent.is_dir():
            raise BadEndpointError(path, "its directory does not exist") from None
        return
    except OSError as error:
        raise BadEndpointError(path, os.strerror(error.errno or 0)) from None
    if not stat.S_ISSOCK(mode):
        raise NotASocketError(path)
    if _is_served(path, kind):
        raise AddressInUseError(path)
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def check_socket_path(path: str) -> None:
    """Check the path itself, without looking at the file system.

    Raises:
        SocketPathTooLongError: More than 107 bytes.
        BadEndpointError: Empty, a wildcard, an abstract name (which no permission protects), or with a NUL.
    """
    if not path or path.startswith(("@", "\0", "*")) or "\0" in path:
        raise BadEndpointError(path, "not the path of a file")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise SocketPathTooLongError(path, f"at most {SOCKET_PATH_BYTES_MAX} bytes")


def bind_listener(path: str, kind: socket.SocketKind, mode: int, group: int | None = None) -> socket.socket:
    """Claim the path and listen there, without blocking; with `group`, that group gets its bits of `mode`.

    Raises:
        EndpointError: A subclass says why not.
    """
    claim_socket_path(path, kind)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.setblocking(False)
        # Set on the socket itself, the mode holds from the moment at which the path exists.
        os.fchmod(listener.fileno(), mode if group is None else mode & 0o700)
        listener.bind(path)
        if group is not None:
            os.chown(path, -1, group)
            Path(path).chmod(mode)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        made = listener.getsockname() == path
        listener.close()
        if made:
            Path(path).unlink(missing_ok=True)
        kind_of_error = AddressInUseError if error.errno == errno.EADDRINUSE else BadEndpointError
        raise kind_of_error(path, error.strerror or "") from None
    return listener


def inode_of(path: str) -> int:
    """Which file lies at the path now; 0: none."""
    try:
        return Path(path).lstat().st_ino
    except OSError:
        return 0


def unlink_if_same(path: str, inode: int) -> None:
    """Remove the path if that file still lies there: another process may have taken it over."""
    if inode and inode_of(path) == inode:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _is_served(path: str, kind: socket.SocketKind) -> bool:
    """Probe by connecting. Whatever is not a plain refusal counts as alive: unknown is not "no"."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except FileNotFoundError:
            return False
        except OSError:
            # A full backlog (EAGAIN), another socket type (EPROTOTYPE), no permission: somebody may well be there.
            return True
        return True
