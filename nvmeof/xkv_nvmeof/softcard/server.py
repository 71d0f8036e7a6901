"""The sockets of the soft card: listens, and moves bytes between connections and the controller core.

Payload is received straight into pooled buffers and sent straight from them. All that one wake-up of a socket
brings is processed before anything is sent, and what is to be sent then goes out in one call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.controller_types import ReadCommand, Sent, ShutdownCommand
from xkv_nvmeof.discovery import Portal
from xkv_nvmeof.softcard.pool import BufferPool, ConnectionBuffers
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.controller_card import Card
    from xkv_nvmeof.controller_connection import ControllerConnection
    from xkv_nvmeof.controller_types import IoCommand
    from xkv_nvmeof.softcard.executor import Executor

_LOG: Final = logging.getLogger(__name__)
HEADER_BUFFER_BYTES: Final = 64 << 10
BEHIND_PAYLOAD_BYTES: Final = 4096
"""Received in the same call behind payload: the next headers. Little, so that little payload is copied."""
MAX_RECEIVES: Final = 8
"""Calls of receive for each wake-up: then the other connections have their turn."""
LOOK_AGAIN_S: Final = 0.05
"""uvloop tells of a reset once, and then no more of that socket: what was not read to its end is looked at again after that time."""
MAX_IOVECS: Final = 256
PAUSE_BYTES: Final = 32 << 20
"""Nothing more is received from a host that leaves so much unread."""
LINGER_S: Final = 1.0
"""How long the host may take to read the reason and close, before we do."""
TICK_S: Final = 0.25
LATE_TICK_NS: Final = 500_000_000
"""A tick that comes so late finds deadlines passed by our own fault: what waits in the sockets comes first."""
SOCKET_BUFFER_BYTES: Final = 4 << 20
BACKLOG: Final = 128
ACCEPT_PAUSE_S: Final = 0.1


class Server:
    """All listening sockets and connections of one card."""

    def __init__(self, card: Card, executor: Executor, clock: Callable[[], int]) -> None:
        self.card = card
        self.executor = executor
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.pool = BufferPool()
        self.header = memoryview(bytearray(HEADER_BUFFER_BYTES))
        self.peers: dict[ControllerConnection, _Peer] = {}
        self.portals: list[Portal] = []
        """Where it listens."""
        self._listeners: list[socket.socket] = []
        self._pumping = False
        self._last_tick_ns = clock()
        self._tick_handle: asyncio.TimerHandle | None = None

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from a bound socket; it belongs to the server from now on."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        self.portals.append(Portal(*listener.getsockname()[:2]))
        self.loop.add_reader(listener.fileno(), self._on_accept, listener)
        if self._tick_handle is None:
            self._tick_handle = self.loop.call_later(TICK_S, self._on_tick)

    def _on_accept(self, listener: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: the connection stays in the backlog, and would wake us for ever.
                _LOG.warning("accept failed: %s", error.strerror)
                self.loop.remove_reader(listener.fileno())
                self.loop.call_later(ACCEPT_PAUSE_S, self._resume_accept, listener)
                return
            self._admit(sock, address[0])

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            portal = Portal(*sock.getsockname()[:2])
        except OSError as error:
            _LOG.info("connection of %s failed at once: %s", address, error.strerror)
            sock.close()
            return
        buffers = ConnectionBuffers(self.pool)
        connection = self.card.open(buffers, portal, self.clock())
        if connection is None:
            _LOG.warning("too many connections: %s refused", address)
            sock.close()
            return
        self.peers[connection] = _Peer(self, sock, connection, buffers)

    def _resume_accept(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.loop.add_reader(listener.fileno(), self._on_accept, listener)

    def _on_tick(self) -> None:
        now_ns = self.clock()
        late = now_ns - self._last_tick_ns > LATE_TICK_NS + int(TICK_S * 1e9)
        self._last_tick_ns = now_ns
        if not late:
            self.card.tick(now_ns)
            self.pump()
        self._tick_handle = self.loop.call_later(TICK_S, self._on_tick)

    def pump(self) -> None:
        """Do what the core asks for: execute, send, close. Called after whatever went into the core."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while dirty := self.card.take_dirty():
                for connection in dirty:
                    peer = self.peers.get(connection)
                    if peer is not None:
                        peer.execute()
                        peer.flush()
        finally:
            self._pumping = False

    async def aclose(self) -> None:
        """Stop listening, end all connections, wait for commands that were begun."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for listener in self._listeners:
            self.loop.remove_reader(listener.fileno())
            listener.close()
        self.card.shutdown("the card is being stopped")
        self.pump()
        for peer in list(self.peers.values()):
            peer.close("the card is being stopped")
        await self.executor.aclose()


class _Peer:
    """One connection: its socket, its commands in execution, and what waits to be sent."""

    def __init__(
        self,
        server: Server,
        sock: socket.socket,
        connection: ControllerConnection,
        buffers: ConnectionBuffers,
    ) -> None:
        self._server = server
        self._sock = sock
        self._connection = connection
        self._buffers = buffers
        self._waiting_reads: deque[ReadCommand] = deque()
        self._reading = True
        self._writing = False
        self._closed = False
        self._shut = False
        self._looking = False
        """A look at what may have been left in the socket is planned."""
        self._linger: asyncio.TimerHandle | None = None
        server.loop.add_reader(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        server, connection, sock, header = self._server, self._connection, self._sock, self._server.header
        now_ns = server.clock()
        for _ in range(MAX_RECEIVES):
            sink = connection.sink()
            try:
                if sink is None:
                    asked = HEADER_BUFFER_BYTES
                    count = sock.recv_into(header)
                    received = header[:count]
                else:
                    behind = header[:BEHIND_PAYLOAD_BYTES]
                    asked = len(sink) + BEHIND_PAYLOAD_BYTES
                    count = sock.recvmsg_into([sink, behind])[0]
                    placed = min(count, len(sink))
                    connection.placed(placed)
                    received = behind[: count - placed]
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.close(error.strerror or "connection failed")
                return
            if count == 0:
                self.close("closed by the host")
                return
            connection.receive(received, now_ns)
            if count < asked:
                self._plan_look()
                break
        else:
            self._plan_look()
        server.pump()

    def _plan_look(self) -> None:
        if not self._looking:
            self._looking = True
            self._server.loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        if self._reading and not self._closed:
            self._on_readable()

    # ---- commands --------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Begin the commands that came in; those done at once are completed before this returns."""
        for command in self._connection.take_commands():
            if isinstance(command, ReadCommand):
                self._waiting_reads.append(command)
                self._start_reads()
            else:
                self._begin(command, None)

    def _start_reads(self) -> None:
        while self._waiting_reads and not self._connection.ended:
            command = self._waiting_reads[0]
            buffer = self._buffers.allocate(command.length_bytes)
            if buffer is None:
                return
            self._waiting_reads.popleft()
            self._begin(command, buffer)

    def _begin(self, command: IoCommand, buffer: memoryview | None) -> None:
        def done(status: Status) -> None:
            if isinstance(command, ShutdownCommand) and status != Status.SUCCESS:
                _LOG.error("the flush of a shutdown failed: %s", status.name)
            self._connection.complete(command, status, buffer)
            self._retry()
            self._server.pump()

        self._server.executor.execute(command, buffer, done)

    def _retry(self) -> None:
        """A buffer may have become free: go on with what waits for one."""
        if self._connection.transfers.starved:
            self._connection.transfers.retry()
        if self._waiting_reads:
            self._start_reads()

    # ---- sending ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what is to be sent, until the socket is full; close when that was the last."""
        if self._closed:
            return
        try:
            blocked = self._send_all()
        except OSError as error:
            self.close(error.strerror or "connection failed")
            return
        self._watch_writable(wanted=blocked)
        if blocked:
            unsent = sum(len(item) for item in self._connection.outgoing if not isinstance(item, Sent))
            self._watch_readable(wanted=unsent < PAUSE_BYTES)
        else:
            self._watch_readable(wanted=True)
        if self._connection.ended:
            self._finish(all_sent=not blocked)

    def _send_all(self) -> bool:
        """Send; whether the socket is full."""
        outgoing = self._connection.outgoing
        while outgoing:
            vectors = [item for item in islice(outgoing, MAX_IOVECS) if not isinstance(item, Sent)]
            try:
                count = self._sock.sendmsg(vectors) if vectors else 0
            except (BlockingIOError, InterruptedError):
                return True
            self._drop_sent(count)
        return False

    def _drop_sent(self, count: int) -> None:
        """Forget the first `count` bytes of what is to be sent; buffers behind them go back."""
        outgoing = self._connection.outgoing
        released = False
        while outgoing:
            item = outgoing[0]
            if isinstance(item, Sent):
                self._buffers.release(item.buffer)
                released = True
            elif len(item) <= count:
                count -= len(item)
            else:
                if count:
                    outgoing[0] = memoryview(item)[count:]
                break
            outgoing.popleft()
        if released:
            self._retry()

    def _watch_writable(self, *, wanted: bool) -> None:
        if wanted and not self._writing:
            self._server.loop.add_writer(self._sock.fileno(), self._on_writable)
        elif self._writing and not wanted:
            self._server.loop.remove_writer(self._sock.fileno())
        self._writing = wanted

    def _watch_readable(self, *, wanted: bool) -> None:
        if wanted and not self._reading:
            self._server.loop.add_reader(self._sock.fileno(), self._on_readable)
        elif self._reading and not wanted:
            self._server.loop.remove_reader(self._sock.fileno())
        self._reading = wanted

    def _on_writable(self) -> None:
        self.flush()
        self._server.pump()

    # ---- ending ----------------------------------------------------------------------------------------------

    def _finish(self, *, all_sent: bool) -> None:
        """Let the host read what was sent and close, for a while: closing now could destroy it on its way."""
        if self._linger is None:
            _LOG.info("connection ended: %s", self._connection.end_reason)
            self._linger = self._server.loop.call_later(LINGER_S, self.close, "the host did not close")
        if all_sent and not self._shut:
            self._shut = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.close("closed by the host")

    def close(self, reason: str) -> None:
        """Close the socket now and tell the core."""
        if self._closed:
            return
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        self._server.loop.remove_reader(self._sock.fileno())
        self._server.loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._waiting_reads.clear()
        outgoing = self._connection.outgoing
        for item in outgoing:
            if isinstance(item, Sent):
                self._buffers.release(item.buffer)
        outgoing.clear()
        _LOG.debug("connection closed: %s", reason)
        self._connection.lost()
        del self._server.peers[self._connection]
        self._server.pump()
