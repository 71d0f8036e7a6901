"""Reservations of the initiator's namespace (Base 8.19), as `blockdev.Reservations` has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import CommandFailed, ReservationStatus, ReservationType
from xkv_nvmeof.command import CommandFormatError
from xkv_nvmeof.initiator_calls import reservation
from xkv_nvmeof.reservation import (
    REPORT_BYTES,
    AcquireAction,
    RegisterAction,
    ReleaseAction,
    ReservationReport,
    encode_key,
    encode_keys,
)
from xkv_nvmeof.spec import IoOpcode, Status

if TYPE_CHECKING:
    from xkv_nvmeof.initiator_dispatch import Dispatcher

_TYPE = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY << 8
"""RTYPE of Acquire and Release."""


class NamespaceReservations:
    """Sends the commands; see `blockdev.Reservations`."""

    def __init__(self, dispatcher: Dispatcher, nsid: int, host_id: bytes) -> None:
        self._dispatcher = dispatcher
        self._nsid = nsid
        self._host_id = host_id

    @property
    def host_id(self) -> bytes:
        """Who this host is to the controller."""
        return self._host_id

    async def report(self) -> ReservationStatus:
        """Return who is registered, and who has the namespace reserved.

        Raises:
            DeviceError: as the block device contract says; `CommandFailed` also where the report is malformed.
        """
        what, data = "RESERVATION REPORT", memoryview(bytearray(REPORT_BYTES))
        commands = reservation(IoOpcode.RESERVATION_REPORT, self._nsid, REPORT_BYTES // 4 - 1, receive=data)
        await self._dispatcher.run(what, commands, mutates=False)
        try:
            return ReservationReport.from_bytes(data).status
        except CommandFormatError as error:
            status = Status.INTERNAL_ERROR
            raise CommandFailed(
                f"{what}: {error}",
                status_code_type=status.code_type,
                status_code=status.code,
                do_not_retry=True,
            ) from error

    async def register(self, key: int, *, before: int | None = None) -> None:
        """Register this host under `key`, or replace its key `before`."""
        action = RegisterAction.REGISTER if before is None else RegisterAction.REPLACE
        await self._send(IoOpcode.RESERVATION_REGISTER, action, encode_keys(before or 0, key))

    async def unregister(self, key: int) -> None:
        """Take the registration of this host back."""
        await self._send(IoOpcode.RESERVATION_REGISTER, RegisterAction.UNREGISTER, encode_keys(key, 0))

    async def acquire(self, key: int) -> None:
        """Reserve the namespace."""
        await self._send(IoOpcode.RESERVATION_ACQUIRE, AcquireAction.ACQUIRE | _TYPE, encode_keys(key, 0))

    async def preempt(self, key: int, victim: int, *, abort: bool) -> None:
        """End the registrations under the key `victim`, and take its reservation."""
        action = AcquireAction.PREEMPT_AND_ABORT if abort else AcquireAction.PREEMPT
        await self._send(IoOpcode.RESERVATION_ACQUIRE, action | _TYPE, encode_keys(key, victim))

    async def release(self, key: int) -> None:
        """Give the reservation back."""
        await self._send(IoOpcode.RESERVATION_RELEASE, ReleaseAction.RELEASE | _TYPE, encode_key(key))

    async def _send(self, opcode: IoOpcode, dword_10: int, data: bytes) -> None:
        what = opcode.name.replace("_", " ")
        commands = reservation(opcode, self._nsid, int(dword_10), send=data)
        await self._dispatcher.run(what, commands, mutates=False)
