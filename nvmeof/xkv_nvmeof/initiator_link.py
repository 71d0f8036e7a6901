"""The socket of one host queue pair: the shell around `HostQueue`.

A plain non-blocking socket on the loop's readiness callbacks. What one wake-up allows is done in one go: all PDUs that
were received are handled together, the rest of a read's data is received into the caller's memory, together with the
headers behind it, and everything there is to send leaves in one system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import ip_address
from struct import pack
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.host import HostQueue
from xkv_nvmeof.host_settings import ClosedByHost, ConnectionLost, DeadlinePassed
from xkv_nvmeof.host_states import OVER, QueueState

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.dhchap.host import Authenticated
    from xkv_nvmeof.host_command import Exchange
    from xkv_nvmeof.host_settings import QueueSettings

_SCRATCH_BYTES: Final = 64 * 1024
_TAIL_BYTES: Final = 512
"""Received behind the data of a read in the same call: digest, response and the next header."""
_ABORT: Final = pack("ii", 1, 0)
"""SO_LINGER with a time of zero: close with a reset."""
AWAKE_NS: Final = 50_000
"""So long the loop stays awake for the next bytes of data that has begun to come."""
_READS_PER_WAKEUP: Final = 16
"""So that a fast peer cannot keep the loop from its timers and its other sockets."""
_LOOK_AGAIN_S: Final = 0.05
"""uvloop tells of a reset once, and then no more of that socket: what was not read to its end is looked at again after that time."""


class QueueLink:
    """One connected queue pair. `on_down` is called once, from the loop, when it ended for whatever reason."""

    def __init__(
        self,
        sock: socket.socket,
        settings: QueueSettings,
        clock: Callable[[], int],
        on_down: Callable[[QueueLink], None],
    ) -> None:
        self.core = HostQueue(settings)
        self.last_sent_ns = clock()
        """When bytes last left on this connection."""
        self.authenticated: Authenticated | None = None
        """How the two ends proved who they are; None: nobody asked."""
        self.on_room: Callable[[], None] | None = None
        """Called after a turn in which commands finished."""
        self._sock = sock
        self._clock = clock
        self._on_down = on_down
        self.loop = asyncio.get_running_loop()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._tail = self._scratch[:_TAIL_BYTES]
        self._large = False
        """The last PDU did not fit into the scratch buffer: take only headers there, to copy less."""
        self._awake = False
        self._looking = False
        """A look at what may have been left in the socket is planned."""
        self._received_ns = 0
        self._flush_planned = False
        self._writing = False
        self._down = False
        self._changed: asyncio.Event = asyncio.Event()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _spare_loopback(sock)
        self.loop.add_reader(sock, self._readable)

    async def setup(self, deadline_ns: int) -> None:
        """Exchange ICReq and ICResp.

        Raises:
            Exception: the failure of the core.
        """
        self.core.start(deadline_ns)
        self._flush()
        while self.core.state is QueueState.IC_SENT:
            self._changed.clear()
            await self._changed.wait()
        if self.core.failure is not None:
            raise self.core.failure

    def submit(self, exchange: Exchange) -> None:
        """Send `exchange` with all others of this turn of the loop. There must be room."""
        self.core.submit(exchange)
        if not self._flush_planned:
            self._plan_flush()

    def submit_fabrics(self, exchange: Exchange) -> None:
        """Send a Fabrics command, with its data in the capsule. There must be room."""
        self.core.submit_fabrics(exchange)
        self._plan_flush()

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            self.loop.call_soon(self._flush)

    def submit_connect(self, exchange: Exchange) -> None:
        """Send the Fabrics Connect."""
        self.core.submit_connect(exchange)
        self._flush()

    def expire(self, now_ns: int) -> None:
        """Fail the queue pair when a deadline has passed."""
        self.core.expire(now_ns)
        self._deliver()

    def fail(self, failure: Exception) -> None:
        """End the queue pair; all that is in flight finishes now."""
        self.core.fail(failure)
        self._deliver()

    def close(self) -> None:
        """End the queue pair on this host's wish."""
        self.fail(ClosedByHost("closed by this host"))

    def _readable(self) -> None:
        core, sock = self.core, self._sock
        try:
            for _ in range(_READS_PER_WAKEUP):
                views = core.direct_views()
                if views:
                    wanted = sum(map(len, views))
                    count = sock.recvmsg_into([*views, self._tail])[0]
                    more = count >= wanted
                    core.direct_received(
                        views, min(count, wanted), self._tail[: count - wanted if more else 0]
                    )
                else:
                    wanted = _TAIL_BYTES if self._large else _SCRATCH_BYTES
                    count = sock.recv_into(self._scratch, wanted)
                    core.receive(self._scratch[:count])
                    self._large = core.data_pending
                    more = count == wanted
                if not count:
                    core.fail(ConnectionLost("the controller closed the connection"))
                if not more or core.failure is not None:
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            core.fail(ConnectionLost(f"connection lost: {error.strerror}"))
        else:
            self._plan_look()
        self._deliver()
        if core.outbox and not self._flush_planned:
            self._flush()
        if core.data_pending:
            self._expect_data()

    def _plan_look(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        if not self._down:
            self._readable()

    def _expect_data(self) -> None:
        self._received_ns = self._clock()
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._stay_awake)

    def _stay_awake(self) -> None:
        """Keep the loop from sleeping while the rest of begun data is on its way: waking up takes longer than that."""
        if self.core.data_pending and self._clock() - self._received_ns < AWAKE_NS:
            self.loop.call_soon(self._stay_awake)
        else:
            self._awake = False

    def _flush(self) -> None:
        self._flush_planned = False
        core, outbox = self.core, self.core.outbox
        if self._writing or self._down or not outbox:
            return
        try:
            while outbox:
                core.sent(self._sock.sendmsg(outbox.views()))
                self.last_sent_ns = self._clock()
        except (BlockingIOError, InterruptedError):
            if core.state not in OVER:
                self._writing = True
                self.loop.add_writer(self._sock, self._writable)
        except OSError as error:
            core.fail(ConnectionLost(f"connection lost: {error.strerror}"))
        self._deliver()

    def _writable(self) -> None:
        self._writing = False
        self.loop.remove_writer(self._sock)
        self._flush()

    def _deliver(self) -> None:
        """Hand finished exchanges to their makers, and take the connection down when it is over."""
        core = self.core
        if core.over and not self._down:
            self._take_down()
        finished = core.take_finished()
        for exchange in finished:
            if exchange.on_finish is not None:
                exchange.on_finish(exchange)
        if finished:
            if self.on_room is not None:
                self.on_room()
            # Behind the callers that were just woken, in the same turn of the loop: what they send next goes together.
            self._plan_flush()
        if not self._changed.is_set():
            self._changed.set()

    def _take_down(self) -> None:
        self._down = True
        self.loop.remove_reader(self._sock)
        if self._writing:
            self.loop.remove_writer(self._sock)
        if self.core.outbox:
            # Only a TermReq is left; if the socket does not take it at once, the end of the connection says enough.
            with contextlib.suppress(OSError):
                self._sock.sendmsg(self.core.outbox.views())
        if isinstance(self.core.failure, DeadlinePassed | ConnectionLost):
            # What the kernel still holds must not be delivered later: writes in it are of unknown outcome already.
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._sock.close()
        self._on_down(self)


def _spare_loopback(sock: socket.socket) -> None:
    """Have nothing on loopback measured or paced: there is nothing to share there, and BBR costs a third of the throughput."""
    with contextlib.suppress(OSError, ValueError):
        if ip_address(sock.getpeername()[0]).is_loopback:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
