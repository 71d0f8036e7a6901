"""One blocking connection of a client with a CURVE endpoint: what `Wire` is without keys, through libzmq.

The bytes are encrypted by the library's own thread; nothing of that is ours to write. The interface is that of `Wire`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from xkv_rpc.errors import CallTimeoutError, ConnectionLostError, GatewayUnreachableError, KeyRefusedError
from xkv_rpc.transport import Dealer, make_context, terminate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Buffer
    from xkv_rpc.doors import ClientKeys

SLICE_MS: Final = 20
"""How long a wait lasts before it looks whether another thread has ended the connection."""
_NS_PER_MS: Final = 1_000_000


class CurveWire:
    """A connection that has shaken hands. Not for several threads at once, but `shutdown` is for any thread."""

    def __init__(self, endpoint: str, keys: ClientKeys, clock: Callable[[], int], deadline_ns: int) -> None:
        """Connect and shake hands.

        Args:
            endpoint: `tcp://ADDRESS:PORT` or `ipc://PATH`.
            keys: Who the server must be, and who the client is.
            clock: Monotonic nanoseconds.
            deadline_ns: For all of it.

        Raises:
            BadEndpointError: The endpoint is not one.
            KeyRefusedError: The gateway does not know the key, or is not the one with the server's key.
            GatewayUnreachableError: Nobody there, or not in time.
        """
        self._endpoint = endpoint
        self._clock = clock
        self._ended = threading.Event()
        self._closed = False
        self._context = make_context()
        try:
            self._dealer = Dealer(self._context, endpoint, keys)
        except BaseException:
            terminate(self._context)
            raise
        try:
            self._until(writable=True, deadline_ns=deadline_ns)
        except CallTimeoutError:
            self.close()
            raise GatewayUnreachableError(f"{endpoint}: no connection in time") from None
        except BaseException:
            self.close()
            raise

    @property
    def stale(self) -> bool:
        """Whether anything came, or the connection ended, while no call was on it: then it is of no use any more."""
        readable, writable = self._dealer.events()
        return readable or not writable

    def send(self, header: bytes, payloads: Sequence[Buffer], deadline_ns: int) -> None:
        """Send a message. When this returns, the payloads may change.

        Raises:
            CallTimeoutError, ConnectionLostError, KeyRefusedError: Part of it may have been sent; close the connection.
        """
        while True:
            sent, tracker = self._dealer.send(header, payloads)
            if sent:
                break
            self._until(writable=True, deadline_ns=deadline_ns)
        while tracker is not None and not tracker.wait(SLICE_MS / 1000):
            self._dealer.events()
            self._check(deadline_ns)

    def receive(self, deadline_ns: int) -> tuple[bytes, list[memoryview]]:
        """Receive a message: its header, and its payloads.

        Raises:
            CallTimeoutError, ConnectionLostError, KeyRefusedError: Close the connection.
        """
        self._until(writable=False, deadline_ns=deadline_ns)
        return self._dealer.receive()

    def _until(self, *, writable: bool, deadline_ns: int) -> None:
        while True:
            can_read, can_write = self._dealer.events()
            if can_write if writable else can_read:
                return
            left_ms = self._check(deadline_ns)
            self._dealer.wait(min(left_ms, SLICE_MS), writable=writable)

    def _check(self, deadline_ns: int) -> int:
        """Return the milliseconds that are left. Raises what ends the wait."""
        if self._ended.is_set():
            raise ConnectionLostError(f"{self._endpoint}: the connection was closed")
        if self._dealer.refused:
            raise KeyRefusedError(
                f"{self._endpoint}: the gateway refuses this key, or is not the one expected"
            )
        if self._dealer.lost:
            raise ConnectionLostError(f"{self._endpoint}: the gateway closed the connection")
        left_ns = deadline_ns - self._clock()
        if left_ns <= 0:
            raise CallTimeoutError(f"{self._endpoint}: no answer in time")
        return -(-left_ns // _NS_PER_MS)

    def shutdown(self) -> None:
        """End the connection under a call of another thread, which then fails with `ConnectionLostError`."""
        self._ended.set()

    def close(self) -> None:
        """Close; what has not been answered never will be."""
        if not self._closed:
            self._closed = True
            self._dealer.close()
            terminate(self._context)
