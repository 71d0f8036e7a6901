"""Calls of the block device contract as runs of commands: how they are cut, counted and concluded."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.blockdev import DataCorrupted, DeviceError, DeviceOffline, OutcomeUnknown
from xkv_nvmeof.command import BlockRange, encode_ranges
from xkv_nvmeof.host_command import Exchange, Outcome, cut
from xkv_nvmeof.initiator_errors import command_failed
from xkv_nvmeof.reservation import EXTENDED
from xkv_nvmeof.spec import PSDT_SGL, IoOpcode, SglType, Status

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence

    from xkv_nvmeof.initiator_association import Association

_ENTRY: Final = Struct("<BB2xI24xI3xBQI12x")
"""A submission entry of an I/O command (Base 3.3.3.1) with cdw10 and cdw11 as the first block."""
_DATA_IN_PDUS: Final = int(SglType.TRANSPORT_DATA_BLOCK)
_COMPLETED: Final = Outcome.COMPLETED
_NOT_ITS_FAULT: Final = frozenset({Status.TRANSIENT_TRANSPORT_ERROR, Status.COMMAND_INTERRUPTED})
"""Data from this host was damaged on its way, or the controller had to do something else (Base 3.3.3.2.1.1)."""
_READ: Final = IoOpcode.READ
_DEALLOCATE: Final = 1 << 2


def entry(opcode: int, nsid: int, first_block: int, cdw12: int, length_bytes: int) -> bytearray:
    """Return the entry of an I/O command whose dwords 10 and 11 are a block address (NVM 3.2)."""
    return bytearray(_ENTRY.pack(opcode, PSDT_SGL, nsid, length_bytes, _DATA_IN_PDUS, first_block, cdw12))


class Call:
    """One call: its commands, cut only when there is room for them, and its one conclusion.

    `future` is resolved when nothing of the call is in flight any more. `mutates`: what was sent may change the
    namespace, so a lost command leaves the outcome of the whole call unknown. `only`: the one association by which it may go.
    """

    __slots__ = (
        "_ahead",
        "_commands",
        "_lost",
        "_settles_at_ns",
        "_stopped",
        "concluded",
        "deadline_ns",
        "error",
        "executed_any",
        "future",
        "in_flight",
        "mutates",
        "only",
        "what",
    )

    def __init__(
        self,
        what: str,
        commands: Iterator[Exchange],
        deadline_ns: int,
        future: asyncio.Future[None],
        *,
        mutates: bool,
        only: Association | None = None,
    ) -> None:
        self.what = what
        self.only = only
        self.deadline_ns = deadline_ns
        self.future = future
        self.mutates = mutates
        self.in_flight: dict[Exchange, Association] = {}
        """By which association each command went."""
        self.error: DeviceError | None = None
        self.executed_any = False
        self.concluded = False
        self._commands = commands
        self._ahead: list[Exchange] = []
        self._lost = False
        self._settles_at_ns = 0
        """From when on no lost command of this call can be executed any more."""
        self._stopped = False
        self._look_ahead()

    def _look_ahead(self) -> None:
        following = next(self._commands, None)
        if following is not None:
            following.deadline_ns = self.deadline_ns
            self._ahead.append(following)

    @property
    def waiting(self) -> bool:
        """Whether the call has commands that still wait for room."""
        return bool(self._ahead)

    @property
    def stopped(self) -> bool:
        """Whether no more of it is to be sent."""
        return self._stopped

    @property
    def next_send_bytes(self) -> int:
        """Data that the next command to send writes; 0 where it writes none, or there is none."""
        return self._ahead[0].send_bytes if self._ahead else 0

    def take(self, association: Association) -> Exchange:
        """Return the next command, to be sent by `association`; there is one."""
        ahead = self._ahead
        exchange = ahead.pop()
        if not ahead:
            self._look_ahead()
        self.in_flight[exchange] = association
        return exchange

    def stop(self, error: DeviceError | None) -> None:
        """Send no more of this call; conclude as soon as nothing of it is in flight."""
        self._stopped = True
        self._ahead.clear()
        self._commands = iter(())
        if self.error is None:
            self.error = error
        if not self.in_flight:
            self._conclude()

    def again(self, exchange: Exchange) -> None:
        """A command that is over is to be sent by another association; if it was lost, it may be executed twice."""
        association = self.in_flight.pop(exchange)
        if exchange.outcome is Outcome.LOST:
            self._settles_at_ns = max(self._settles_at_ns, association.settles_at_ns)
        exchange.move()
        exchange.deadline_ns = self.deadline_ns
        self._ahead.append(exchange)

    def finished(self, exchange: Exchange) -> bool:
        """Take the end of one command; return whether the call waits for room (again)."""
        in_flight = self.in_flight
        association = in_flight.pop(exchange)
        outcome = exchange.outcome
        if outcome is _COMPLETED:
            self.executed_any = True
            if not exchange.status:
                if not in_flight and not self._ahead:
                    self._conclude()
                    return False
            elif (
                exchange.status in _NOT_ITS_FAULT and not exchange.do_not_retry and self._once_more(exchange)
            ):
                return True
            else:
                self.stop(command_failed(self.what, exchange.status, do_not_retry=exchange.do_not_retry))
        elif outcome is Outcome.CORRUPT:
            if self._once_more(exchange):
                return True
            self.stop(DataCorrupted(f"{self.what}: the data digest did not match, also when repeated"))
        else:
            self._lose(association, association.reason, lost=outcome is Outcome.LOST)
        if not self.in_flight and not self._ahead:
            self._conclude()
        return bool(self._ahead)

    def _once_more(self, exchange: Exchange) -> bool:
        """Send a command again with which nothing is wrong itself; False: that has been done."""
        if exchange.tries or self._stopped:
            return False
        exchange.tries += 1
        self._ahead.append(exchange)
        return True

    def association_ended(self, association: Association, reason: str) -> None:
        """Conclude a call that waits while there is no association left: nothing more can be sent."""
        self._lose(association, reason, lost=False)

    def _lose(self, association: Association, reason: str, *, lost: bool) -> None:
        if lost or (self.mutates and self.executed_any):
            self._lost = True
            self._settles_at_ns = max(self._settles_at_ns, association.settles_at_ns)
        self.stop(DeviceOffline(f"{self.what}: {reason}"))

    def give_up_buffers(self) -> None:
        """Never touch the buffers of reads again."""
        for exchange in self.in_flight:
            exchange.abandon()

    def _conclude(self) -> None:
        if self.concluded:
            return
        self.concluded = True
        future = self.future
        if future.done():
            return
        if self._lost or (self.error is not None and self.mutates and self._settles_at_ns):
            message = str(self.error) if self.error is not None else self.what
            future.set_exception(OutcomeUnknown(message, settles_at_ns=self._settles_at_ns))
        elif self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(None)


def byte_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return `buffers` as views of bytes, without the empty ones."""
    if len(buffers) == 1 and buffers[0].format == "B" and buffers[0].ndim == 1 and len(buffers[0]):
        return [buffers[0]]
    return [
        view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in buffers if view.nbytes
    ]


def transfers(
    opcode: IoOpcode,
    nsid: int,
    block: int,
    offset_bytes: int,
    views: list[memoryview],
    total: int,
    limit: int,
) -> Iterator[Exchange]:
    """Yield Reads or Writes of at most `limit` bytes each that together transfer `views`."""
    return (
        transfer(opcode, nsid, block, offset_bytes + at, cut(views, at, limit), min(limit, total - at))
        for at in range(0, total, limit)
    )


def transfer(
    opcode: IoOpcode, nsid: int, block: int, offset_bytes: int, views: list[memoryview], size: int
) -> Exchange:
    """Return the one Read or Write of `size` bytes that transfers `views`."""
    sqe = entry(opcode, nsid, offset_bytes // block, size // block - 1, size)
    if opcode is _READ:
        return Exchange(sqe, receive=views, receive_bytes=size)
    return Exchange(sqe, send=views, send_bytes=size)


def zeroing(nsid: int, first_block: int, block_count: int, limit_blocks: int) -> Iterator[Exchange]:
    """Yield Write Zeroes commands of at most `limit_blocks` each (NVM 3.2.8)."""
    end = first_block + block_count
    while first_block < end:
        count = min(limit_blocks, end - first_block)
        yield Exchange(entry(IoOpcode.WRITE_ZEROES, nsid, first_block, count - 1, 0))
        first_block += count


def deallocations(nsid: int, ranges: list[BlockRange], limit_ranges: int) -> Iterator[Exchange]:
    """Yield Dataset Management commands of at most `limit_ranges` ranges each (NVM 3.2.3)."""
    for start in range(0, len(ranges), limit_ranges):
        some = ranges[start : start + limit_ranges]
        data = memoryview(encode_ranges(some))
        first = (len(some) - 1) | _DEALLOCATE << 32
        sqe = entry(IoOpcode.DATASET_MANAGEMENT, nsid, first, 0, len(data))
        yield Exchange(sqe, send=[data], send_bytes=len(data))


def reservation(
    opcode: IoOpcode, nsid: int, dword_10: int, *, send: bytes = b"", receive: memoryview | None = None
) -> Iterator[Exchange]:
    """Yield one command about reservations (Base 7.2 to 7.5); a report asks for extended data."""
    if receive is not None:
        sqe = entry(opcode, nsid, dword_10 | EXTENDED << 32, 0, len(receive))
        yield Exchange(sqe, receive=[receive], receive_bytes=len(receive))
        return
    sqe = entry(opcode, nsid, dword_10, 0, len(send))
    yield Exchange(sqe, send=[memoryview(send)], send_bytes=len(send))


def flush(nsid: int) -> Exchange:
    """Return the Flush of a namespace (Base 7.1)."""
    return Exchange(entry(IoOpcode.FLUSH, nsid, 0, 0, 0))
