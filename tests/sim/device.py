"""A simulated namespace: the block device contract over a `Medium`, in virtual time, with faults from a seed.

Fault model (what the medium itself may do to unflushed data is in `medium.py`):

    latency      each command takes a drawn time, and its effect comes at a drawn moment within it; a write may take effect
                 in two parts, so that a concurrent read sees half of it
    connection   it may break at any moment. Commands in flight raise `OutcomeUnknown(settles_at_ns)`. Of the writes among
                 them some were executed, some never will be, some are executed *late*: any time before `settles_at_ns`,
                 also after the reconnect, in whole or in part. Until it is back, commands raise `DeviceOffline`
    cancel       a write that is cut short ends its association, for everybody, or is waited for
    failure      a command may complete with an error status: a write then has an undefined effect, and is over
    read         bits may flip on the way (the next read is right) or for good; a read may bring another place's bytes;
                 a data digest may fail (`DataCorrupted`)
    reservation  where the medium has them: a write of a host that is kept out fails when its effect would come
    power        loss at command number n: nothing is answered any more; the medium draws what survives
    outage       the target alone loses its power, and comes back: a broken connection behind which unflushed writes may be gone
    death        the gateway's process dies: as a broken connection that nobody hears of

Every fault is counted for the oracle.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tests.sim.faults import Faults, Injected
from tests.sim.medium import SECTOR_BYTES, Image, Medium, Written
from tests.sim.reads import faulty_read, is_work, look_at
from tests.sim.reservations import SimReservations, conflict
from xkv_nvmeof.blockdev import (
    ByteRange,
    CommandFailed,
    DataCorrupted,
    DeviceCounters,
    DeviceIdentity,
    DeviceOffline,
    DeviceState,
    Geometry,
    OutcomeUnknown,
    ReservationConflict,
)
from xkv_nvmeof.spec import IoOpcode, Status

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.sim.loop import SimLoop

COMMANDS_MAX: Final = 10_000
"""Commands in flight, at most: more is a caller without a bound."""


class SimDevice:
    """One host's view of a medium: one association after the other."""

    def __init__(
        self,
        loop: SimLoop,
        medium: Medium,
        rng: random.Random,
        faults: Faults,
        *,
        power_loss_at: int | None = None,
        on_power_loss: Callable[[], None] | None = None,
        host_id: bytes = b"one simulated ho",
    ) -> None:
        self.medium = medium
        self.host_id = host_id
        self.faults = faults
        self.injected = Injected()
        self.commands = 0
        self.settles_at_ns = 0
        self.incarnation = 0
        self._loop = loop
        self._rng = rng
        self._power_loss_at = power_loss_at
        self._on_power_loss = on_power_loss
        self._state = DeviceState.ONLINE
        self.counters = DeviceCounters()
        self._listeners: list[Callable[[DeviceState, str], None]] = []
        self._geometry_listeners: list[Callable[[Geometry, Geometry], None]] = []
        self._in_flight: dict[asyncio.Future[None], Written | None] = {}
        self._numbers: dict[int, int] = {}
        """Number on the medium of each write in flight, by its identity."""
        self._back_online: asyncio.TimerHandle | None = None
        self._dead = False
        """Closed, or power or process gone: no command has an effect any more."""
        self._silent = False
        """Power or process gone: nothing is answered any more."""

    # --- the contract: facts --------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        medium = self.medium
        return Geometry(
            block_bytes=medium.block_bytes,
            block_count=medium.size_bytes // medium.block_bytes,
            volatile_write_cache=medium.volatile,
            can_deallocate=True,
            deallocate_zeroes=True,
            can_write_zeroes=True,
            preferred_io_bytes=128 << 10,
        )

    @property
    def identity(self) -> DeviceIdentity:
        return DeviceIdentity("nqn.2026-01.test:sim", 1, b"\x01" * 16, b"\x02" * 16, "SIM0", "simulated")

    @property
    def state(self) -> DeviceState:
        return self._state

    @property
    def reservations(self) -> SimReservations | None:
        return None if self.medium.reservations is None else SimReservations(self)

    def add_state_listener(self, listener: Callable[[DeviceState, str], None]) -> None:
        self._listeners.append(listener)

    def add_geometry_listener(self, listener: Callable[[Geometry, Geometry], None]) -> None:
        self._geometry_listeners.append(listener)

    # --- the contract: commands -----------------------------------------------------------------------------

    async def read_into(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        length_bytes = sum(map(len, views))
        if not is_work(self.medium, offset_bytes, length_bytes):
            return
        data = b""

        def execute() -> None:
            nonlocal data
            data = faulty_read(self.medium, self.faults, self._rng, self.injected, offset_bytes, length_bytes)

        await self._command(execute, None)
        at = 0
        for buffer in views:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)
        self.counters.read_commands += 1
        self.counters.read_bytes += length_bytes

    async def write_from(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        data = b"".join(buffers)
        if not is_work(self.medium, offset_bytes, len(data)):
            return
        await self._write(Written(offset_bytes, data, self.host_id))
        assert data == b"".join(buffers), "the caller changed a buffer that belonged to the device"
        self.counters.write_commands += 1
        self.counters.write_bytes += len(data)

    async def flush(self) -> None:
        if self.faults.outage_probability and self._rng.random() < self.faults.outage_probability:
            self.lose_power_of_target(self.medium.draw_survivor(self._rng), self.faults.offline_ns_max)
        covered = self.medium.returned_so_far()

        def execute() -> None:
            self._keep_out(IoOpcode.FLUSH)
            self.medium.flush(covered)

        await self._command(execute, None)
        self.counters.flush_commands += 1

    async def deallocate(self, ranges: Sequence[ByteRange]) -> None:
        for part in ranges:
            if is_work(self.medium, part.offset_bytes, part.length_bytes):
                await self._write(Written(part.offset_bytes, bytes(part.length_bytes), self.host_id))
        self.counters.deallocate_commands += 1

    async def write_zeroes(self, byte_range: ByteRange) -> None:
        if not is_work(self.medium, byte_range.offset_bytes, byte_range.length_bytes):
            return
        await self._write(Written(byte_range.offset_bytes, bytes(byte_range.length_bytes), self.host_id))
        self.counters.write_zeroes_commands += 1

    async def reserve(self, execute: Callable[[], None]) -> None:
        """Run a command about reservations."""
        await self._command(execute, None)

    async def aclose(self) -> None:
        if self._back_online is not None:
            self._back_online.cancel()
        self._set_state(DeviceState.OFFLINE, "closed")
        self._dead = True

    # --- faults from outside --------------------------------------------------------------------------------

    def break_connection(self, offline_ns: int) -> None:
        """End the association; a new one comes after `offline_ns`."""
        if self._dead or self._state is DeviceState.OFFLINE:
            return
        self.injected.breaks += 1
        self.incarnation += 1
        settles_at_ns = self.settles_at_ns = self._loop.clock() + self.faults.settle_ns
        in_flight, self._in_flight = self._in_flight, {}
        for future, write in in_flight.items():
            if write is not None:
                self._leave_behind(write)
            if not future.done():
                self.injected.unknown_outcomes += 1
                self.counters.errors += 1
                future.set_exception(OutcomeUnknown("the connection broke", settles_at_ns=settles_at_ns))
        self._set_state(DeviceState.OFFLINE, "the connection broke")
        self._back_online = self._loop.call_later(offline_ns / 1e9, self._reconnect)

    def resize(self, size_bytes: int) -> None:
        """The namespace has another size from now on; what was beyond that is gone for good."""
        before = self.geometry
        self.medium.resize(size_bytes)
        for listener in self._geometry_listeners:
            listener(before, self.geometry)

    def lose_power_of_target(self, image: Image, offline_ns: int) -> None:
        """The target loses its power, and is back after `offline_ns` with `image`, one of the survivors. This host lives on."""
        if self._state is DeviceState.ONLINE:
            self.injected.outages += 1
            self.break_connection(offline_ns)
            self.medium.lose_power(image)

    def lose_power(self) -> None:
        """Host and target lose their power: callers never hear of their commands. The medium is left to the caller."""
        self._dead = self._silent = True
        self._in_flight.clear()
        if self._on_power_loss is not None:
            self._on_power_loss()

    def die(self) -> None:
        """The host's process dies, the target lives on: what was sent may be executed until it is settled."""
        in_flight, self._in_flight = self._in_flight, {}
        for write in in_flight.values():
            if write is not None:
                self._leave_behind(write)
        self._dead = self._silent = True

    # --- inside -----------------------------------------------------------------------------------------------

    async def _write(self, write: Written) -> None:
        """Carry a write to the medium, in one or two parts."""
        sectors = len(write.data) // SECTOR_BYTES
        middle = self._rng.randrange(sectors + 1)

        def first_part() -> None:
            number = self._numbers.get(id(write))
            if number in self.medium.in_flight and 0 < middle < sectors and not self._kept_out():
                self.medium.execute(number, 0, middle)

        def rest() -> None:
            self._keep_out(IoOpcode.WRITE, write)
            number = self._numbers.pop(id(write), None)
            if number is not None:
                # The whole of it: timers of one moment come in any order, so the first part may not have been executed.
                self.medium.execute(number)

        await self._command(rest, write, first_part)
        write.returned = True

    async def _command(
        self, execute: Callable[[], None], write: Written | None, earlier: Callable[[], None] | None = None
    ) -> None:
        await self._start(write)
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(look_at)
        self._in_flight[future] = write
        duration_ns = self._latency_ns()
        executes_ns = self._rng.randrange(duration_ns + 1)
        fails = self._rng.random() < self.faults.fail_probability
        breaks = self._rng.random() < self.faults.break_probability

        def effect() -> None:
            if future not in self._in_flight or self._dead:
                return
            if breaks:
                self.break_connection(1 + self._rng.randrange(self.faults.offline_ns_max))
            elif not fails:
                try:
                    execute()
                except (DataCorrupted, ReservationConflict) as error:
                    self.counters.errors += 1
                    future.set_exception(error)
            elif write is not None:
                self._half_done(write)

        if earlier is not None:
            earlier_s = self._rng.randrange(executes_ns + 1) / 1e9
            self._loop.call_later(earlier_s, lambda: None if future.done() or self._dead else earlier())
        self._loop.call_later(executes_ns / 1e9, effect)
        self._loop.call_later(duration_ns / 1e9, self._complete, future, fails)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            if self._in_flight.get(future) is not None:
                await self._cut_short(future)
            raise
        finally:
            self._over(future)

    def _over(self, future: asyncio.Future[None]) -> None:
        left = self._in_flight.pop(future, None)
        if left is not None and not (future.done() or self._silent):
            self._leave_behind(left)  # cancelled twice: nobody waits for it any more

    async def _cut_short(self, future: asyncio.Future[None]) -> None:
        """A write is cancelled: either its association ends, or it is waited for. Its buffers are free afterwards."""
        if self._rng.random() < self.faults.break_on_cancel_probability:
            self.break_connection(1 + self._rng.randrange(self.faults.offline_ns_max))
        elif not self._silent:
            await asyncio.wait((future,))

    async def _start(self, write: Written | None) -> None:
        if not self._dead:
            self.commands += 1
            if self.commands == self._power_loss_at:
                self.lose_power()
        if self._silent:
            await self._loop.create_future()  # whoever waits is gone as well
        if self._dead or self._state is DeviceState.OFFLINE:
            raise DeviceOffline("no connection")
        assert len(self._in_flight) < COMMANDS_MAX, "more commands in flight than any caller should send"
        if write is not None:
            self._numbers[id(write)] = self.medium.send(write)

    def _complete(self, future: asyncio.Future[None], fails: bool) -> None:
        if future.done() or self._dead or future not in self._in_flight:
            return
        if not fails:
            future.set_result(None)
            return
        self.injected.failures += 1
        self.counters.errors += 1
        future.set_exception(
            CommandFailed(
                "simulated", status_code_type=0, status_code=Status.INTERNAL_ERROR, do_not_retry=False
            )
        )

    def _latency_ns(self) -> int:
        slow = self._rng.random() < self.faults.slow_probability
        return 1000 + self._rng.randrange(self.faults.slow_ns_max if slow else self.faults.latency_ns_max)

    def _kept_out(self, opcode: IoOpcode = IoOpcode.WRITE) -> bool:
        table = self.medium.reservations
        return table is not None and table.conflict(opcode, self.host_id)

    def _keep_out(self, opcode: IoOpcode, write: Written | None = None) -> None:
        """Fail where a reservation keeps this host from it, or has ended it with all others of its host."""
        number = None if write is None else self._numbers.get(id(write))
        if self._kept_out(opcode) or (number is not None and number not in self.medium.in_flight):
            self.medium.forget(self._numbers.pop(id(write), -1))
            raise conflict()

    def _half_done(self, write: Written) -> None:
        """A write that fails is over: any part of it may have been executed."""
        number = self._numbers.pop(id(write), None)
        if number not in self.medium.in_flight or self._kept_out():
            return
        sectors = len(write.data) // SECTOR_BYTES
        upto = self._rng.randrange(sectors)
        if upto:
            self.medium.execute(number, 0, upto)
        self.medium.forget(number)

    def _leave_behind(self, write: Written) -> None:
        """Decide what becomes of a write whose association ended."""
        # For the controller it is complete once it is executed, whoever hears of that: a flush covers it then.
        write.returned = True
        number = self._numbers.pop(id(write), None)
        if number not in self.medium.in_flight or self._kept_out():
            return  # executed before the connection broke, or never
        if self._rng.random() < self.faults.late_probability:
            delay_ns = self._rng.randrange(self.faults.settle_ns)
            self.injected.late_writes += 1
            self._loop.call_later(delay_ns / 1e9, self._land, number)
        elif self._rng.random() < 0.5:
            self.medium.execute(number)
        else:
            self.medium.forget(number)

    def _land(self, number: int) -> None:
        if number in self.medium.in_flight and not self._kept_out():
            self.medium.execute(number)
            self.injected.landed_late += 1

    def _reconnect(self) -> None:
        self._back_online = None
        if not self._dead:
            self.counters.reconnects += 1
            self._set_state(DeviceState.ONLINE, "connected again")

    def _set_state(self, state: DeviceState, reason: str) -> None:
        if state is self._state:
            return
        self._state = state
        for listener in self._listeners:
            listener(state, reason)
