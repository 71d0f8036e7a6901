"""The client's side of a region: memory that the gateway reads and writes directly."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from typing import TYPE_CHECKING, Final, Self

import msgpack

from xkv_rpc.errors import RegionRefusedError
from xkv_rpc.messages import PROTOCOL_VERSION, TOKEN_BYTES
from xkv_rpc.unixpath import check_socket_path

if TYPE_CHECKING:
    from types import TracebackType

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
REPLY_BYTES_MAX: Final = 4096


class Region:
    """Shared memory, attached to the gateway until it is closed, or its process ends.

    A child process that is forked inherits the memory and keeps the region alive: close it there as well.

    Attributes:
        token: What requests name the region by; whoever holds it may use the region.
        size_bytes: Its size.
        view: Its memory. Slices of it must be released before `close` can give the memory back.
    """

    def __init__(self, connection: socket.socket, memory: mmap.mmap, token: bytes) -> None:
        self._connection = connection
        self._memory = memory
        self.token = token
        self.size_bytes = len(memory)
        self.view = memoryview(memory)

    def __repr__(self) -> str:
        return f"<Region of {self.size_bytes} bytes>"

    @classmethod
    def attach(cls, path: str, size_bytes: int, *, timeout_ms: int = 5000) -> Region:
        """Make a sealed memfd and hand it to the gateway.

        Args:
            path: The Unix socket that `hello` names.
            size_bytes: Size of the region, at least one.
            timeout_ms: Deadline of each step: connecting, sending, receiving.

        Raises:
            RegionRefusedError: The gateway is not there, did not answer in time, or refused.
            EndpointError: The path cannot be one of a socket.
            OSError: There is not enough memory.
        """
        check_socket_path(path)
        with contextlib.ExitStack() as undo:
            descriptor = os.memfd_create("xkv-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                # Allocated now, so that memory that is not there is an error here and not a signal later.
                os.posix_fallocate(descriptor, 0, size_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                memory = undo.enter_context(mmap.mmap(descriptor, size_bytes))
                connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.settimeout(timeout_ms / 1000)
                token = _exchange(connection, path, descriptor, size_bytes)
                # With a time limit Python waits that long before it asks the kernel, whatever the flags say.
                connection.setblocking(False)
            finally:
                os.close(descriptor)
            undo.pop_all()
        return cls(connection, memory, token)

    @property
    def attached(self) -> bool:
        """Whether the gateway still has it: a gateway that went away has closed the connection."""
        try:
            # Nothing is ever sent on it, so that anything but "would block" is its end.
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Detach. The gateway finishes what is under way into its own mapping and forgets the region."""
        self._connection.close()
        self.view.release()
        with contextlib.suppress(BufferError):
            # Somebody still has a slice: the memory goes with the last one.
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _exchange(connection: socket.socket, path: str, descriptor: int, size_bytes: int) -> bytes:
    request = msgpack.packb({"v": PROTOCOL_VERSION, "op": "attach", "bytes": size_bytes})
    try:
        connection.connect(path)
        socket.send_fds(connection, [request], [descriptor])
        raw = connection.recv(REPLY_BYTES_MAX)
    except OSError as error:
        raise RegionRefusedError(f"{path}: {error.strerror or 'no answer in time'}") from error
    try:
        reply = msgpack.unpackb(raw, raw=False)
    except ValueError:
        raise RegionRefusedError(f"{path}: the answer is not one of this protocol") from None
    if type(reply) is not dict or reply.get("ok") is not True:
        said = reply.get("error") if type(reply) is dict else None
        raise RegionRefusedError(f"{path}: {said if type(said) is str else 'refused'}")
    token = reply.get("region")
    if type(token) is not bytes or len(token) != TOKEN_BYTES:
        raise RegionRefusedError(f"{path}: the answer has no region")
    return token


def path_of_regions(path: str | None) -> str:
    """Take the path that `hello` told.

    Raises:
        RegionRefusedError: It told none.
    """
    if path is None:
        raise RegionRefusedError("the gateway offers no regions")
    return path
