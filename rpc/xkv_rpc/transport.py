"""ZMQ sockets, and nothing but: the only module that imports zmq.

The sockets are plain ones, never `zmq.asyncio`: their descriptor is watched by the loop and drained by hand. That
descriptor is edge-triggered and belongs to the socket's mailbox, so whoever watches it must look at `readable` until it
says no, and again after every send, which may have swallowed the edge.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq

from xkv_rpc.errors import AddressInUseError, BadEndpointError, EndpointError
from xkv_rpc.messages import PeerId
from xkv_rpc.unixpath import check_socket_path, claim_socket_path, inode_of, unlink_if_same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_rpc.calls import Buffer

ZmqSocket: TypeAlias = "zmq.Socket[bytes]"
ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

FRAME_SLACK_BYTES: Final = 16 << 20
"""MAXMSGSIZE is the largest payload and this: what is a little too large is answered, not cut off."""
RECEIVE_HWM: Final = 32
"""Messages of one peer that wait in the server's socket; then TCP holds the sender back."""
SEND_HWM: Final = 256
"""Replies of one peer that wait in the server's socket; then they wait in the outbox, by bytes."""
CLIENT_HWM: Final = 1024
COPY_BELOW_BYTES: Final = 128 << 10
"""Smaller payloads are cheaper to copy than to hand over with a callback."""
TRACK_FROM_BYTES: Final = 64 << 10
"""Payloads of this sum and more are followed until the transport is done with them."""
BACKLOG: Final = 1024
TCP_KEEPALIVE_IDLE_S: Final = 60
TCP_KEEPALIVE_INTERVAL_S: Final = 15
TCP_KEEPALIVE_COUNT: Final = 4

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
    """One message of a peer. `lengths` may have one entry more than `payloads`: then there were more than the bound."""

    peer: PeerId
    header: bytes
    payloads: list[memoryview]
    lengths: list[int]


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
    """The server's ROUTER socket. Not for several threads; no call blocks."""

    def __init__(self, *, payload_bytes_max: int, payloads_max: int) -> None:
        self._context = make_context()
        self._payloads_max = payloads_max
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
        raw.set(zmq.TCP_KEEPALIVE, 1)
        raw.set(zmq.TCP_KEEPALIVE_IDLE, TCP_KEEPALIVE_IDLE_S)
        raw.set(zmq.TCP_KEEPALIVE_INTVL, TCP_KEEPALIVE_INTERVAL_S)
        raw.set(zmq.TCP_KEEPALIVE_CNT, TCP_KEEPALIVE_COUNT)

    def bind(self, endpoint: str, socket_mode: int) -> str:
        """Bind `tcp://ADDRESS:PORT` or `ipc://PATH`; returns the endpoint with the port that was really bound.

        Raises:
            EndpointError: A subclass says why not.
        """
        scheme, rest = _split(endpoint)
        if scheme == "ipc":
            claim_socket_path(rest, socket.SOCK_STREAM)
        try:
            self._raw.set(zmq.IPV6, int("[" in rest))
            self._raw.bind(endpoint)
            bound = self._raw.get(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise _endpoint_error(endpoint, error) from None
        if scheme == "ipc":
            Path(rest).chmod(socket_mode)
            self._paths.append((rest, inode_of(rest)))
        return bytes(bound).rstrip(b"\0").decode()

    def fileno(self) -> int:
        """Give the descriptor to watch for reading (edge-triggered)."""
        return int(self._raw.get(zmq.FD))

    def receive(self) -> Received | None:
        """Take one message, or None where none waits."""
        raw = self._raw
        if not int(raw.get(_EVENTS)) & _POLLIN:
            return None
        peer = PeerId(raw.recv(_DONTWAIT))
        header = raw.recv(_DONTWAIT)
        payloads: list[memoryview] = []
        lengths: list[int] = []
        while raw.get(_RCVMORE):
            # libzmq hands messages over whole, so these are here already; what is beyond the bound is let go at once.
            frame = raw.recv(_DONTWAIT, copy=False)
            if len(payloads) < self._payloads_max:
                payloads.append(frame.buffer)
                lengths.append(len(frame))
            elif len(lengths) == len(payloads):
                lengths.append(len(frame))
        return Received(peer, header, payloads, lengths)

    def send(
        self, peer: PeerId, header: bytes, payloads: Sequence[Buffer]
    ) -> tuple[SendOutcome, Tracker | None]:
        """Send one message to a peer, or say why not. Payloads must not change until the tracker is done."""
        raw = self._raw
        try:
            try:
                raw.send(peer, _MORE)
            except zmq.Again:
                # The peer's progress is only noticed when the mailbox is read, which a send does once a millisecond.
                raw.get(_EVENTS)
                raw.send(peer, _MORE)
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
        for path, inode in self._paths:
            unlink_if_same(path, inode)

    def terminate(self) -> None:
        """End the context. Blocks for at most the linger time."""
        self._context.term()


def _split(endpoint: str) -> tuple[str, str]:
    scheme, _, rest = endpoint.partition("://")
    if scheme not in {"tcp", "ipc"} or not rest:
        raise BadEndpointError(endpoint, "neither tcp://ADDRESS:PORT nor ipc://PATH")
    return scheme, rest


def _endpoint_error(endpoint: str, error: zmq.ZMQError) -> EndpointError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(endpoint)
    return BadEndpointError(endpoint, str(error.strerror or "unknown reason"))


class Dealer:
    """The asyncio client's DEALER socket, connected to one endpoint. Not for several threads at once; close it to forget it.

    It sends only over a connection that exists (ZMQ_IMMEDIATE), so nothing is queued for a gateway that is not there and
    carried out after its caller has given up.
    """

    def __init__(self, context: ZmqContext, endpoint: str) -> None:
        scheme, rest = _split(endpoint)
        if scheme == "ipc":
            check_socket_path(rest)
        self._raw = raw = context.socket(zmq.DEALER)
        raw.copy_threshold = COPY_BELOW_BYTES
        raw.set(zmq.LINGER, 0)
        raw.set(zmq.IMMEDIATE, 1)
        raw.set(zmq.SNDHWM, CLIENT_HWM)
        raw.set(zmq.RCVHWM, CLIENT_HWM)
        raw.set(zmq.IPV6, int("[" in rest))
        try:
            raw.connect(endpoint)
        except zmq.ZMQError as error:
            raw.close(0)
            raise _endpoint_error(endpoint, error) from None

    def fileno(self) -> int:
        """Give the descriptor to watch for reading (edge-triggered)."""
        return int(self._raw.get(zmq.FD))

    def events(self) -> tuple[bool, bool]:
        """Whether a message can be received, and whether one can be sent. Resets the edge of the descriptor."""
        events = int(self._raw.get(_EVENTS))
        return bool(events & _POLLIN), bool(events & _POLLOUT)

    def send(self, header: bytes, payloads: Sequence[Buffer]) -> tuple[bool, Tracker | None]:
        """Send one message, or say that there is no connection (or no room) now."""
        raw = self._raw
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
        self._raw.close(0)
