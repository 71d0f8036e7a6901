"""Reservations of a simulated namespace: the product's own table behind the latency and the faults of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import ReservationConflict, ReservationStatus, ReservationType
from xkv_nvmeof.initiator_errors import command_failed
from xkv_nvmeof.reservation import AcquireAction, RegisterAction, ReleaseAction
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.device import SimDevice
    from xkv_nvmeof.controller_reservations import ReservationTable

TYPE = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY << 8


def conflict() -> ReservationConflict:
    """What a write hears that a reservation keeps out."""
    status = Status.RESERVATION_CONFLICT
    return ReservationConflict(
        "simulated", status_code_type=status.code_type, status_code=status.code, do_not_retry=True
    )


class SimReservations:
    """See `blockdev.Reservations`."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device

    @property
    def host_id(self) -> bytes:
        return self._device.host_id

    @property
    def _table(self) -> ReservationTable:
        table = self._device.medium.reservations
        assert table is not None
        return table

    async def report(self) -> ReservationStatus:
        found: list[ReservationStatus] = []

        def work() -> Status:
            found.append(self._table.status())
            return Status.SUCCESS

        await self._run(work)
        return found[0]

    async def register(self, key: int, *, before: int | None = None) -> None:
        action = RegisterAction.REGISTER if before is None else RegisterAction.REPLACE
        await self._run(lambda: self._table.register(self.host_id, action, before or 0, key))

    async def unregister(self, key: int) -> None:
        await self._run(lambda: self._table.register(self.host_id, RegisterAction.UNREGISTER, key, 0))

    async def acquire(self, key: int) -> None:
        await self._run(
            lambda: self._table.acquire(self.host_id, AcquireAction.ACQUIRE | TYPE, key, 0).status
        )

    async def preempt(self, key: int, victim: int, *, abort: bool) -> None:
        action = AcquireAction.PREEMPT_AND_ABORT if abort else AcquireAction.PREEMPT

        def work() -> Status:
            acquired = self._table.acquire(self.host_id, action | TYPE, key, victim)
            self._device.medium.abort(acquired.abort)
            return acquired.status

        await self._run(work)

    async def release(self, key: int) -> None:
        await self._run(lambda: self._table.release(self.host_id, ReleaseAction.RELEASE | TYPE, key))

    async def _run(self, work: Callable[[], Status]) -> None:
        status = Status.SUCCESS

        def execute() -> None:
            nonlocal status
            status = work()

        await self._device.reserve(execute)
        if status is not Status.SUCCESS:
            raise command_failed("simulated", status, do_not_retry=True)
