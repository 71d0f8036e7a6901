"""One accepted connection without keys: reads whole messages, sends replies at once or as its peer takes them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

from xkv_rpc import zmtp
from xkv_rpc.sending import send_queued
from xkv_rpc.transport import SEND_HWM, Received, SendOutcome
from xkv_rpc.zmtp_peer import PeerFault, PeerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_rpc.calls import Buffer
    from xkv_rpc.listener import Listener
    from xkv_rpc.messages import PeerId
    from xkv_rpc.zmtp_peer import PeerStream

MESSAGES_PER_TURN: Final = 64
"""Messages of one peer that are handled before everything else gets its turn."""
DISCARDED_MAX_BYTES: Final = 1 << 20
"""What has come and was not read is taken away before closing, so that the peer is not reset: at most so much."""


class Sent:
    """Whether a connection still refers to the payloads of a message."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False
        """Sent, or dropped with the connection."""


class Connection:
    """See the module. Ends by itself, whatever happens, and tells its listener once."""

    def __init__(
        self, listener: Listener, sock: socket.socket, peer: PeerId, user: str, core: PeerStream
    ) -> None:
        self.peer = peer
        self.open = False
        """Whether its peer has shaken hands, and it has not ended."""
        self._listener = listener
        self._sock = sock
        self._user = user
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._deaf = False
        self._closed = False
        self._reading = False
        self._stopped = False
        self._rest = b""
        """What came and was not parsed yet."""
        self._reads = 0
        self._looking = False
        self._writing = False
        self._queue: deque[Buffer] = deque()
        self._tails: deque[tuple[int, Sent]] = deque()
        """Where messages end among all bytes that were ever queued."""
        self._queued_bytes = 0
        self._sent_bytes = 0

    @property
    def identity(self) -> bytes:
        """The routing identity that the peer asked for."""
        return self._core.identity

    @property
    def sending(self) -> bool:
        """Whether something waits for the peer to take it."""
        return bool(self._queue)

    @property
    def handing_on(self) -> bool:
        """Whether something has come that was not handed on yet."""
        return not self._closed and bool(self._rest or self._core.messages)

    @property
    def stalled_at(self) -> int | None:
        """How often it has read, while there is a message that has not come whole; else None."""
        return self._reads if self._core.amid else None

    def start(self) -> None:
        """Greet, and read from now on."""
        self._resume()
        self._send_own()

    # --- in

    def _resume(self) -> None:
        if not self._reading and not self._closed and not self._stopped:
            self._reading = True
            self._loop.add_reader(self._sock, self._readable)

    def stop(self) -> None:
        """Read nothing more; what has come is still handed on."""
        self._stopped = True
        self._pause()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        core = self._core
        try:
            place = core.direct()
            if place is not None:
                received = self._sock.recv_into(place)
                if received:
                    core.direct_received(received)
            else:
                scratch = self._listener.scratch
                received = self._sock.recv_into(scratch)
                if received:
                    taken = core.receive(scratch[:received])
                    if taken < received:
                        self._rest = bytes(scratch[taken:received])
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, PeerFault):
            self.close()
            return
        if not received:
            self.close()
            return
        self._reads += 1
        self._parsed()

    def _parse_rest(self) -> None:
        """Parse more of what came, in a turn of its own."""
        if self._closed:
            return
        rest = self._rest
        try:
            self._rest = rest[self._core.receive(memoryview(rest)) :]
        except PeerFault:
            self.close()
            return
        self._parsed()

    def _parsed(self) -> None:
        """Do what follows of the bytes that were parsed."""
        core = self._core
        if core.out:
            self._send_own()
        if not self.open and not self._shaken_hands():
            return
        if core.messages and not self._deaf:
            self._hand_on()
        else:
            core.messages.clear()
            self._go_on()
            self._look_again()

    def _go_on(self) -> None:
        """Parse what is left of what came; then read again."""
        if self._rest:
            self._pause()
            self._loop.call_soon(self._parse_rest)
        else:
            self._resume()

    def _look_again(self) -> None:
        """Read once more in the next turn, where no reply will find out that the peer is gone.

        A connection that was reset is reported once by uvloop, and not again, whatever is still to be read of it.
        """
        if self._reading and not self._looking:
            self._looking = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._looking = False
        if self._reading:
            self._readable()

    def _shaken_hands(self) -> bool:
        """Look how far the handshake is; False: the connection has ended."""
        match self._core.state:
            case PeerState.TRAFFIC:
                self.open = True
                self._deaf = not self._listener.opened(self)
            case PeerState.OVER:
                self._send_own()
                self.close()
                return False
            case _:
                pass
        return True

    def _hand_on(self) -> None:
        """Hand on some of the messages that came; no more are read before those are handled."""
        messages = self._core.messages
        if self._closed:
            return
        if self._deaf:
            messages.clear()
        on_message = self._listener.on_message
        if len(messages) == 1:
            on_message(Received(self.peer, *messages.pop(), self._user))
        else:
            some = messages[:MESSAGES_PER_TURN]
            del messages[:MESSAGES_PER_TURN]
            for message in some:
                on_message(Received(self.peer, *message, self._user))
        if messages:
            self._pause()
            self._loop.call_soon(self._hand_on)
        elif self._rest or not self._reading:
            self._go_on()

    # --- out

    def _send_own(self) -> None:
        """Send what the protocol itself has to say: once open, answers to heartbeats.

        A peer that has not taken what it was sent gets none: it sees traffic as soon as it reads, and the queue stays bounded.
        """
        own, self._core.out = self._core.out, []
        if not (self.open and self._queue):
            self._put(own)

    def send(self, header: bytes, payloads: Sequence[Buffer]) -> tuple[SendOutcome, Sent | None]:
        """Send a message, or as much of it as the peer takes now."""
        if len(self._tails) >= SEND_HWM:
            return SendOutcome.FULL, None
        if not payloads and not self._queue:
            # Nearly always the kernel takes a header whole.
            frame = zmtp.frame_head(len(header), more=False) + header
            try:
                sent = self._sock.send(frame)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._end_soon()
                return SendOutcome.GONE, None
            if sent == len(frame):
                return SendOutcome.SENT, None
            self._put([memoryview(frame)[sent:]])
        else:
            self._put(zmtp.message(header, payloads))
        if self._closed or not self._queue:
            return SendOutcome.SENT, None
        tracker = Sent()
        self._tails.append((self._queued_bytes, tracker))
        return SendOutcome.SENT, tracker if payloads else None

    def _put(self, buffers: Sequence[Buffer]) -> None:
        if self._closed:
            return
        self._queue.extend(buffers)
        self._queued_bytes += sum(map(len, buffers))
        if not self._writing:
            self._write()

    def _write(self) -> None:
        queue = self._queue
        try:
            self._sent_bytes += send_queued(self._sock, queue)
        except OSError:
            self._end_soon()
            return
        if queue and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._write)
        tails = self._tails
        while tails and tails[0][0] <= self._sent_bytes:
            tails.popleft()[1].done = True
        if not queue and self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
            self._listener.emptied()

    # --- the end

    def _end_soon(self) -> None:
        """End behind the caller, who may be in the middle of handing on messages."""
        self.open = False
        self._loop.call_soon(self.close)

    def give_up(self) -> None:
        """End a connection that has not shaken hands in time."""
        if not self.open:
            self.close()

    def close(self) -> None:
        """End the connection; what was not sent is dropped."""
        if self._closed:
            return
        self._closed = True
        self.open = False
        self._pause()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            discarded = 0
            while discarded < DISCARDED_MAX_BYTES and (
                received := self._sock.recv_into(self._listener.scratch)
            ):
                discarded += received
        self._sock.close()
        self._queue.clear()
        for _, tracker in self._tails:
            tracker.done = True
        self._tails.clear()
        self._core.messages.clear()
        self._core.forget()
        self._rest = b""
        self._listener.gone(self)
