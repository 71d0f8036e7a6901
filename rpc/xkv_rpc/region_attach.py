"""The attach message of a region: what it must say and carry, and how its memory is mapped."""

from __future__ import annotations

import array
import asyncio
import fcntl
import mmap
import os
import socket
from typing import Final

import msgpack

from xkv_rpc.errors import XkvRpcError
from xkv_rpc.messages import PROTOCOL_VERSION

SEALS_NEEDED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MESSAGE_BYTES_MAX: Final = 256
"""An attach message has about thirty bytes."""
DESCRIPTORS_MAX: Final = 8
"""Descriptors taken from one message, so as to close them; one is right."""


class AttachRefusedError(XkvRpcError):
    """An attach message that is not answered with a region; the text is for its sender."""


def parse_attach(raw: bytes) -> int:
    """Read an attach message; returns the size of the region in bytes.

    Raises:
        AttachRefusedError: It is none.
    """
    try:
        pairs = msgpack.unpackb(raw, raw=False, object_pairs_hook=list, max_ext_len=0)
    except ValueError:
        raise AttachRefusedError("the message is not valid msgpack") from None
    if type(pairs) is not list or not all(type(pair) is tuple for pair in pairs):
        raise AttachRefusedError("the message is not a map")
    fields = dict(pairs)
    if len(fields) != len(pairs) or set(fields) != {"v", "op", "bytes"}:
        raise AttachRefusedError("the fields of an attach message are v, op and bytes, once each")
    if type(fields["v"]) is not int or fields["v"] != PROTOCOL_VERSION:
        raise AttachRefusedError("this server speaks version 1")
    if fields["op"] != "attach":
        raise AttachRefusedError("the only operation here is attach")
    size_bytes = fields["bytes"]
    if type(size_bytes) is not int or size_bytes < 1:
        raise AttachRefusedError("`bytes` is not a positive integer")
    return size_bytes


def receive_attach(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Take one message and the descriptors that came with it; the caller closes them.

    Raises:
        AttachRefusedError: Something was cut off. Then all descriptors are closed.
        OSError: The client is gone.
    """
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
    raw, ancillary, flags, _ = connection.recvmsg(MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise AttachRefusedError("the message is too long, or comes with too many descriptors")
    return raw, list(descriptors)


def check_memfd(descriptor: int, size_bytes: int) -> None:
    """Check that the memory cannot change its size.

    Raises:
        AttachRefusedError: It can, or is no memory, or has another size.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise AttachRefusedError("the descriptor is not a memfd") from None
    if seals & SEALS_NEEDED != SEALS_NEEDED:
        raise AttachRefusedError("the memfd is not sealed with F_SEAL_SHRINK and F_SEAL_GROW")
    if os.fstat(descriptor).st_size != size_bytes:
        raise AttachRefusedError("the memfd has another size than `bytes`")


async def map_memory(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Allocate all of the memory, and map it for reading and writing. The caller keeps the descriptor.

    Raises:
        AttachRefusedError: There is not so much memory, or it cannot be written.
    """
    loop = asyncio.get_running_loop()
    # A descriptor of its own, since a cancelled task leaves the thread behind.
    own = os.dup(descriptor)

    def allocate_and_map() -> mmap.mmap:
        try:
            os.posix_fallocate(own, 0, size_bytes)
            return mmap.mmap(own, size_bytes)
        finally:
            os.close(own)

    try:
        # Zeroing gigabytes takes a while, so it is not done on the loop.
        return await loop.run_in_executor(None, allocate_and_map)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "the size is not usable"
        raise AttachRefusedError(f"the memory cannot be mapped: {why}") from None
