"""One connection of the asyncio client with a gateway without keys: a socket of the loop around the ZMTP core.

No thread and no queue between the caller and the kernel: one message is on its way at a time, and what has been given up is forgotten
by closing the socket. The interface is that of `transport.Dealer`, but it needs nobody to watch it: it tells of news itself.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from xkv_rpc import zmtp
from xkv_rpc.errors import BadEndpointError
from xkv_rpc.sending import send_queued
from xkv_rpc.wire import BUFFER_BYTES, FRAME_BYTES_MAX, FRAMES_MAX, address_of
from xkv_rpc.zmtp_peer import PeerBounds, PeerFault, PeerState, PeerStream, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Buffer

RETRY_S: Final = 0.1
"""From a connection that could not be made to the next attempt; the deadlines of the calls bound how often that is."""
READS_PER_TURN: Final = 64
_UNBOUNDED: Final = 1 << 62
"""Whoever asks for replies has bounded them; what comes is bounded frame by frame."""
_BOUNDS: Final = PeerBounds(
    frame_bytes_max=FRAME_BYTES_MAX, message_bytes_max=_UNBOUNDED, payloads_max=FRAMES_MAX
)


class Unsent:
    """Whether the payloads of a message are still referred to."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - nothing happens meanwhile
        """Return whether they are; nothing is sent while the caller waits."""
        return self.done


def served(endpoint: str) -> bool:
    """Whether `AsyncWire` can connect to it: a name would have to be looked up, which takes a thread."""
    try:
        family, address = address_of(endpoint)
        if family != socket.AF_UNIX:
            ip_address(address[0])
    except (BadEndpointError, ValueError):
        return False
    return True


class AsyncWire:
    """See the module. Until there is a connection it is tried again and again; once it has ended it is `lost`.

    Args:
        endpoint: one that is `served`.
        news: called from the loop when a message can be received, another one can be sent, or the connection is lost.
    """

    def __init__(self, endpoint: str, news: Callable[[], None]) -> None:
        self.lost = False
        """There was a connection, and it ended: everything that came by it can still be received."""
        self._address = address_of(endpoint)
        self._news = news
        self._loop = asyncio.get_running_loop()
        self._scratch = memoryview(bytearray(BUFFER_BYTES))
        self._retry: asyncio.TimerHandle | None = None
        self._open = False
        """Whether there is a socket."""
        self._writing = False
        self._queue: deque[Buffer] = deque()
        self._unsent: Unsent | None = None
        self._connect()

    # --- connecting

    def _connect(self) -> None:
        family, address = self._address
        self._retry = None
        self._core = PeerStream(_BOUNDS, Room(_UNBOUNDED), as_dealer=True)
        self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
        self._open = True
        sock.setblocking(False)
        try:
            failure = sock.connect_ex(address)
        except OSError as error:
            failure = error.errno or errno.EIO
        if failure == errno.EINPROGRESS:
            self._write_later(self._connected)
        elif failure:
            self._failed()
        else:
            self._greet()

    def _connected(self) -> None:
        self._write_no_more()
        if self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed()
        else:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet()

    def _greet(self) -> None:
        self._loop.add_reader(self._sock, self._readable)
        self._put(self._own())

    def _failed(self) -> None:
        """The connection cannot be made, or has ended."""
        if not self._open:
            return
        self._end()
        if self._core.state is PeerState.TRAFFIC:
            self.lost = True
            self._loop.call_soon(self._news)
        else:
            self._retry = self._loop.call_later(RETRY_S, self._connect)

    def _end(self) -> None:
        self._open = False
        self._loop.remove_reader(self._sock)
        self._write_no_more()
        self._queue.clear()
        if self._unsent is not None:
            self._unsent.done = True
        self._sock.close()

    def close(self) -> None:
        """Close; what has not left is dropped."""
        if self._retry is not None:
            self._retry.cancel()
        if self._open:
            self._end()

    # --- in

    def filenos(self) -> tuple[int, ...]:
        """There is nothing for others to watch."""
        return ()

    def events(self) -> tuple[bool, bool]:
        """Whether a message can be received, and whether one can be sent."""
        core = self._core
        return bool(core.messages), core.state is PeerState.TRAFFIC and not (self.lost or self._queue)

    def receive(self) -> tuple[bytes, list[memoryview]]:
        """Take the message that waits (`events` said so)."""
        message = self._core.messages.pop(0)
        return message.header, message.payloads

    def _readable(self) -> None:
        """Read what is there, to the end: a connection that was reset is reported once."""
        core, before = self._core, self._core.state
        try:
            for _ in range(READS_PER_TURN):
                if not self._read():
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, PeerFault):
            self._failed()
        if core.out:
            self._put(self._own())
        if core.messages or core.state is not before:
            self._news()

    def _read(self) -> bool:
        """Read once; False: the connection has ended."""
        core, sock = self._core, self._sock
        place = core.direct()
        if place is not None:
            received = sock.recv_into(place)
            if received:
                core.direct_received(received)
        else:
            received = sock.recv_into(self._scratch)
            at = 0
            while at < received:
                at += core.receive(self._scratch[at:received])
        if not received:
            self._failed()
        return received > 0

    # --- out

    def send(self, header: bytes, payloads: Sequence[Buffer]) -> tuple[bool, Unsent | None]:
        """Send one message, or say that there is no connection now, or another message on its way."""
        if self._core.state is not PeerState.TRAFFIC or self.lost or self._queue:
            return False, None
        self._put(zmtp.message(header, payloads))
        if not payloads or not self._queue:
            return True, None
        self._unsent = Unsent()
        return True, self._unsent

    def _own(self) -> list[bytes]:
        own, self._core.out = self._core.out, []
        return own

    def _put(self, buffers: Sequence[Buffer]) -> None:
        if self._open:
            self._queue.extend(buffers)
            if not self._writing:
                self._write()

    def _write(self) -> None:
        try:
            send_queued(self._sock, self._queue)
        except OSError:
            self._failed()
            return
        if self._queue:
            self._write_later(self._writable)

    def _writable(self) -> None:
        self._write_no_more()
        self._write()
        if not self._queue:
            if self._unsent is not None:
                self._unsent.done = True
            self._news()

    def _write_later(self, writable: Callable[[], None]) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, writable)

    def _write_no_more(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
