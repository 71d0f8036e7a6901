"""ZMQ sockets, and nothing but: with `porter`, the only module that imports zmq.

The sockets are plain ones, never `zmq.asyncio`: their descriptor is watched by the loop and drained by hand. That
descriptor is edge-triggered and belongs to the socket's mailbox, so whoever watches it must look at `readable` until it
says no, and again after every send, which may have swallowed the edge.
"""

from __future__ import annotations

import errno
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import zmq

from xkv_rpc.addresses import split_endpoint
from xkv_rpc.errors import AddressInUseError, BadEndpointError, EndpointError
from xkv_rpc.messages import PeerId
from xkv_rpc.porter import Porter, ZmqContext, ZmqSocket
from xkv_rpc.unixpath import bind_listener, check_socket_path, inode_of, unlink_if_same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_rpc.calls import Buffer
    from xkv_rpc.doors import ClientKeys, Door

FRAME_SLACK_BYTES: Final = 16 << 20
"""MAXMSGSIZE is the largest payload and this: what is a little too large is answered, not cut off."""
RECEIVE_HWM: Final = 32
"""Messages of one peer that wait in the server's socket; then TCP holds the sender back."""
SEND_HWM: Final = 256
"""Replies of one peer that wait in the server's socket; then they wait in the outbox, by bytes."""
CLIENT_HWM: Final = 1024
FRAMES_PER_TURN: Final = 8192
"""Frames taken in one turn of the loop: twice what a message of the protocol's default limit has."""
COPY_BELOW_BYTES: Final = 128 << 10
"""Smaller payloads are cheaper to copy than to hand over with a callback."""
TRACK_FROM_BYTES: Final = 64 << 10
"""Payloads of this sum and more are followed until the transport is done with them."""
PEER_PREFIX: Final = b"z"
"""Of the ids of peers of libzmq's sockets, which may choose the rest."""
BACKLOG: Final = 1024
TCP_KEEPALIVE_IDLE_S: Final = 60
TCP_KEEPALIVE_INTERVAL_S: Final = 15
TCP_KEEPALIVE_COUNT: Final = 4
HANDSHAKE_MS: Final = 10_000
"""A peer that has not shaken hands by then is let go."""

_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_DONTWAIT: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_RCVMORE: Final = int(zmq.RCVMORE)


class SendOutcome(Enum):
    """What became of a message handed to a ROUTER."""

    SENT = "sent"
    FULL = "full"
    """The peer's queue is full; nothing was sent."""
    GONE = "gone"
    """There is no such peer (any more); nothing was sent."""


_READY: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_LOST: Final = int(zmq.EVENT_DISCONNECTED)
_REFUSED: Final = frozenset(
    {
        int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
        int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
        int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    }
)
_EVENTS_WATCHED: Final = _READY | _LOST | sum(_REFUSED)


class Tracker:
    """Whether the transport still refers to the payloads of a message."""

    __slots__ = ("_tracker",)

    def __init__(self, tracker: zmq.MessageTracker) -> None:
        self._tracker = tracker

    @property
    def done(self) -> bool:
        """Whether it is done with them: sent, or dropped with their connection."""
        return self._tracker.done

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done; False if it is not after `timeout_s` seconds."""
        try:
            self._tracker.wait(timeout_s)
        except zmq.NotDone:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Received:
    """One message of a peer. Where `lengths` has an entry more than `payloads`, payloads were beyond the bounds."""

    peer: PeerId
    header: bytes
    payloads: list[memoryview]
    lengths: list[int]
    kept: bool
    """False: there was no room for it while it came, and only its header is left, or not even that."""
    user: str
    """Who was let in, as the doorkeeper said; empty: there are no keys on this socket."""


def make_context() -> ZmqContext:
    """Make a context (one I/O thread) of one's own, so that its end concerns nobody else."""
    return zmq.Context(io_threads=1)


def terminate(context: ZmqContext) -> None:
    """End the context. Its sockets must be closed; the client's do not linger, so this does not block."""
    context.term()


def _send_payloads(raw: ZmqSocket, payloads: Sequence[Buffer]) -> Tracker | None:
    """Send the last frames of a message. Returns a tracker where they are many bytes.

    The last frame alone is followed: frames leave in order, so when it has left, they all have.
    """
    total = sum(map(len, payloads))
    last = len(payloads) - 1
    for index in range(last):
        payload = payloads[index]
        raw.send(payload, _MORE, copy=len(payload) < COPY_BELOW_BYTES)
    if total < TRACK_FROM_BYTES:
        raw.send(payloads[last], _DONTWAIT)
        return None
    frame = zmq.Frame(payloads[last], track=True, copy=False, copy_threshold=0)
    raw.send(frame, _DONTWAIT, copy=False)
    return None if frame.tracker is None else Tracker(frame.tracker)


class Router:
    """The server's ROUTER socket. Not for several threads; no call blocks.

    With `guarded` it asks the `porter` about each handshake.
    """

    def __init__(self, *, payload_bytes_max: int, payloads_max: int, guarded: bool = False) -> None:
        self._context = make_context()
        self.unfinished: Received | None = None
        """What `receive` has begun."""
        self._more = False
        self._payloads_max = payloads_max
        self._identified = False
        self.porter = Porter(self._context) if guarded else None
        self._paths: list[tuple[str, int]] = []
        self._raw = raw = self._context.socket(zmq.ROUTER)
        raw.copy_threshold = COPY_BELOW_BYTES
        raw.set(zmq.ROUTER_MANDATORY, 1)
        raw.set(zmq.ROUTER_HANDOVER, 0)
        raw.set(zmq.LINGER, 0)
        raw.set(zmq.RCVHWM, RECEIVE_HWM)
        raw.set(zmq.SNDHWM, SEND_HWM)
        raw.set(zmq.MAXMSGSIZE, payload_bytes_max + FRAME_SLACK_BYTES)
        raw.set(zmq.BACKLOG, BACKLOG)
        raw.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # Without this an endpoint is open while nobody answers for it.
        raw.set(zmq.ZAP_ENFORCE_DOMAIN, int(guarded))
        raw.set(zmq.TCP_KEEPALIVE, 1)
        raw.set(zmq.TCP_KEEPALIVE_IDLE, TCP_KEEPALIVE_IDLE_S)
        raw.set(zmq.TCP_KEEPALIVE_INTVL, TCP_KEEPALIVE_INTERVAL_S)
        raw.set(zmq.TCP_KEEPALIVE_CNT, TCP_KEEPALIVE_COUNT)

    def bind(self, door: Door) -> str:
        """Bind; returns the endpoint with the port that was really bound.

        Raises:
            EndpointError: A subclass says why not.
        """
        endpoint = door.endpoint
        scheme, rest = split_endpoint(endpoint)
        try:
            self._set_mechanism(door)
            if scheme == "ipc":
                self._bind_unix(endpoint, rest, door)
            else:
                self._raw.set(zmq.IPV6, int("[" in rest))
                self._raw.bind(endpoint)
            bound = self._raw.get(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise _endpoint_error(endpoint, error) from None
        return bytes(bound).rstrip(b"\0").decode()

    def _set_mechanism(self, door: Door) -> None:
        """Set what the transport copies into the next endpoint that is bound."""
        raw = self._raw
        if door.keys is not None:
            assert self.porter is not None, "keys that nobody checks"
            raw.set(zmq.CURVE_SERVER, 1)
            raw.set(zmq.CURVE_SECRETKEY, door.keys.secret.encode())
            self._identified = True
        else:
            raw.set(zmq.CURVE_SERVER, 0)
        if self.porter is not None:
            raw.set(zmq.ZAP_DOMAIN, door.admits.value.encode())

    def _bind_unix(self, endpoint: str, path: str, door: Door) -> None:
        """Bind a listener of our own making: its permissions hold from the first moment."""
        listener = bind_listener(path, socket.SOCK_STREAM, door.mode, door.group)
        self._paths.append((path, inode_of(path)))
        self._raw.set(zmq.USE_FD, listener.detach())
        try:
            self._raw.bind(endpoint)
        finally:
            self._raw.set(zmq.USE_FD, -1)

    def fileno(self) -> int:
        """Give the descriptor to watch for reading (edge-triggered)."""
        return int(self._raw.get(zmq.FD))

    def receive(self) -> Received | None:
        """Take one message. None: none waits, or (`unfinished`) one has so many frames that the rest is for the next turn."""
        raw = self._raw
        message, self.unfinished = self.unfinished, None
        if message is None:
            if not int(raw.get(_EVENTS)) & _POLLIN:
                return None
            message = self._begin()
        payloads, lengths = message.payloads, message.lengths
        for _ in range(FRAMES_PER_TURN):
            if not self._more:
                return message
            # libzmq hands messages over whole, so these are here already; what is beyond the bound is let go at once.
            frame = raw.recv(_DONTWAIT, copy=False)
            self._more = frame.more
            if len(payloads) < self._payloads_max:
                payloads.append(frame.buffer)
                lengths.append(len(frame))
            elif len(lengths) == len(payloads):
                lengths.append(len(frame))
        self.unfinished = message
        return None

    def _begin(self) -> Received:
        raw = self._raw
        peer = PeerId(PEER_PREFIX + raw.recv(_DONTWAIT))
        first = raw.recv(_DONTWAIT, copy=False)
        # The frame knows it, at a tenth of what asking the socket costs.
        self._more = first.more
        user = _user_of(first) if self._identified else ""
        return Received(peer, first.bytes, [], [], kept=True, user=user)

    def send(
        self, peer: PeerId, header: bytes, payloads: Sequence[Buffer]
    ) -> tuple[SendOutcome, Tracker | None]:
        """Send one message to a peer, or say why not. Payloads must not change until the tracker is done."""
        raw = self._raw
        name = peer[len(PEER_PREFIX) :]
        try:
            try:
                raw.send(name, _MORE)
            except zmq.Again:
                # The peer's progress is only noticed when the mailbox is read, which a send does once a millisecond.
                raw.get(_EVENTS)
                raw.send(name, _MORE)
        except zmq.Again:
            return SendOutcome.FULL, None
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return SendOutcome.GONE, None
            raise
        if not payloads:
            raw.send(header, _DONTWAIT)
            return SendOutcome.SENT, None
        raw.send(header, _MORE)
        return SendOutcome.SENT, _send_payloads(raw, payloads)

    def close(self, linger_ms: int) -> None:
        """Close; what was sent may still leave until `terminate`, for at most `linger_ms`."""
        self._raw.close(linger_ms)
        if self.porter is not None:
            self.porter.close()
        for path, inode in self._paths:
            unlink_if_same(path, inode)

    def terminate(self) -> None:
        """End the context. Blocks for at most the linger time."""
        self._context.term()


def _user_of(frame: zmq.Frame) -> str:
    """Say whom the porter has let in. Where it was not asked there is no such word, or one that the peer chose itself."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _endpoint_error(endpoint: str, error: zmq.ZMQError) -> EndpointError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(endpoint)
    return BadEndpointError(endpoint, str(error.strerror or "unknown reason"), errno=error.errno or 0)


class Dealer:
    """A client's DEALER socket, for one connection to one endpoint. Not for several threads at once; close it to forget it.

    It sends only while there is a connection, so nothing is queued for a gateway that is not there and carried out after
    its caller has given up. (ZMQ_IMMEDIATE would say that too, but then what was received and not yet taken is thrown away
    when the connection ends: the last replies of a gateway that goes.)
    """

    def __init__(self, context: ZmqContext, endpoint: str, keys: ClientKeys | None = None) -> None:
        scheme, rest = split_endpoint(endpoint)
        if scheme == "ipc":
            check_socket_path(rest)
        self._raw = raw = context.socket(zmq.DEALER)
        raw.copy_threshold = COPY_BELOW_BYTES
        raw.set(zmq.LINGER, 0)
        raw.set(zmq.SNDHWM, CLIENT_HWM)
        raw.set(zmq.RCVHWM, CLIENT_HWM)
        raw.set(zmq.IPV6, int("[" in rest))
        if keys is not None:
            raw.set(zmq.CURVE_SERVERKEY, keys.server_public.encode())
            raw.set(zmq.CURVE_PUBLICKEY, keys.pair.public.encode())
            raw.set(zmq.CURVE_SECRETKEY, keys.pair.secret.encode())
        self._connected = False
        self.lost = False
        """There was a connection, and it ended: everything that came by it can still be received."""
        self.refused = False
        """A handshake failed for good: an unknown key, or another mechanism."""
        self._monitor: ZmqSocket = raw.get_monitor_socket(_EVENTS_WATCHED, f"inproc://watch-{id(self)}")
        try:
            raw.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise _endpoint_error(endpoint, error) from None

    def filenos(self) -> tuple[int, int]:
        """Give the descriptors to watch for reading (edge-triggered)."""
        return int(self._raw.get(zmq.FD)), int(self._monitor.get(zmq.FD))

    def events(self) -> tuple[bool, bool]:
        """Whether a message can be received, and whether one can be sent. Resets the edges of the descriptors."""
        # First what became of the connection: what had come by it until then is seen by the second look.
        while int(self._monitor.get(_EVENTS)) & _POLLIN:
            self._note(int.from_bytes(self._monitor.recv_multipart(_DONTWAIT)[0][:2], sys.byteorder))
        events = int(self._raw.get(_EVENTS))
        return bool(events & _POLLIN), self._connected and not self.lost and bool(events & _POLLOUT)

    def _note(self, event: int) -> None:
        if event == _READY:
            self._connected = True
        elif event in _REFUSED:
            self.refused = True
        elif event == _LOST and self._connected:
            self.lost = True

    def wait(self, timeout_ms: int, *, writable: bool) -> None:
        """Wait until a message can be sent or received, or something happened to the connection, or for the time."""
        poller = zmq.Poller()
        poller.register(self._monitor, _POLLIN)
        if not writable or self._connected:
            poller.register(self._raw, _POLLOUT if writable else _POLLIN)
        poller.poll(timeout_ms)

    def send(self, header: bytes, payloads: Sequence[Buffer]) -> tuple[bool, Tracker | None]:
        """Send one message, or say that there is no connection (or no room) now."""
        raw = self._raw
        if not self._connected or self.lost:
            return False, None
        try:
            if not payloads:
                raw.send(header, _DONTWAIT)
                return True, None
            raw.send(header, _MORE)
            return True, _send_payloads(raw, payloads)
        except zmq.Again:
            return False, None

    def receive(self) -> tuple[bytes, list[memoryview]]:
        """Take the message that waits (`events` said so)."""
        raw = self._raw
        payloads: list[memoryview] = []
        header = raw.recv(_DONTWAIT)
        while raw.get(_RCVMORE):
            payloads.append(raw.recv(_DONTWAIT, copy=False).buffer)
        return header, payloads

    def close(self) -> None:
        """Close; what has not left is dropped."""
        self._raw.disable_monitor()
        self._monitor.close(0)
        self._raw.close(0)
