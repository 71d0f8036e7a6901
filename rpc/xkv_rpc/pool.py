"""The connections of a blocking client in one process: a bounded pool, the one used last first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from xkv_rpc.curve_wire import CurveWire
from xkv_rpc.errors import ClientClosedError, TooManyCallsError
from xkv_rpc.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_rpc.doors import ClientKeys


AnyWire: TypeAlias = Wire | CurveWire


class Pool:
    """Lends each connection to one call at a time. For any thread."""

    def __init__(
        self,
        endpoint: str,
        connections_max: int,
        clock: Callable[[], int],
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._connections_max = connections_max
        self._clock = clock
        self._idle: list[AnyWire] = []
        self._lent: set[AnyWire] = set()
        self._connecting = 0
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0

    def __len__(self) -> int:
        """Connections that are open or being made."""
        return len(self._idle) + len(self._lent) + self._connecting

    def acquire(self, deadline_ns: int, connect_timeout_ns: int) -> AnyWire:
        """Borrow a connection; give it back with `release`, or after a failure with `discard`.

        Raises:
            TooManyCallsError: All were lent until the deadline.
            ClientClosedError: The pool was closed.
            GatewayUnreachableError, BadReplyError, BadEndpointError: No connection could be made.
        """
        wire = self._take(deadline_ns)
        if wire is not None:
            return wire
        made: AnyWire | None = None
        try:
            made = self._connect(min(deadline_ns, self._clock() + connect_timeout_ns))
        finally:
            with self._lock:
                self._connecting -= 1
                if made is None:
                    self._changed.notify()
                else:
                    self._lent.add(made)
                    if self._closed:
                        made.shutdown()  # as `close` would have done
        return made

    def _connect(self, deadline_ns: int) -> AnyWire:
        if self._keys is None:
            return Wire(self._endpoint, self._clock, deadline_ns)
        return CurveWire(self._endpoint, self._keys, self._clock, deadline_ns)

    def _take(self, deadline_ns: int) -> AnyWire | None:
        """Take an idle connection; None: the caller may make one."""
        with self._lock:
            while not self._closed:
                while self._idle:
                    wire = self._idle.pop()
                    if not wire.stale:
                        self._lent.add(wire)
                        return wire
                    wire.close()
                if len(self) < self._connections_max:
                    self._connecting += 1
                    return None
                remaining_ns = deadline_ns - self._clock()
                if remaining_ns <= 0:
                    raise TooManyCallsError("every connection of the client was in use")
                self._waiting += 1
                try:
                    self._changed.wait(remaining_ns / 1e9)
                finally:
                    self._waiting -= 1
            raise ClientClosedError("the client is closed")

    def release(self, wire: AnyWire) -> None:
        """Give back a connection on which nothing is outstanding."""
        with self._lock:
            self._lent.discard(wire)
            if not self._closed:
                self._idle.append(wire)
                if self._waiting:
                    self._changed.notify()
                return
        wire.close()

    def discard(self, wire: AnyWire) -> None:
        """Give back a connection that is of no use any more."""
        wire.close()
        with self._lock:
            self._lent.discard(wire)
            self._changed.notify()

    def close(self) -> None:
        """Close what is idle, and end what is lent under its borrower."""
        with self._lock:
            self._closed = True
            for wire in self._idle:
                wire.close()
            self._idle.clear()
            for wire in self._lent:
                wire.shutdown()
            self._changed.notify_all()

    def forget(self) -> None:
        """Close the descriptors of a parent process's pool in its child; the parent's connections live on."""
        for wire in (*self._idle, *self._lent):
            wire.close()
