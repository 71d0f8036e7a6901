"""The server's side of regions: clients hand over sealed memory, and I/O goes straight into it and out of it.

    client  connects (SOCK_SEQPACKET), sends {"v":1,"op":"attach","bytes":N} with one memfd
    server  answers {"ok":true,"region":<16 bytes>}, or {"ok":false,"error":<str>} and closes
    client  keeps the connection open as long as it wants the region; it sends nothing more

The seals make sure that the memory cannot shrink under a mapping, and allocating it all at once that touching it cannot
fail later: either would be a signal, not an error. A region belongs to whoever holds its token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgpack

from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import TOKEN_BYTES
from xkv_rpc.region_attach import AttachRefusedError, check_memfd, map_memory, parse_attach, receive_attach
from xkv_rpc.unixpath import bind_listener, inode_of, unlink_if_same

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

ACCEPTS_PER_TURN: Final = 16
ACCEPT_PAUSE_S: Final = 0.5
"""Pause after the process ran out of descriptors."""


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """What clients may attach. A connection has one region."""

    connections: int = 256
    region_bytes: int = 16 << 30
    total_bytes: int = 64 << 30
    attach_timeout_ms: int = 5000
    """How long a connection may take to say what it wants."""


class MappedRegion:
    """The server's mapping of a region. It lives until its connection has closed and its last pin is gone."""

    __slots__ = ("_memory", "_on_unmapped", "_view", "attached", "pins", "size_bytes")

    def __init__(self, memory: mmap.mmap, on_unmapped: Callable[[MappedRegion], None]) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._on_unmapped = on_unmapped
        self.size_bytes = len(memory)
        self.attached = True
        """Whether the client's connection is open."""
        self.pins = 0
        """I/O in flight."""

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Give a writable view of a range. Pin the region for as long as I/O uses it, and release the view after.

        Raises:
            RpcError: `bad_request` naming `offsets`: the range is not within the region.
        """
        if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > self.size_bytes:
            raise RpcError(ErrorCode.BAD_REQUEST, "a range is not within the region", field="offsets")
        return self._view[offset_bytes : offset_bytes + length_bytes]

    def pin(self) -> None:
        """Keep the mapping until `unpin`, even if the client goes."""
        assert self.attached or self.pins, "the region has been unmapped"
        self.pins += 1

    def unpin(self) -> None:
        """Take one pin back; the last one of a region without client unmaps it."""
        assert self.pins > 0
        self.pins -= 1
        self._unmap_if_done()

    def detach(self) -> None:
        """The client is gone."""
        assert self.attached
        self.attached = False
        self._unmap_if_done()

    def _unmap_if_done(self) -> None:
        if self.attached or self.pins:
            return
        self._view.release()
        with contextlib.suppress(BufferError):
            # A view that was not released keeps the memory until it is collected; it can never dangle.
            self._memory.close()
        self._on_unmapped(self)


class RegionServer:
    """Listens for clients that attach regions. Belongs to the loop in which it is started."""

    def __init__(
        self,
        path: str,
        *,
        entropy: Callable[[int], bytes],
        limits: RegionLimits | None = None,
        socket_mode: int = 0o600,
        socket_group: int | None = None,
    ) -> None:
        """Make a server that listens nowhere yet.

        Args:
            path: Where the Unix socket will be.
            entropy: Gives unguessable bytes, for tokens.
            limits: What clients may attach.
            socket_mode: Permissions of the socket.
            socket_group: Its group; None: as it comes.
        """
        self.path = path
        self.limits = limits or RegionLimits()
        self._entropy = entropy
        self._socket_mode = socket_mode
        self._socket_group = socket_group
        self._regions: dict[bytes, MappedRegion] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._inode = 0
        self._resume: asyncio.TimerHandle | None = None
        self.mapped_bytes = 0
        """Bytes of all mappings, and of those being made."""
        self.refused = 0
        """Connections that were not given a region."""

    def __len__(self) -> int:
        """Attached regions."""
        return len(self._regions)

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            EndpointError: A subclass says why the path cannot be used.
        """
        listener = self._listener = bind_listener(
            self.path, socket.SOCK_SEQPACKET, self._socket_mode, self._socket_group
        )
        self._inode = inode_of(self.path)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def find(self, token: bytes) -> MappedRegion:
        """Find a region by its token.

        Raises:
            RpcError: `unknown_region`.
        """
        region = self._regions.get(token)
        if region is None:
            raise RpcError(ErrorCode.UNKNOWN_REGION, "no region has this token", field="region")
        return region

    async def aclose(self) -> None:
        """Stop listening and detach all regions; those with I/O in flight stay mapped until it is done."""
        loop = asyncio.get_running_loop()
        if self._resume is not None:
            self._resume.cancel()
        listener, self._listener = self._listener, None
        if listener is not None:
            loop.remove_reader(listener.fileno())
            listener.close()
            unlink_if_same(self.path, self._inode)
        clients = list(self._clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    def _accept(self) -> None:
        self._resume = None
        listener = self._listener
        if listener is None:
            return
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                    # The connection stays in the queue, so the loop would come back here at once, for ever.
                    loop.remove_reader(listener.fileno())
                    self._resume = loop.call_later(ACCEPT_PAUSE_S, self._accept)
                    return
                continue
            connection.setblocking(False)
            if len(self._clients) >= self.limits.connections:
                self._refuse(connection, "too many connections")
                connection.close()
                continue
            client = loop.create_task(self._serve(connection))
            self._clients.add(client)
            client.add_done_callback(self._clients.discard)
        loop.add_reader(listener.fileno(), self._accept)

    async def _serve(self, connection: socket.socket) -> None:
        region: MappedRegion | None = None
        token = b""
        try:
            async with asyncio.timeout(self.limits.attach_timeout_ms / 1000):
                await _readable(connection)
            region = await self._attach(connection)
            token = self._entropy(TOKEN_BYTES)
            assert len(token) == TOKEN_BYTES
            self._regions[token] = region
            connection.send(msgpack.packb({"ok": True, "region": token}))
            await _until_closed(connection)
        except AttachRefusedError as refused:
            self._refuse(connection, str(refused))
        except TimeoutError:
            self._refuse(connection, "no attach message came in time")
        except OSError:
            # The client is gone, which ends its region like a regular close.
            self.refused += region is None
        finally:
            connection.close()
            if region is not None:
                self._regions.pop(token, None)
                region.detach()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self.refused += 1
        with contextlib.suppress(OSError):
            connection.send(msgpack.packb({"ok": False, "error": why}))

    async def _attach(self, connection: socket.socket) -> MappedRegion:
        """Take the one message, and map what came with it. Bytes are counted before they are allocated."""
        raw, descriptors = receive_attach(connection)
        try:
            size_bytes = parse_attach(raw)
            if len(descriptors) != 1:
                raise AttachRefusedError("an attach message comes with exactly one descriptor")
            if size_bytes > self.limits.region_bytes:
                raise AttachRefusedError(f"a region has at most {self.limits.region_bytes} bytes")
            if self.mapped_bytes + size_bytes > self.limits.total_bytes:
                raise AttachRefusedError("the regions of all clients together are too large")
            check_memfd(descriptors[0], size_bytes)
            self.mapped_bytes += size_bytes
            memory: mmap.mmap | None = None
            try:
                memory = await map_memory(descriptors[0], size_bytes)
            finally:
                if memory is None:
                    self.mapped_bytes -= size_bytes
            return MappedRegion(memory, self._unmapped)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _unmapped(self, region: MappedRegion) -> None:
        self.mapped_bytes -= region.size_bytes


async def _until_closed(connection: socket.socket) -> None:
    await _readable(connection)
    if connection.recv(1):
        raise AttachRefusedError("a connection has one region and nothing else")


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())
