"""One blocking connection of a client with the gateway: a socket and its buffer around the ZMTP core.

No thread, no context, no queue: a request is in the kernel when `send` returns, and what has been given up is forgotten
by closing the socket. Every step has the deadline of its call.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import TYPE_CHECKING, Final

from xkv_rpc import zmtp
from xkv_rpc.errors import (
    BadEndpointError,
    BadReplyError,
    CallTimeoutError,
    ConnectionLostError,
    GatewayUnreachableError,
)
from xkv_rpc.names import look_up
from xkv_rpc.sending import VECTORS_MAX
from xkv_rpc.unixpath import check_socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Buffer

_NS_PER_MS: Final = 1_000_000
BUFFER_BYTES: Final = 256 << 10
"""What one read may bring; bodies that are larger are read into memory of their own."""
FRAME_BYTES_MAX: Final = 1 << 30
"""A reply's frame is an object at most; a larger announcement is not one of this protocol."""
FRAMES_MAX: Final = 65536


class Wire:
    """A connection that has shaken hands. Not for several threads at once, but `shutdown` is for any thread."""

    def __init__(self, endpoint: str, clock: Callable[[], int], deadline_ns: int) -> None:
        """Connect and shake hands.

        Args:
            endpoint: `tcp://ADDRESS:PORT` or `ipc://PATH`.
            clock: Monotonic nanoseconds.
            deadline_ns: For all of it.

        Raises:
            BadEndpointError: The endpoint is not one.
            GatewayUnreachableError: Nobody there, or not in time.
            BadReplyError: Somebody else is there.
        """
        self._endpoint = endpoint
        self._clock = clock
        family, address = address_of(endpoint)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._poll_in = select.poll()
        self._poll_in.register(self._socket, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(self._socket, select.POLLOUT)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        try:
            self._connect(family, address, deadline_ns)
        except (TimeoutError, CallTimeoutError):
            self.close()
            raise GatewayUnreachableError(f"{endpoint}: no connection in time") from None
        except ConnectionLostError:
            self.close()
            raise GatewayUnreachableError(f"{endpoint}: the connection ended in the handshake") from None
        except OSError as error:
            self.close()
            raise GatewayUnreachableError(f"{endpoint}: {error.strerror or 'no such address'}") from None
        except BadReplyError:
            self.close()
            raise

    def _connect(self, family: int, address: tuple[str, int] | str, deadline_ns: int) -> None:
        remaining_ns = deadline_ns - self._clock()
        if remaining_ns <= 0:
            raise CallTimeoutError
        if family == socket.AF_INET:
            assert isinstance(address, tuple)
            address = look_up(*address, remaining_ns / 1e9)
            remaining_ns = max(deadline_ns - self._clock(), 1)
        self._socket.settimeout(remaining_ns / 1e9)
        self._socket.connect(address)
        self._socket.setblocking(False)
        if family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send_all([zmtp.GREETING], deadline_ns)
        zmtp.check_greeting(bytes(self._exactly(zmtp.GREETING_BYTES, deadline_ns)))
        self._send_all([zmtp.ready(b"DEALER")], deadline_ns)
        head = self._head(deadline_ns)
        if not head.command or head.body_bytes > zmtp.COMMAND_BYTES_MAX:
            raise BadReplyError("the handshake of the gateway is not one of ZMTP 3")
        zmtp.check_ready(bytes(self._exactly(head.body_bytes, deadline_ns)))

    @property
    def stale(self) -> bool:
        """Whether anything came, or the connection ended, while no call was on it: then it is of no use any more."""
        return self._start != self._end or bool(self._poll_in.poll(0))

    def send(self, header: bytes, payloads: Sequence[Buffer], deadline_ns: int) -> None:
        """Send a message. When this returns, the kernel has it.

        Raises:
            CallTimeoutError, ConnectionLostError: Part of it may have been sent; close the connection.
        """
        buffers = zmtp.message(header, payloads)
        if not payloads:
            # Nearly always the kernel takes a header whole; what is wrong otherwise, `_send_all` will find out.
            try:
                sent = self._socket.send(buffers[0])
            except OSError:
                sent = 0
            if sent == len(buffers[0]):
                return
            buffers[0] = memoryview(buffers[0])[sent:]
        self._send_all(buffers, deadline_ns)

    def receive(self, deadline_ns: int) -> tuple[bytes, list[memoryview]]:
        """Receive a message: its header, and its payloads.

        Raises:
            CallTimeoutError, ConnectionLostError, BadReplyError: Close the connection.
        """
        frames: list[memoryview] = []
        while True:
            flags, body_bytes, _ = head = self._head(deadline_ns)
            if flags & zmtp.COMMAND:
                self._command(head, deadline_ns)
                continue
            if body_bytes > FRAME_BYTES_MAX or len(frames) >= FRAMES_MAX:
                raise BadReplyError("the reply is larger than any of this protocol")
            frames.append(self._exactly(body_bytes, deadline_ns))
            if not flags & zmtp.MORE:
                return bytes(frames[0]), frames[1:]

    def _command(self, head: zmtp.Head, deadline_ns: int) -> None:
        if head.body_bytes > zmtp.COMMAND_BYTES_MAX:
            raise BadReplyError("the command is larger than any of ZMTP 3")
        answer = zmtp.pong(bytes(self._exactly(head.body_bytes, deadline_ns)))
        if answer is not None:
            self._send_all([answer], deadline_ns)

    def _head(self, deadline_ns: int) -> zmtp.Head:
        if self._start == self._end:
            self._fill(deadline_ns)
        while True:
            head = zmtp.parse_head(self._view, self._start, self._end)
            if head is not None:
                self._start += head.head_bytes
                return head
            self._fill(deadline_ns)

    def _exactly(self, count: int, deadline_ns: int) -> memoryview:
        """Take `count` bytes; those that are not in the buffer yet are read to where they will stay."""
        have = min(count, self._end - self._start)
        if have == count or count <= BUFFER_BYTES // 2:
            while self._end - self._start < count:
                self._fill(deadline_ns)
            body = bytes(self._view[self._start : self._start + count])
            self._start += count
            return memoryview(body)
        target = memoryview(bytearray(count))
        target[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < count:
            have += self._read(target[have:], deadline_ns)
        return target.toreadonly()

    def _fill(self, deadline_ns: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES or self._start > BUFFER_BYTES // 2:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._read(self._view[self._end :], deadline_ns)

    def _read(self, target: memoryview, deadline_ns: int) -> int:
        """Read at least one byte. Waits first: an answer is never there yet, so trying would be a wasted call."""
        while True:
            self._wait(self._poll_in, deadline_ns)
            try:
                count = self._socket.recv_into(target)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLostError(f"{self._endpoint}: {error.strerror}") from None
            if count == 0:
                raise ConnectionLostError(f"{self._endpoint}: the gateway closed the connection")
            return count

    def _wait(self, poller: select.poll, deadline_ns: int) -> None:
        while True:
            remaining_ns = deadline_ns - self._clock()
            if remaining_ns <= 0:
                raise CallTimeoutError(f"{self._endpoint}: no answer in time")
            if poller.poll(-(-remaining_ns // _NS_PER_MS)):
                return

    def _send_all(self, buffers: list[Buffer], deadline_ns: int) -> None:
        index = 0
        while index < len(buffers):
            try:
                if len(buffers) == 1:
                    sent = self._socket.send(buffers[0])
                else:
                    sent = self._socket.sendmsg(buffers[index : index + VECTORS_MAX])
            except BlockingIOError:
                self._wait(self._poll_out, deadline_ns)
                continue
            except OSError as error:
                raise ConnectionLostError(f"{self._endpoint}: {error.strerror}") from None
            while index < len(buffers) and sent >= len(buffers[index]):
                sent -= len(buffers[index])
                index += 1
            if sent:
                buffers[index] = memoryview(buffers[index])[sent:]

    def shutdown(self) -> None:
        """End the connection under a call of another thread, which then fails with `ConnectionLostError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; what has not been answered never will be."""
        self._socket.close()


def address_of(endpoint: str) -> tuple[int, tuple[str, int] | str]:
    """Return the address family and the address of an endpoint.

    Raises:
        BadEndpointError: It is none.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        check_socket_path(rest)
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise BadEndpointError(endpoint, "neither tcp://ADDRESS:PORT nor ipc://PATH")
    if host.startswith("[") and host.endswith("]"):
        return socket.AF_INET6, (host[1:-1], int(port))
    return socket.AF_INET, (host, int(port))
