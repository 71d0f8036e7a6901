"""Keeps hosts from what a reservation forbids, and carries out the commands about reservations (Base 7.2 to 7.5). Pure.

A command is judged when it arrives, and again when its data is complete. A Preempt and Abort completes when no command that
changes the namespace is being executed for the hosts that it ended: those that have not begun are refused by then.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.controller_io import inbound_status, outbound_status
from xkv_nvmeof.controller_reservations import ReservationTable
from xkv_nvmeof.controller_types import IoCommand, ReadCommand, Reply, ShutdownCommand
from xkv_nvmeof.reservation import (
    EXTENDED,
    ONE_KEY_BYTES,
    REPORT_BYTES,
    TWO_KEYS_BYTES,
    ReservationReport,
    decode_key,
    decode_keys,
)
from xkv_nvmeof.spec import PSDT_SGL, IoOpcode, Status

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.controller_connection import ControllerConnection

DATA_BYTES: Final[dict[int, int]] = {
    IoOpcode.RESERVATION_REGISTER: TWO_KEYS_BYTES,
    IoOpcode.RESERVATION_ACQUIRE: TWO_KEYS_BYTES,
    IoOpcode.RESERVATION_RELEASE: ONE_KEY_BYTES,
}
"""Commands about reservations whose data comes from the host."""
_HARMLESS: Final = (ReadCommand, ShutdownCommand)
"""What changes nothing: nobody waits for its end."""
COMMANDS: Final = frozenset({*DATA_BYTES, IoOpcode.RESERVATION_REPORT})


class Guard:
    """The reservations of one namespace, and who waits for whom because of them."""

    def __init__(self, nsid: int, *, enabled: bool) -> None:
        self.table = ReservationTable()
        self._nsid = nsid
        self._enabled = enabled
        self._executing: Counter[bytes] = Counter()
        self._waiting: list[tuple[frozenset[bytes], ControllerConnection, int]] = []
        """Acquires that wait until nothing of these hosts is executed any more."""

    def concerns(self, opcode: int) -> bool:
        """Tell whether a command is about reservations."""
        return self._enabled and opcode in COMMANDS

    def refuses(self, connection: ControllerConnection, opcode: int) -> bool:
        """Tell whether a reservation keeps this host from such a command."""
        return self.table.conflict(opcode, _host_id(connection))

    # ---- what is being executed --------------------------------------------------------------------------------

    def began(self, connection: ControllerConnection, command: IoCommand) -> None:
        """The shell has got a command of this host."""
        if not isinstance(command, _HARMLESS):
            self._executing[_host_id(connection)] += 1

    def finished(self, connection: ControllerConnection, command: IoCommand) -> None:
        """A command of this host is over, or was never begun."""
        if isinstance(command, _HARMLESS):
            return
        host_id = _host_id(connection)
        self._executing[host_id] -= 1
        if self._executing[host_id]:
            return
        del self._executing[host_id]
        waiting, self._waiting = self._waiting, []
        for hosts, acquirer, cid in waiting:
            self._complete(acquirer, cid, hosts)

    def _complete(self, connection: ControllerConnection, cid: int, aborted: frozenset[bytes]) -> None:
        if any(host_id in self._executing for host_id in aborted):
            self._waiting.append((aborted, connection, cid))
        else:
            connection.reply(cid, Reply())

    # ---- commands ----------------------------------------------------------------------------------------------

    def arrived(self, connection: ControllerConnection, entry: SubmissionEntry, data: memoryview) -> None:
        """Take a command about reservations; `data` came in its capsule."""
        if entry.flags != PSDT_SGL:
            connection.reply(entry.cid, Reply(Status.INVALID_FIELD))
        elif entry.nsid != self._nsid:
            connection.reply(entry.cid, Reply(Status.INVALID_NAMESPACE))
        elif entry.opcode == IoOpcode.RESERVATION_REPORT:
            connection.reply(entry.cid, self._report(entry, len(data)))
        else:
            length_bytes = DATA_BYTES[entry.opcode]
            status = inbound_status(entry, len(data), length_bytes)
            if status:
                connection.reply(entry.cid, Reply(status))
            elif data:
                self.carry_out(connection, entry, data)
            else:
                connection.transfers.begin(entry, length_bytes)

    def carry_out(self, connection: ControllerConnection, entry: SubmissionEntry, data: memoryview) -> None:
        """Carry out a command whose data is complete."""
        table, host_id = self.table, _host_id(connection)
        if entry.opcode == IoOpcode.RESERVATION_ACQUIRE:
            acquired = table.acquire(host_id, entry.cdw10, *decode_keys(data))
            if acquired.status is Status.SUCCESS:
                self._complete(connection, entry.cid, acquired.abort)
            else:
                connection.reply(entry.cid, Reply(acquired.status))
        elif entry.opcode == IoOpcode.RESERVATION_REGISTER:
            connection.reply(entry.cid, Reply(table.register(host_id, entry.cdw10, *decode_keys(data))))
        else:
            connection.reply(entry.cid, Reply(table.release(host_id, entry.cdw10, decode_key(data))))

    def _report(self, entry: SubmissionEntry, capsule_bytes: int) -> Reply:
        length_bytes = (entry.cdw10 + 1) * 4
        if not entry.cdw11 & EXTENDED:
            return Reply(Status.HOST_IDENTIFIER_INCONSISTENT)
        if length_bytes > REPORT_BYTES:
            return Reply(Status.INVALID_FIELD)
        status = outbound_status(entry, capsule_bytes, length_bytes)
        if status:
            return Reply(status)
        report = ReservationReport(self.table.status()).to_bytes()
        return Reply(data=report[:length_bytes].ljust(length_bytes, b"\0"))


def _host_id(connection: ControllerConnection) -> bytes:
    assert connection.controller is not None
    return connection.controller.host.hostid
