"""Spreads the commands of calls over the I/O queues of the association that is up; the rest waits, bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import DeviceError, DeviceOffline
from xkv_nvmeof.host_command import NO_DEADLINE
from xkv_nvmeof.host_settings import DeadlinePassed
from xkv_nvmeof.initiator_calls import Call
from xkv_nvmeof.initiator_errors import DeviceBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xkv_nvmeof.blockdev import DeviceCounters
    from xkv_nvmeof.host_command import Exchange
    from xkv_nvmeof.initiator_association import Association
    from xkv_nvmeof.initiator_link import QueueLink
    from xkv_nvmeof.initiator_options import InitiatorOptions

_NS_PER_MS = 1_000_000


class Dispatcher:
    """Owns the calls that wait. While there is no association every call is refused at once."""

    def __init__(self, options: InitiatorOptions, clock: Callable[[], int], counters: DeviceCounters) -> None:
        self._options = options
        self._clock = clock
        self._counters = counters
        self._timeout_ns = options.command_timeout_ms * _NS_PER_MS
        self._association: Association | None = None
        self._links: list[QueueLink] = []
        self._waiting: deque[Call] = deque()
        self._reason = "not connected yet"

    def attach(self, association: Association) -> None:
        """Use `association` from now on."""
        self._association = association
        self._links = association.links
        association.expire_waiting = self.expire
        for link in association.links:
            link.on_room = self._pump

    def detach(self, reason: str) -> None:
        """Refuse everything from now on, because of `reason`; what waits fails at once."""
        self._association = None
        self._links = []
        self._reason = reason
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.association_ended()

    @property
    def association(self) -> Association | None:
        """The association in use."""
        return self._association

    async def run(self, what: str, commands: Iterator[Exchange], *, mutates: bool) -> None:
        """Run the commands of one call.

        Raises:
            DeviceError: as the block device contract says.
        """
        association = self._association
        if association is None:
            self._counters.errors += 1
            raise DeviceOffline(f"{what}: {self._reason}")
        if len(self._waiting) >= self._options.max_waiting_calls:
            self._counters.errors += 1
            raise DeviceBusy(f"{what}: {len(self._waiting)} calls wait already")
        future: asyncio.Future[None] = association.loop.create_future()
        call = Call(what, commands, association, self._clock() + self._timeout_ns, future, mutates=mutates)
        self._waiting.append(call)
        if len(self._waiting) == 1:
            self._pump()
        try:
            await future
        except DeviceError:
            self._counters.errors += 1
            raise
        except asyncio.CancelledError:
            await self._cancel(call)
            raise

    async def _cancel(self, call: Call) -> None:
        """Return when the buffers of `call` are not touched any more.

        Reads are abandoned at once. What may change the namespace gets a short time to conclude, since its buffers
        may be half-sent and its effect is better known than not; then its association ends.
        """
        call.give_up_buffers()
        call.future = asyncio.get_running_loop().create_future()
        call.stop(None)
        if call.mutates and not call.concluded:
            try:
                async with asyncio.timeout(self._options.cancel_grace_ms / 1000):
                    await call.future
            except (TimeoutError, asyncio.CancelledError):
                call.association.end(DeadlinePassed(f"{call.what}: cancelled and not concluded in time"))
        if call.future.done() and not call.future.cancelled():
            call.future.exception()  # The caller is gone; nobody else is to be told.

    def _pump(self) -> None:
        """Send as many waiting commands as there is room for, a command of each call in turn, where the least is queued."""
        waiting, links = self._waiting, self._links
        while waiting:
            best = None
            least_bytes = 0
            for link in links:
                core = link.core
                # By bytes, so that what is small does not queue behind what is large.
                if core.room and (best is None or core.load_bytes < least_bytes):
                    best, least_bytes = link, core.load_bytes
            if best is None:
                return
            call = waiting.popleft()
            if not call.waiting:
                continue
            exchange = call.take()
            if call.waiting:
                waiting.append(call)
            exchange.on_finish = partial(self._finished, call)
            best.submit(exchange)

    def _finished(self, call: Call, exchange: Exchange) -> None:
        if call.finished(exchange) and call not in self._waiting:
            self._waiting.append(call)

    def expire(self, now_ns: int) -> int:
        """Give up waiting calls whose deadline has passed; return the next deadline among them."""
        for call in [call for call in self._waiting if call.deadline_ns <= now_ns]:
            self._waiting.remove(call)
            call.stop(DeviceBusy(f"{call.what}: no room in the queues before the deadline"))
        return min((call.deadline_ns for call in self._waiting), default=NO_DEADLINE)
