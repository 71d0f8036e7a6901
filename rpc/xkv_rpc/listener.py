"""The server's sockets for endpoints without keys: each connection is read, handled and answered in one turn of the loop.

libzmq would hand each message from its I/O thread to the loop and back, which costs more than a lookup. On the wire there is
no difference: any DEALER of libzmq can connect (`zmtp_peer` is the protocol).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_rpc.addresses import host_port, split_endpoint
from xkv_rpc.connection import Connection
from xkv_rpc.doors import Admits, Knock
from xkv_rpc.errors import AddressInUseError, BadEndpointError
from xkv_rpc.messages import PeerId
from xkv_rpc.transport import (
    BACKLOG,
    HANDSHAKE_MS,
    TCP_KEEPALIVE_COUNT,
    TCP_KEEPALIVE_IDLE_S,
    TCP_KEEPALIVE_INTERVAL_S,
    SendOutcome,
)
from xkv_rpc.unixpath import bind_listener, inode_of, unlink_if_same
from xkv_rpc.zmtp_peer import PeerStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Buffer
    from xkv_rpc.connection import Sent
    from xkv_rpc.doors import Door, Visit
    from xkv_rpc.transport import Received
    from xkv_rpc.zmtp_peer import PeerBounds, Room

_log = logging.getLogger(__name__)

PEER_PREFIX: Final = b"n"
"""Of the ids of peers of this server; those of libzmq begin otherwise."""
CONNECTIONS_MAX: Final = 16_384
"""Further peers are let go at once."""
ACCEPTS_PER_TURN: Final = 64
STALL_S: Final = 30.0
"""Who sends nothing for so long, or twice that, in the middle of a message is let go."""
ACCEPT_PAUSE_S: Final = 0.1
"""The pause in accepting when there is no descriptor left."""
WARN_S: Final = 60.0
"""Between two warnings about the same thing, counted from the last time that it was the case."""
SCRATCH_BYTES: Final = 64 << 10
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_UCRED: Final = struct.Struct("iII")


class Listener:
    """Listens, accepts, and owns the connections. From the loop that runs when it is made; no call blocks.

    Args:
        bounds: what is kept of one message ...
        room: ... and of all that have not come whole.
        on_message: gets each message.
        judge: asked about each connection; None: everybody is let in.
    """

    def __init__(
        self,
        bounds: PeerBounds,
        room: Room,
        on_message: Callable[[Received], None],
        judge: Callable[[Knock], Visit] | None,
    ) -> None:
        self.on_message = on_message
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        """Where connections receive, one after the other."""
        self._bounds = bounds
        self._room = room
        self._judge = judge
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._sockets: list[tuple[socket.socket, Door]] = []
        self._paths: list[tuple[str, int]] = []
        self._connections: dict[PeerId, Connection] = {}
        self._identities: dict[bytes, Connection] = {}
        self._handshakes: dict[PeerId, asyncio.TimerHandle] = {}
        """When each connection that is not open has to be; with it nothing refers to a closed one any more."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._warned: dict[str, float] = {}
        self._stall_timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    # --- endpoints

    def bind(self, door: Door) -> str:
        """Listen; returns the endpoint with the port that was really bound.

        Raises:
            EndpointError: A subclass says why not.
        """
        endpoint = door.endpoint
        scheme, rest = split_endpoint(endpoint)
        if scheme == "ipc":
            sock = bind_listener(rest, socket.SOCK_STREAM, door.mode, door.group)
            self._paths.append((rest, inode_of(rest)))
        else:
            sock = _listen(endpoint, rest)
            host, port = sock.getsockname()[:2]
            endpoint = f"tcp://{host_port(host, port)}"
        self._sockets.append((sock, door))
        return endpoint

    def start(self) -> None:
        """Accept from now on."""
        for sock, door in self._sockets:
            self._loop.add_reader(sock, self._accept, sock, door)
        self._look_for_stalled({})

    def _look_for_stalled(self, before: dict[PeerId, int]) -> None:
        """End connections that are in the middle of a message, and of which nothing has come since the last look."""
        stalled = {peer: at for peer, one in self._connections.items() if (at := one.stalled_at) is not None}
        for peer in stalled.keys() & before.keys():
            if stalled[peer] == before[peer]:
                self._connections[peer].close()
        self._stall_timer = self._loop.call_later(STALL_S, self._look_for_stalled, stalled)

    def _accept(self, sock: socket.socket, door: Door) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                peer, _address = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._warn(f"no connection can be accepted now: {error.strerror}")
                    self._loop.remove_reader(sock)
                    self._later(ACCEPT_PAUSE_S, lambda: self._loop.add_reader(sock, self._accept, sock, door))
                    return
                continue
            self._welcome(peer, door)

    def _warn(self, message: str) -> None:
        """Say what refuses connections, again only a minute after it was last the case."""
        now = self._loop.time()
        if now - self._warned.get(message, -WARN_S) >= WARN_S:
            _log.warning("%s", message)
        self._warned[message] = now

    def _later(self, delay_s: float, action: Callable[[], object]) -> asyncio.TimerHandle:
        def act() -> None:
            self._timers.discard(timer)
            action()

        timer = self._loop.call_later(delay_s, act)
        self._timers.add(timer)
        return timer

    def _welcome(self, sock: socket.socket, door: Door) -> None:
        try:
            sock.setblocking(False)
            address = _prepare(sock)
        except OSError:
            sock.close()  # It is gone already.
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            self._warn(f"more than {CONNECTIONS_MAX} connections: one more is let go")
            sock.close()
            return
        user, admitted = "", True
        if self._judge is not None:
            visit = self._judge(Knock(door.admits.value, address, "NULL", ""))
            user, admitted = visit.user, visit.admitted
        peer = PeerId(PEER_PREFIX + next(self._numbers).to_bytes(8, "big"))
        core = PeerStream(self._bounds, self._room, admitted=admitted, memory=_unzeroed)
        connection = Connection(self, sock, peer, user, core)
        self._connections[peer] = connection
        self._handshakes[peer] = self._later(HANDSHAKE_MS / 1000, connection.give_up)
        connection.start()

    # --- connections

    def opened(self, connection: Connection) -> bool:
        """Take note that the peer has shaken hands (called by the connection itself).

        False: another peer has its identity, and nothing of this one is to be heard.
        """
        self._end_handshake(connection.peer)
        identity = connection.identity
        if not identity:
            return True
        return self._identities.setdefault(identity, connection) is connection

    def _end_handshake(self, peer: PeerId) -> None:
        timer = self._handshakes.pop(peer, None)
        if timer is not None:
            timer.cancel()
            self._timers.discard(timer)

    def gone(self, connection: Connection) -> None:
        """Forget a connection (called by itself)."""
        self._end_handshake(connection.peer)
        self._connections.pop(connection.peer, None)
        if self._identities.get(connection.identity) is connection:
            del self._identities[connection.identity]
        self.emptied()

    def emptied(self) -> None:
        """Take note that a connection has sent all that it had (called by itself)."""
        self._emptied.set()

    def send(
        self, peer: PeerId, header: bytes, payloads: Sequence[Buffer]
    ) -> tuple[SendOutcome, Sent | None]:
        """Send one message to a peer, or say why not. Payloads must not change until the tracker is done."""
        connection = self._connections.get(peer)
        if connection is None or not connection.open:
            return SendOutcome.GONE, None
        return connection.send(header, payloads)

    # --- the end

    async def stop(self) -> None:
        """Neither accept nor read any more; return once all that has come was handed on."""
        for sock, _ in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets = []
        for timer in self._timers:
            timer.cancel()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        for path, inode in self._paths:
            unlink_if_same(path, inode)
        self._paths = []
        for connection in list(self._connections.values()):
            connection.stop()
        while any(connection.handing_on for connection in self._connections.values()):  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)

    async def aclose(self, linger_ms: int) -> None:
        """Let the connections send what they hold, for at most so long, and close them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_ms / 1000):
                await self.stop()
                while any(connection.sending for connection in self._connections.values()):
                    self._emptied.clear()
                    await self._emptied.wait()
        for connection in list(self._connections.values()):
            connection.close()


def _listen(endpoint: str, rest: str) -> socket.socket:
    host, _, port = rest.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 0xFFFF:
        raise BadEndpointError(endpoint, "neither tcp://ADDRESS:PORT nor ipc://PATH")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        raise BadEndpointError(endpoint, "not an IP address") from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `[::]` is for both families; who comes is judged by the address in any case.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(endpoint) from None
        number = error.errno or 0
        raise BadEndpointError(endpoint, os.strerror(number), errno=number) from None
    return sock


def _unzeroed(byte_count: int) -> memoryview:
    """Make the place of a large body: it takes memory as its bytes come, and not when it is announced."""
    return np.empty(byte_count, np.uint8).data


def _prepare(sock: socket.socket) -> str:
    """Set a connection's options; return whose it is, as a knock has it."""
    if sock.family == socket.AF_UNIX:
        pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return f"localhost:{uid}:{gid}:{pid}"
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TCP_KEEPALIVE_COUNT)
    return str(sock.getpeername()[0])


def serves(door: Door) -> bool:
    """Return whether an endpoint is served here: where there are no keys."""
    return door.admits is not Admits.KEYS
